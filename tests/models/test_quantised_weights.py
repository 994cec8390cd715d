"""Models with quantised weights pass or fail the check for running over pages."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

import torch.nn.functional as F  # noqa: E402
from families import prompts, tiny_model  # noqa: E402

from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.integrations.transformers import ModelRunner  # noqa: E402
from pagepool.integrations.transformers.trial import has_own_arithmetic  # noqa: E402

SECONDS = 300


class Int8Weight(torch.Tensor):
    """int8 weights with a scale for each row, as in torchao. Supports only bfloat16 and few functions."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            if x.dtype is not torch.bfloat16:
                raise NotImplementedError(f"linear of {x.dtype}")
            return F.linear(x, weight.values.bfloat16() * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{func}")


def quantise(model):
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            values = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Int8Weight(values, scale), requires_grad=False)
    return model


def test_quantised_weights_of_torchao_are_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(Int8Weight, "__module__", "torchao.quantization")
    ModelRunner(quantise(tiny_model("Llama").to(torch.bfloat16)), num_blocks=8).close()
    assert "--weights" in caplog.text
    caplog.clear()
    ModelRunner(tiny_model("Llama").to(torch.bfloat16), num_blocks=8).close()
    assert "--weights" not in caplog.text


def test_weights_with_their_own_arithmetic_run():
    model = quantise(tiny_model("Llama").to(torch.bfloat16))
    assert has_own_arithmetic(model) and not has_own_arithmetic(tiny_model("Llama").to(torch.bfloat16))
    prompt = prompts()[1]
    with torch.inference_mode():
        own = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    with Engine(model, num_blocks=64) as engine:
        tokens = engine.submit(prompt, SamplingParams(12)).result(SECONDS).token_ids
    assert tokens == own.tolist()


def test_other_logits_in_bfloat16_are_still_noticed(monkeypatch):
    import pagepool.integrations.transformers.step as step_module

    decode = step_module.decode
    monkeypatch.setattr(step_module, "decode", lambda *args, **kwargs: decode(*args, **{**kwargs, "window_left": 2}))
    with pytest.raises(ValueError, match=r"logits over pages differ from its own by"):
        ModelRunner(quantise(tiny_model("Llama").to(torch.bfloat16)), num_blocks=8)


class HalfOnly(torch.nn.Module):
    """int8 weights that are multiplied by their scales in each call, in 16 bit only, as AWQ's layers of gptqmodel."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("values", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        weight = self.values * self.scale
        assert weight.dtype in (torch.float16, torch.bfloat16), f"weight {weight.dtype} is not float16 or bfloat16"
        return F.linear(x, weight)


def with_half_only_layers(dequantised=False):
    """Return a model with such layers, or with `torch.nn.Linear` of the same 16-bit weights."""
    model = tiny_model("Llama").to(torch.bfloat16)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, linear in list(module.named_children()):
                if type(linear) is torch.nn.Linear:
                    half_only = HalfOnly(linear)
                    if dequantised:
                        linear.weight = torch.nn.Parameter(half_only.values * half_only.scale)
                    else:
                        setattr(module, name, half_only)
    return model


def test_layers_that_compute_in_16_bit_only_are_tried_in_their_dtype():
    found = []
    for dequantised in (True, False):
        with Engine(with_half_only_layers(dequantised), num_blocks=64, pack_weights=False) as engine:
            found.append(engine.submit(prompts()[1], SamplingParams(12)).result(SECONDS).token_ids)
    assert found[0] == found[1]


def test_other_logits_of_such_layers_are_noticed(monkeypatch):
    import pagepool.integrations.transformers.step as step_module

    decode = step_module.decode
    monkeypatch.setattr(step_module, "decode", lambda *args, **kwargs: decode(*args, **{**kwargs, "window_left": 2}))
    with pytest.raises(ValueError, match=r"logits over pages differ from its own by"):
        ModelRunner(with_half_only_layers(), num_blocks=8)


class OneScale(torch.nn.Linear):
    """Quantises its input with one scale for all tokens of a call, as `torch.ao.quantization.quantize_dynamic` does."""

    def forward(self, x):
        scale = x.abs().max() / 127
        return F.linear((x / scale).round() * scale, self.weight)


def test_one_scale_for_all_tokens_of_a_call_is_refused():
    model = tiny_model("Llama")
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OneScale
    with pytest.raises(ValueError, match=r"its own logits of a token change by .* with the tokens behind it"):
        ModelRunner(model, num_blocks=8)
