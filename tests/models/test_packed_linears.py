"""Packed and fused linear layers generate the same tokens as the model's own layers. Afterwards the model is
unchanged."""

import copy
import ctypes
import gc
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import FAMILIES, NEW_TOKENS, OTHERS, each, eager_tokens, prompts, tiny_model  # noqa: E402

from pagepool import SchedulerConfig  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402
from pagepool.integrations.transformers import ModelRunner, linear  # noqa: E402
from pagepool.integrations.transformers.linear import PackedLinears, packs  # noqa: E402
from pagepool.integrations.transformers.storing import digest_of_weights  # noqa: E402

SECONDS = 300
TOKENS = torch.arange(3, 17)[None]

needs_bf16 = pytest.mark.skipif(not packs(torch.bfloat16), reason="this CPU has no instructions for bfloat16")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("PAGEPOOL_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generated(model, **options):
    with Engine(model, **options) as engine:
        running = [engine.submit(prompt, SamplingParams(NEW_TOKENS)) for prompt in prompts()]
        return [generation.result(SECONDS).token_ids for generation in running]


def sizes(packed):
    return [len(layer.linears) for layer in packed._layers]


def step(runner):
    """Run one request of one token."""
    scheduler = runner.scheduler(SchedulerConfig())
    scheduler.add_request([5, 6, 7], max_new_tokens=1)
    batch = scheduler.schedule()
    runner.run(batch)
    scheduler.commit(batch, [1])


def packed_of(runner):
    return runner._paged_forward.hooks.packed


@needs_bf16
@pytest.mark.parametrize("family", each([*FAMILIES, *OTHERS]))
def test_tokens_in_bfloat16_are_those_of_the_models_own_layers(family):
    model = tiny_model(family).to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    own = generated(model, pack_weights=False)
    assert generated(model, pack_weights="only") == own
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("family", each(FAMILIES))
@pytest.mark.parametrize("pack_weights", [True, "only"])
def test_tokens_in_float32_are_those_of_transformers_eager_attention(family, pack_weights):
    assert generated(tiny_model(family), pack_weights=pack_weights) == eager_tokens(family)


def test_layers_with_one_input_are_one_layer():
    packed = PackedLinears(tiny_model("Llama", num_hidden_layers=2), TOKENS, fuses=True, drops=False)
    assert sizes(packed) == [3, 1, 2, 1, 3, 1, 2, 1, 1]
    assert len(packed.forwards) == 15


def test_layers_stay_apart_if_something_writes_to_their_input_between_them():
    model = tiny_model("Llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn

    def write(module, args, result):
        args[0].mul_(1.0)

    attention.k_proj.register_forward_hook(write)
    packed = PackedLinears(model, TOKENS, fuses=True, drops=False)
    assert attention.k_proj not in packed.forwards, "it has a hook of its own"
    assert sizes(packed) == [1, 1, 1, 2, 1, 1]


def test_results_belong_to_the_input_of_the_call():
    first, second = torch.nn.Linear(16, 24), torch.nn.Linear(16, 8)
    layer = linear.PackedLayer([first, second])
    forwards = dict(layer.forwards())
    with torch.inference_mode():
        x, y = torch.randn(6, 16), torch.randn(6, 16)
        for one, argument in [(first, x), (second, y), (second, x), (first, x), (first, x), (second, y), (first, y)]:
            torch.testing.assert_close(forwards[one](argument), one(argument))
        torch.testing.assert_close(forwards[first](x[:1]), first(x[:1]))


def test_layers_that_must_not_be_packed_stay():
    model = tiny_model("Llama", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.forward = torch.nn.functional.relu  # as accelerate and other packages do
    mlp.down_proj.weight.requires_grad_(False)
    torch.nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", torch.nn.Identity())
    found = {module for module in model.modules() if linear.can_be_packed(module)}
    attention = model.model.layers[0].self_attn
    assert found == {
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, model.lm_head),
    }


def test_a_layer_whose_results_would_change_stays(monkeypatch):
    own = linear.PackedLayer.equals_linear
    wrong = lambda layer: own(layer) and len(layer.linears) != 3 and layer.linears[0].out_features != 997  # noqa: E731
    monkeypatch.setattr(linear.PackedLayer, "equals_linear", wrong)
    packed = PackedLinears(tiny_model("Llama", num_hidden_layers=1), TOKENS, fuses=True, drops=True)
    assert sizes(packed) == [1, 1, 1, 1, 2, 1]


def test_the_check_of_a_shape_finds_other_results():
    module = torch.nn.Linear(64, 48)
    layer = linear.PackedLayer([module])
    assert layer.equals_linear()
    with torch.no_grad():
        module.weight[5, 7] += 0.01
    assert not layer.equals_linear()


def larger(x, rows, steps):
    """Return x with the first element larger by some steps of bfloat16 if its number of rows is one of these."""
    if len(x) not in rows:
        return x
    x = x.clone()
    x.view(torch.int16)[0, 0] += steps
    return x


@needs_bf16
@pytest.mark.parametrize(
    ("own_rows", "packed_rows", "steps", "equal"),
    [
        ((), (), 0, True),
        ((), (100, 256), 1, False),
        ((100, 256), (), 1, True),
        ((100, 256), (), 40, False),
        ((100, 256), (3,), 1, False),
        ((100,), (256,), 1, True),
        ((256,), (100,), 1, False),
    ],
)
def test_a_shape_may_round_otherwise_only_from_where_the_layer_does(own_rows, packed_rows, steps, equal, monkeypatch):
    # The packed layer returns what `F.linear` returns for rows alone, except for the steps.
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: larger(alone(own, x, *rest), own_rows, steps))
    module = torch.nn.Linear(64, 48).bfloat16()
    run = lambda x, *rest: larger(alone(own, x, module.weight, module.bias), packed_rows, steps)  # noqa: E731
    monkeypatch.setattr(linear, "RUN", run)
    monkeypatch.setattr(linear, "has_linear_few", lambda: False)
    assert linear.PackedLayer([module]).equals_linear() is equal


def alone(function, x, *rest):
    return torch.cat([function(row, *rest) for row in x.split(1)])


@needs_bf16
@pytest.mark.parametrize("right", [True, False])
def test_another_order_of_packed_weights_leaves_all_rows_to_onednn(right, monkeypatch):
    module = torch.nn.Linear(64, 48).bfloat16()
    calls = []

    def few(x, rows, inputs, weight, bias, outputs, out, threads):
        calls.append(rows)
        results = torch.frombuffer((ctypes.c_int16 * (rows * outputs)).from_address(out), dtype=torch.bfloat16)
        given = torch.frombuffer((ctypes.c_int16 * (rows * inputs)).from_address(x), dtype=torch.bfloat16)
        own = torch.nn.functional.linear(given.view(rows, inputs), module.weight, module.bias)
        results.view(rows, outputs).copy_(own if right else own + 1)

    monkeypatch.setattr(linear, "linear_few", few)
    monkeypatch.setattr(linear.PackedLayer, "_suits_few", lambda layer: True)
    with torch.no_grad():
        layer = linear.PackedLayer([module])
        assert layer.usable_rows() == (linear.EQUAL_ROWS if right else 0)
        assert max(calls) <= linear.EQUAL_ROWS and len(calls) == (6 if right else 1)
        calls.clear()
        x = torch.randn(1, 2, 64).bfloat16()
        assert torch.equal(layer.run(x), torch.nn.functional.linear(x, module.weight, module.bias))
        assert layer.run(x[:, :0]).shape == (1, 0, 48)
        for wrong in (x[..., :32].contiguous(), x.float(), x.to("meta")):
            with pytest.raises(RuntimeError):
                layer.run(wrong)
        assert calls == ([2] if right else [])


def test_layers_are_not_fused_where_the_model_wants_contiguous_results():
    class Flat(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x.view(-1)).view(x.shape)

    model = tiny_model("Llama")
    model.model.layers[1].mlp.act_fn = Flat()
    runner = ModelRunner(model, num_blocks=8, pack_weights="only")
    assert set(sizes(packed_of(runner))) == {1}
    runner.close()
    assert generated(model, pack_weights=True) == eager_tokens("Llama")


def test_a_model_whose_results_change_keeps_its_weights(monkeypatch, caplog):
    run = linear.RUN
    monkeypatch.setattr(linear, "RUN", lambda *args: run(*args) * 1.5)
    monkeypatch.setattr(linear.PackedLayer, "equals_linear", lambda layer: True)
    runner = ModelRunner(tiny_model("Llama"), num_blocks=8, pack_weights="only")
    assert packed_of(runner) is None and "not packed: its logits change" in caplog.text
    assert {weight.device.type for weight in runner.model.parameters()} == {"cpu"}
    runner.close()


def test_weights_come_back_at_close_and_with_the_end_of_the_runner():
    model = tiny_model("Llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for closes in (True, False):
        runner = ModelRunner(model, num_blocks=8, pack_weights="only")
        assert model.lm_head.weight.device.type == "meta"
        assert model.model.embed_tokens.weight.device.type == "cpu"
        with pytest.raises(ValueError, match=r"LlamaForCausalLM .*packed"):
            ModelRunner(model, num_blocks=8)
        if closes:
            runner.close()
        del runner
        gc.collect()
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert not any("forward" in vars(module) for module in model.modules())


def test_weights_come_back_with_the_end_of_an_engine_that_is_not_closed():
    model = tiny_model("Llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for asks in (False, True):
        engine = Engine(model, num_blocks=8, pack_weights="only")
        assert model.lm_head.weight.is_meta
        if asks:
            assert len(engine.submit([5, 6, 7], SamplingParams(1)).result(SECONDS).token_ids) == 1
        thread = engine._thread
        del engine
        gc.collect()
        thread.join(SECONDS)
        gc.collect()  # the thread may have held the engine at the first collection
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_model_whose_weights_are_dropped_refuses_calls_from_elsewhere():
    model, tokens = tiny_model("Llama"), torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    runner = ModelRunner(model, num_blocks=8, pack_weights="only")
    for _ in range(2):  # also after a step of the runner, which has its own forwards
        with pytest.raises(RuntimeError, match=r"close it first.*pack_weights=True"):
            model(tokens)
        step(runner)
    runner.close()
    assert torch.equal(model(tokens).logits, before)


def test_a_model_whose_weights_are_dropped_is_neither_converted_nor_loaded_nor_copied_nor_saved(tmp_path):
    """Only the embeddings and norms would be, without a word."""
    model = tiny_model("Llama")
    wanted = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keys = [set(vars(module)) for module in model.modules()]
    runner = ModelRunner(model, num_blocks=8, pack_weights="only")
    for call in (
        lambda: model.load_state_dict(wanted),
        lambda: model.model.layers[1].load_state_dict({}),
        lambda: model.save_pretrained(tmp_path / "saved"),
        model.state_dict,
        model.model.layers[0].mlp.state_dict,
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model.model),
        lambda: model.to(torch.bfloat16),
        model.half,
        model.model.double,
        model.model.layers[0].self_attn.q_proj.float,
    ):
        with pytest.raises(RuntimeError, match=r"packed .*close it first"):
            call()
    assert not (tmp_path / "saved").exists()
    model.model.embed_tokens.float()  # it has its weights
    step(runner)
    runner.close()
    assert [set(vars(module)) for module in model.modules()] == keys
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(copy.deepcopy(model).lm_head.weight, model.lm_head.weight)
    model.load_state_dict(wanted)
    model.double().save_pretrained(tmp_path / "saved")
    assert model.lm_head.weight.dtype is torch.float64


def test_a_digest_of_weights_is_that_of_the_model_before(tmp_path):
    model = tiny_model("Llama")
    before = digest_of_weights(model)
    runner = ModelRunner(model, num_blocks=8, pack_weights="only")
    assert model.lm_head.weight.is_meta
    assert digest_of_weights(model, packed_of(runner)) == before
    runner.open_store(tmp_path, 1 << 24).close()
    runner.close()


def test_weights_that_belong_to_two_modules_are_not_dropped():
    model = tiny_model("Llama", tie_word_embeddings=True)
    runner = ModelRunner(model, num_blocks=8, pack_weights="only")
    assert model.lm_head in packed_of(runner).forwards
    assert model.lm_head.weight is model.model.embed_tokens.weight
    runner.close()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_weight_that_is_changed_later_is_noticed():
    model = tiny_model("Llama")
    runner = ModelRunner(model, num_blocks=8, pack_weights=True)
    sequence = runner.new_sequence()
    sequence.append(1)
    runner.forward([[5]], [sequence], [1])
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed after"):
        runner.forward([[5]], [sequence], [1])
    sequence.close()
    runner.close()


def test_other_values_of_pack_weights_are_refused():
    with pytest.raises(ValueError, match=r"pack_weights .*'auto'.*'all'"):
        ModelRunner(tiny_model("Llama"), num_blocks=8, pack_weights="all")
