"""`weights="int8"` and `"int4"`: tokens of the quantised model, whatever the batch, and no other weights in memory."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from fake_runner import FakeRunner  # noqa: E402
from families import each, prompts, tiny_model  # noqa: E402

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, release, use  # noqa: E402
from pagepool.integrations.transformers.quantised import (  # noqa: E402
    QuantisedEmbedding,
    QuantisedLinear,
    pack,
    quantise_linears,
    quantised,
)

SECONDS = 300
KINDS = ("int8", "int4")
TOKENS = 24


def generated(model, one_by_one=False, **options):
    found = []
    with Engine(model, **options) as engine:
        for prompt in prompts():
            running = engine.submit(prompt, SamplingParams(TOKENS))
            found.append(running.result(SECONDS) if one_by_one else running)
        return [generation.result(SECONDS).token_ids for generation in found]


def weights_of(kind, shape, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return weight, quantised(weight, kind)


@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (64, 1024)])
@pytest.mark.parametrize(("kind", "bytes_of_group", "most"), [("int8", 34, 0.01), ("int4", 20, 0.11)])
def test_weights_are_near_their_origin_and_take_the_bytes_of_their_format(kind, bytes_of_group, most, shape):
    weight, packed = weights_of(kind, shape)
    found = packed.rows(torch.arange(len(weight)))
    assert ((found - weight).pow(2).mean() / weight.pow(2).mean()).sqrt() < most
    assert packed.data.numel() == -(-shape[0] // 32) * 32 * shape[1] // 32 * bytes_of_group
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    own, result = x @ found.T, QuantisedLinear(packed)(x)
    assert (own - result).norm() < 0.02 * own.norm()


def test_levels_of_four_bits_without_a_least_weight():
    levels = torch.arange(16, dtype=torch.uint8).repeat(3).view(1, 3, 16)
    packed = pack(1, levels, torch.tensor([[1.0, 0.5, 2.0]], dtype=torch.float16))
    group = torch.cat((torch.arange(16) - 8, torch.full((16,), -8)))
    assert torch.equal(packed.rows(torch.tensor([0]))[0], torch.cat((group, group * 0.5, group * 2)))


def test_groups_of_equal_weights_and_of_zeros_are_exact():
    weight = torch.zeros(2, 64)
    weight[0, :32] = 0.5
    for kind in KINDS:
        found = quantised(weight, kind).rows(torch.arange(2))
        assert torch.allclose(found, weight, rtol=1e-3) and not found[1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", each(["Llama", "Qwen2", "Gemma3", "Bamba", "Mamba2"]))
def test_tokens_are_those_of_the_quantised_model_alone_and_in_a_batch(family, kind):
    model = tiny_model(family).to(torch.bfloat16)
    together = generated(model, weights=kind)
    assert any(isinstance(module, QuantisedLinear) for module in model.modules())
    assert generated(model, weights=kind, one_by_one=True) == together
    assert generated(model, pack_weights=False) == together


def test_tokens_do_not_depend_on_chunks_and_preemption():
    model = tiny_model("Llama").to(torch.bfloat16)
    together = generated(model, weights="int4")
    few = SchedulerConfig(max_sequences=4, max_batch_sequences=4, max_prefill_tokens=3)
    assert generated(model, config=few) == together
    assert generated(model, num_blocks=16) == together


def test_float32_models_run():
    model = tiny_model("Llama")
    together = generated(model, weights="int8")
    assert generated(model, weights="int8", one_by_one=True) == together


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_replaced_and_a_tied_embedding_shares_those_of_the_output(kind):
    model = tiny_model("Llama", tie_word_embeddings=True).to(torch.bfloat16)
    own = model.get_input_embeddings().weight.detach().float()
    quantise_linears(model, kind)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantisedEmbedding) and head.form == 0
    assert {weight.dim() for weight in model.parameters()} == {1}  # norms
    ids = torch.tensor([[3, 0, 5]])
    assert torch.allclose(embedding(ids).float(), own[ids], atol=0.02 * own.abs().max())
    assert embedding._weight.data.data_ptr() == head.packed.data_ptr()
    for wrong in (-1, len(own)):
        with pytest.raises(IndexError, match=f"0 to {len(own) - 1}"):
            embedding(torch.tensor([wrong]))


def test_the_fingerprint_has_the_quantisation():
    model = tiny_model("Llama").to(torch.bfloat16)
    texts = []
    for options in ({}, {"weights": "int8"}):
        runner = ModelRunner(model, num_blocks=8, **options)
        texts.append(runner.fingerprint("a digest").text)
        runner.close()
    assert '"quantised"' not in texts[0] and '"quantised": "int8"' in texts[1]


@pytest.fixture
def pool_name():
    name = f"quantised-{os.getpid()}"
    yield name
    Path(f"/dev/shm/pagepool-{name}").unlink()


def test_engines_of_a_quantised_model_share_a_pool_and_others_are_refused(pool_name):
    model, options = tiny_model("Llama").to(torch.bfloat16), {"num_blocks": 64, "shared_pool": pool_name}
    with Engine(model, weights="int8", weights_digest="a", **options) as engine:
        expected = engine.submit(prompts()[0], SamplingParams(4)).result(SECONDS).token_ids
        other = tiny_model("Llama").to(torch.bfloat16)
        with Engine(other, weights="int8", weights_digest="a", **options) as second:
            assert second.submit(prompts()[0], SamplingParams(4)).result(SECONDS).token_ids == expected
        for weights in (None, "int4"):
            with pytest.raises(ValueError, match=pool_name):
                Engine(tiny_model("Llama").to(torch.bfloat16), weights=weights, weights_digest="a", **options)


def test_wrong_kinds_are_refused_and_change_nothing():
    model = tiny_model("Llama")
    with pytest.raises(ValueError, match=r"^weights must be None, 'int8' or 'int4', not 'int2'$"):
        ModelRunner(model, num_blocks=8, weights="int2")
    with pytest.raises(ValueError, match="pool_bytes"):
        ModelRunner(model, pool_bytes=1, weights="int8")
    assert not any(isinstance(module, QuantisedLinear) for module in model.modules())
    quantise_linears(model, "int8")
    with pytest.raises(ValueError, match=r"'int4', but those of this LlamaForCausalLM are 'int8' already"):
        ModelRunner(model, num_blocks=8, weights="int4")
    odd = {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    with pytest.raises(ValueError, match="no linear layer"):
        ModelRunner(tiny_model("Llama", head_dim=8, **odd), num_blocks=8, weights="int8")
    with pytest.raises(ValueError, match="'int8' is for a model"):
        Engine(FakeRunner(), weights="int8")


def test_rows_that_do_not_fit_are_refused():
    layer = QuantisedLinear(weights_of("int8", (8, 64))[1])
    with pytest.raises(ValueError, match="64 inputs, and rows have 32"):
        layer(torch.zeros(2, 32))
    with pytest.raises(TypeError, match="float64"):
        layer(torch.zeros(2, 64, dtype=torch.float64))
    assert layer(torch.zeros(0, 64)).shape == (0, 8)


def test_use_runs_a_quantised_model():
    model = tiny_model("Llama").to(torch.bfloat16)
    quantise_linears(model, "int8")
    ids = torch.tensor([prompts()[0]])
    own = model.generate(ids, max_new_tokens=8, do_sample=False)
    use(model, num_blocks=64)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), own)
    release(model)
