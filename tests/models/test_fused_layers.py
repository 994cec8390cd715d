"""Fused operations: the bits of torch's eager mode, and which modules are fused."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import each, tiny_model  # noqa: E402

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, fused, trial  # noqa: E402
from pagepool.integrations.transformers.linear import packs  # noqa: E402

pytestmark = pytest.mark.skipif(not packs(torch.bfloat16), reason="this CPU has no instructions for bfloat16")

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
# Tokens of each step for three sequences. More than 64 rows are multiplied by oneDNN, and 513 end a chunk of attention.
STEPS = ((70, 3, 0), (1, 1, 513), (1, 5, 1), (1, 1, 1), (1, 0, 0))


def model_in_bf16(family, **config):
    return tiny_model(family, **config).to(torch.bfloat16)


def trained_model(family, **config):
    """Return a model with weights of norms and biases that are not 1 and 0."""
    model = model_in_bf16(family, **config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += torch.randn(weight.shape, generator=random) / 4
    return model


def replaced(runner):
    """Return the classes of the modules whose forward is replaced during a step."""
    return {type(module).__name__ for module in runner._paged_forward.hooks._replaced}


def logits_of_steps(runner):
    """Return the logits of all tokens of STEPS, and the bytes of the pages."""
    random = torch.Generator().manual_seed(2)
    sequences, found = [runner.new_sequence() for _ in STEPS[0]], []
    for counts in STEPS:
        fed = [number for number, count in enumerate(counts) if count]
        tokens = [torch.randint(0, 997, (counts[number],), generator=random).tolist() for number in fed]
        for number, row in zip(fed, tokens, strict=True):
            sequences[number].append(len(row))
        found.append(runner.forward(tokens, [sequences[number] for number in fed], [*map(len, tokens)]))
    for sequence in sequences:
        sequence.close()
    return torch.cat(found), bytes(memoryview(runner.pool))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("family", each(DECODERS))
def test_a_decoder_in_one_call_has_the_bits_of_its_modules(family, weights, monkeypatch, threads):
    model = trained_model(family)
    options = {"num_blocks": 80, "pack_weights": True, "weights": weights}
    with monkeypatch.context() as patch:
        patch.setattr(trial, "fused_forwards", lambda *args: iter(()))
        runner = ModelRunner(copy.deepcopy(model), **options)
        assert f"{family}Model" not in replaced(runner)
        own = logits_of_steps(runner)
        runner.close()
    runner = ModelRunner(model, **options)
    assert f"{family}Model" in replaced(runner)
    for count in (1, 2):
        threads(count)
        logits, pages = logits_of_steps(runner)
        assert torch.equal(logits, own[0])
        assert count > 1 or pages == own[1], "the second run has other blocks"
    runner.close()


@pytest.mark.parametrize("pages", ["float32", "float16", "int8"])
def test_pages_may_have_another_dtype(pages, monkeypatch):
    model, options = model_in_bf16("Llama"), {"num_blocks": 80, "pack_weights": True, "dtype": pages}
    found = []
    for fuses in (True, False):
        with monkeypatch.context() as patch:
            if not fuses:
                patch.setattr(trial, "fused_forwards", lambda *args: iter(()))
            runner = ModelRunner(model, **options)
        assert ("LlamaModel" in replaced(runner)) == fuses
        found.append(logits_of_steps(runner))
        runner.close()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_tokens_are_the_same_with_preemption():
    model, outputs = model_in_bf16("Llama"), []
    for blocks in (64, 9):
        runner = ModelRunner(model, num_blocks=blocks, pack_weights=True)
        scheduler = runner.scheduler(SchedulerConfig(max_batch_tokens=40, max_prefill_tokens=40))
        for seed in range(6):
            scheduler.add_request([*range(seed + 3, seed + 33)], max_new_tokens=30)
        while scheduler.has_work:
            batch = scheduler.schedule()
            chosen = iter(runner.run(batch).argmax(-1).tolist())
            scheduler.commit(batch, [next(chosen) if wants_token else None for wants_token in batch.wants_token])
        outputs.append({sequence.id: sequence.output_tokens for sequence in scheduler.drain_finished()})
        assert (scheduler.num_preemptions > 0) == (blocks == 9)
        scheduler.close()
        runner.close()
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "fused_classes"),
    [
        *((family, {f"{family}Model"}) for family in DECODERS),
        ("Gemma2", {"Gemma2MLP"}),
        ("Cohere2", set()),  # attention and MLP have the same input, and all five layers are one
        ("DeepseekV3", {"DeepseekV3MLP", "DeepseekV3RMSNorm"}),
        ("Bloom", set()),
    ],
)
def test_modules_are_fused_where_their_parts_are_known(family, fused_classes):
    runner = ModelRunner(model_in_bf16(family), num_blocks=8, pack_weights=True)
    names = {name for name in replaced(runner) if name.endswith(("Layer", "Norm", "MLP", "Model"))}
    assert names == fused_classes
    runner.close()


def test_models_in_float32_are_not_fused():
    runner = ModelRunner(tiny_model("Llama"), num_blocks=8, pack_weights=True)
    assert replaced(runner) == {"Linear"}
    runner.close()


@pytest.mark.parametrize("size", [64, 576, 768, 2048, 4096])
def test_norms_have_the_bits_of_the_module(size):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(size).to(torch.bfloat16).requires_grad_(False)
    module.weight.copy_(torch.randn(size))
    norm = fused.Norm(module)
    assert norm.equals_module()
    x = torch.randn(2, 70, size).bfloat16()
    assert torch.equal(norm(x), module(x))
    assert torch.equal(norm(x.transpose(0, 1)), module(x.transpose(0, 1)))
    module.weight[3] += 1.0
    assert torch.equal(norm(x), module(x)), "it reads the module's weight in each call"


def test_a_norm_with_other_results_stays(monkeypatch):
    module = model_in_bf16("Llama").model.norm
    norm = fused.Norm(module)
    norm._eps *= 1e6
    assert not norm.equals_module()
    monkeypatch.setattr(fused.Norm, "equals_module", lambda norm: False)
    runner = ModelRunner(model_in_bf16("Llama"), num_blocks=8, pack_weights=True)
    assert not replaced(runner) & {"LlamaModel", "LlamaRMSNorm"}
    runner.close()


def test_operations_that_change_the_logits_are_not_used(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        table_of = fused.table_of
        patch.setattr(fused, "table_of", lambda *args: table_of(*args) * 1.1)
        runner = ModelRunner(model_in_bf16("Llama"), num_blocks=8, pack_weights=True)
    assert replaced(runner) == {"Linear", "LlamaRMSNorm"}
    runner.close()
    monkeypatch.setattr(fused.Norm, "equals_module", lambda norm: setattr(norm, "_eps", 1.0) or True)
    runner = ModelRunner(model_in_bf16("Llama"), num_blocks=8, pack_weights=True)
    assert replaced(runner) == {"Linear"} and "without fused operations" in caplog.text
    runner.close()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations_are_looked_up(activation):
    runner = ModelRunner(model_in_bf16("Llama", hidden_act=activation), num_blocks=8, pack_weights=True)
    assert "LlamaModel" in replaced(runner)
    runner.close()


def test_modules_with_hooks_or_other_forwards_are_not_fused():
    model = model_in_bf16("Llama")
    first, second, third, last = model.model.layers
    first.register_forward_hook(lambda *args: None)
    second.mlp.forward = lambda x: 0 * x
    third.mlp.act_fn = torch.nn.PReLU().to(torch.bfloat16)
    runner = ModelRunner(model, num_blocks=8, pack_weights=True)
    forwards = runner._paged_forward.hooks._replaced
    assert not {model.model, second.mlp, third.mlp} & set(forwards)
    assert {first.mlp, third.input_layernorm, last.mlp} <= set(forwards)
    runner.close()


def test_a_class_of_another_package_is_not_fused():
    model = model_in_bf16("Llama")
    layer = model.model.layers[1]

    class Other(type(layer.mlp)):
        def forward(self, x):
            return super().forward(x)

    layer.mlp.__class__ = Other
    runner = ModelRunner(model, num_blocks=8, pack_weights=True)
    forwards = runner._paged_forward.hooks._replaced
    assert not {model.model, layer.mlp} & set(forwards) and model.model.layers[0].mlp in forwards
    runner.close()


def test_a_norm_whose_weight_was_replaced_is_refused():
    model = model_in_bf16("Llama")
    runner = ModelRunner(model, num_blocks=80, pack_weights=True)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
    with pytest.raises(RuntimeError, match="was replaced"):
        logits_of_steps(runner)
    runner.close()
