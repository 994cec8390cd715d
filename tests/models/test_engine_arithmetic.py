"""Arithmetic of attention in a ModelRunner: what "auto" selects, equal tokens, and stores that do not mix."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import each, prompts, tiny_model  # noqa: E402

from pagepool import Engine, SamplingParams, SchedulerConfig, cpu_info  # noqa: E402
from pagepool.attention.decode import auto_arithmetic  # noqa: E402
from pagepool.cluster.pages import model_identity  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, runner, step  # noqa: E402

SECONDS = 300
STORE_BYTES = 64 << 20
PARAMS = SamplingParams(16)
IN_16_BIT = "bf16x2" if cpu_info()["tiles"] == "amx" else "exact"
in_16_bit = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def in_bf16(family="Llama"):
    return tiny_model(family).to(torch.bfloat16)


def answers(model, store=None, **config):
    """Return tokens and numbers of cached tokens of four requests."""
    options = {} if store is None else {"store": store, "store_bytes": STORE_BYTES}
    options |= {} if hasattr(model, "run") else {"pack_weights": False}
    with Engine(model, config=SchedulerConfig(**config), **options) as engine:
        running = [engine.submit(prompt, PARAMS) for prompt in prompts((70, 33, 130, 9))]
        found = [generation.result(SECONDS) for generation in running]
    return [generation.token_ids for generation in found], [generation.num_cached for generation in found]


def logits_of(arithmetic, model):
    with_pages = ModelRunner(model, num_blocks=64, arithmetic=arithmetic)
    sequence = with_pages.new_sequence()
    sequence.append(40)
    found = with_pages.forward([list(range(3, 43))], [sequence], [40])
    sequence.close()
    with_pages.close()
    return found


@pytest.mark.parametrize(
    ("q_dtype", "page_dtype", "chosen"),
    [
        ("bfloat16", "bfloat16", IN_16_BIT),
        ("float16", torch.bfloat16, IN_16_BIT),
        (torch.float32, "bfloat16", "exact"),
        (torch.bfloat16, "float32", "exact"),
        ("float16", "float16", "exact"),
        ("bfloat16", "int8", "exact"),
    ],
)
def test_auto_selects_tiles_for_16_bits_where_the_cpu_has_them(q_dtype, page_dtype, chosen):
    assert auto_arithmetic(q_dtype, page_dtype) == chosen


def test_a_runner_attends_in_the_arithmetic_that_it_names(monkeypatch):
    used = []
    attend = step.decode

    def decode(*arguments, arithmetic, **options):
        used.append(arithmetic)
        return attend(*arguments, arithmetic=arithmetic, **options)

    monkeypatch.setattr(runner, "auto_arithmetic", lambda dtype, page_dtype: "bf16x2")
    with_pages = ModelRunner(in_bf16(), num_blocks=8)
    monkeypatch.setattr(step, "decode", decode)
    sequence = with_pages.new_sequence()
    sequence.append(5)
    with_pages.forward([[5, 6, 7, 8, 9]], [sequence], [1])
    assert with_pages.arithmetic == "bf16x2" and set(used) == {"bf16x2"}
    sequence.close()
    with_pages.close()


@in_16_bit
@pytest.mark.parametrize("family", each(["Llama", "DeepseekV3", "Gemma2"]))
def test_logits_with_tiles_are_as_exact_as_those_of_exact_arithmetic(family, dtype):
    """Rounding between layers hides the error of products. It can change experts, so the median counts."""
    model = tiny_model(family).to(dtype)
    exact, tiles = logits_of("exact", model), logits_of("bf16x2", model)
    right = logits_of("exact", model.float())
    assert not torch.equal(exact, tiles)
    errors = [float((found - right).abs().mean(1).median()) for found in (exact, tiles)]
    assert errors[1] < 1.2 * errors[0]


@in_16_bit
@pytest.mark.parametrize("family", each(["Llama", "DeepseekV3"]))
def test_tokens_with_tiles_do_not_depend_on_chunks_and_batches(family, dtype):
    model = tiny_model(family).to(dtype)
    found = []
    for config in ({}, {"max_batch_tokens": 32, "max_prefill_tokens": 32}, {"max_batch_sequences": 1}):
        with_pages = ModelRunner(model, num_blocks=128, arithmetic="bf16x2")
        found.append(answers(with_pages, **config)[0])
        with_pages.close()
    assert found[0] == found[1] == found[2]


def test_pages_of_another_arithmetic_are_not_used(tmp_path):
    for arithmetic, cached in (("exact", 0), ("bf16x2", 0), ("bf16", 0), ("bf16x2", 64 + 32 + 128)):
        with_pages = ModelRunner(in_bf16(), num_blocks=128, arithmetic=arithmetic)
        assert sum(answers(with_pages, tmp_path)[1]) == cached, arithmetic
        with_pages.close()


def test_workers_of_another_arithmetic_have_another_identity(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    found = {model_identity("m", tmp_path, "bfloat16", arithmetic) for arithmetic in ("exact", "bf16x2")}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("arithmetic", "said"), [("bf16x2", "pages of bfloat16 or float16, not float32"), ("fp32", "'auto', not 'fp32'")]
)
def test_an_arithmetic_that_cannot_be_is_refused(arithmetic, said):
    with pytest.raises(ValueError, match=said):
        ModelRunner(tiny_model("Llama"), num_blocks=8, arithmetic=arithmetic)
