"""Decoder layers with fused operations: the bits of torch's eager mode, and which modules are fused."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import tiny_model  # noqa: E402

from pagepool.integrations.transformers import ModelRunner, fused  # noqa: E402
from pagepool.integrations.transformers.linear import packs  # noqa: E402

pytestmark = pytest.mark.skipif(not packs(torch.bfloat16), reason="this CPU has no instructions for bfloat16")


def model_in_bf16(family, **config):
    return tiny_model(family, **config).to(torch.bfloat16)


def replaced(runner):
    """Return the classes of the modules whose forward is replaced during a step."""
    return {type(module).__name__ for module in runner._paged_forward.hooks._replaced}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "fused_classes"),
    [
        ("Llama", {"LlamaDecoderLayer", "LlamaRMSNorm"}),
        ("Mistral", {"MistralDecoderLayer", "MistralRMSNorm"}),
        ("Qwen3", {"Qwen3MLP", "Qwen3RMSNorm"}),
        ("Gemma2", {"Gemma2MLP"}),
        ("Cohere2", set()),  # attention and MLP have the same input, and all five layers are one
        ("DeepseekV3", {"DeepseekV3MLP", "DeepseekV3RMSNorm"}),
        ("Bloom", set()),
    ],
)
def test_modules_are_fused_where_their_code_is_known(family, fused_classes):
    runner = ModelRunner(model_in_bf16(family), num_blocks=8, pack_weights=True)
    names = {name for name in replaced(runner) if name.endswith(("Layer", "Norm", "MLP"))}
    assert names == fused_classes
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
    assert not replaced(runner) & {"LlamaDecoderLayer", "LlamaRMSNorm"}
    runner.close()


def test_operations_that_change_the_logits_are_not_used(monkeypatch, caplog):
    table_of = fused.table_of
    monkeypatch.setattr(fused, "table_of", lambda *args: table_of(*args) * 1.1)
    runner = ModelRunner(model_in_bf16("Llama"), num_blocks=8, pack_weights=True)
    assert replaced(runner) == {"Linear"} and "without fused operations" in caplog.text
    runner.close()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations_are_looked_up(activation):
    runner = ModelRunner(model_in_bf16("Llama", hidden_act=activation), num_blocks=8, pack_weights=True)
    assert "LlamaDecoderLayer" in replaced(runner)
    runner.close()


def test_modules_with_hooks_or_other_forwards_are_not_fused():
    model = model_in_bf16("Llama")
    first, second, third, last = model.model.layers
    first.register_forward_hook(lambda *args: None)
    second.mlp.forward = lambda x: 0 * x
    third.mlp.act_fn = torch.nn.PReLU().to(torch.bfloat16)
    runner = ModelRunner(model, num_blocks=8, pack_weights=True)
    forwards = runner._paged_forward.hooks._replaced
    assert last in forwards and not {first, second, third, second.mlp, third.mlp} & set(forwards)
    assert first.mlp in forwards and second.self_attn in forwards and third.input_layernorm in forwards
    runner.close()


def test_only_the_bytecode_of_a_forward_matters():
    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return down_proj

    class Other(torch.nn.Module):
        def forward(self, x):
            down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
            return down_proj

    assert fused.is_like(Same(), "LlamaMLP") and not fused.is_like(Other(), "LlamaMLP")
