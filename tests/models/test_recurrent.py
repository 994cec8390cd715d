"""Mamba-2's recurrence in the slots of a step, compared with the functions of transformers."""

import importlib
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import prompts, tiny_model  # noqa: E402
from transformers.models.falcon_h1.modeling_falcon_h1 import (  # noqa: E402
    FalconH1Mixer,
    mamba2_selective_state_update,
)

from pagepool.integrations.transformers import ModelRunner  # noqa: E402
from pagepool.integrations.transformers.attention import Hooks  # noqa: E402
from pagepool.integrations.transformers.recurrent import step_in_place  # noqa: E402
from pagepool.integrations.transformers.step import Step, running  # noqa: E402

HEADS, DIM, SIZE, SLOTS = 6, 5, 7, 9
FAMILIES = ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"]


def arguments(rows, groups, gated, heads=HEADS, dim=DIM):
    """Return the arguments of a mixer for one token of each sequence, expanded like a mixer does."""

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(rows)
    return {
        "hidden_states": random(rows, heads, dim),
        "dt": random(rows, heads, 1).expand(-1, -1, dim),
        "A": -random(heads).exp()[:, None, None].expand(-1, dim, SIZE),
        "B": random(rows, groups, SIZE),
        "C": random(rows, groups, SIZE),
        "D": random(heads)[:, None].expand(-1, dim),
        "dt_bias": random(heads)[:, None].expand(-1, dim),
        "z": random(rows, heads, dim) if gated else None,
    }


def stepped(states, slots, given):
    with running(Step((), (), 1, {}, slots)), torch.inference_mode():
        return step_in_place(states, **given, dt_softplus=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("slots", [[0], [3], [2, 3, 4], [8, 0, 5, 1]])
def test_a_step_is_that_of_transformers_in_any_slots(slots, groups, gated):
    pool = torch.randn(SLOTS, 2, HEADS, DIM, SIZE, generator=torch.Generator().manual_seed(0))
    before = pool.clone()
    given = arguments(len(slots), groups, gated)
    own = before[slots, 1]
    expected = mamba2_selective_state_update(own, **given, dt_softplus=True)
    found = stepped(pool[:, 1], slots, given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pool[slots, 1], own)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[others], before[others])
    assert torch.equal(pool[:, 0], before[:, 0])


def test_bits_of_a_sequence_do_not_depend_on_the_others():
    # Dims in whole pairs of vectors, as in real models: torch uses a different exp after the last pair.
    heads, dim = 32, 16
    given = arguments(4, 2, True, heads, dim)
    states = torch.randn(SLOTS, heads, dim, SIZE, generator=torch.Generator().manual_seed(0))
    alone = states.clone()
    together = stepped(states, [8, 0, 5, 1], given)
    of_row = {name: value if name in ("A", "D", "dt_bias") else value[2:3] for name, value in given.items()}
    assert torch.equal(stepped(alone, [5], of_row), together[2:3])
    assert torch.equal(alone[5], states[5])


@pytest.mark.parametrize("family", FAMILIES)
def test_mixers_of_every_family_have_the_functions_that_are_replaced(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert {"mamba2_selective_state_update", "mamba2_chunk_scan"} <= vars(module).keys()


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("Bamba", {0, 1, 3}),
        ("FalconH1", {0, 1, 2, 3}),
        ("Mamba2", {0, 1, 2}),
        ("Zamba2", set(range(6))),
        ("Llama", set()),
    ],
)
def test_layers_that_are_stepped_in_place(family, layers):
    model = tiny_model(family)
    assert Hooks(model).steps_in_place == layers
    assert Hooks(model.to(torch.bfloat16)).steps_in_place == set()


def test_weights_of_16_bit_beside_some_in_float32_are_not_stepped_in_place():
    model = tiny_model("Bamba").to(torch.bfloat16)
    for module in model.modules():
        for name in ("A_log", "D", "dt_bias"):
            if hasattr(module, name):
                getattr(module, name).data = getattr(module, name).data.float()
    assert Hooks(model).steps_in_place == set()


def test_hooks_made_while_another_runner_runs_step_in_place_too():
    model = tiny_model("Bamba")
    made = []
    with Hooks(model).over_pages():
        thread = threading.Thread(target=lambda: made.append(Hooks(model)))
        thread.start()
        thread.join(0.2)
        assert not made
    thread.join()
    assert made[0].steps_in_place == {0, 1, 3}


def test_a_mixer_has_its_own_forward_again():
    model = tiny_model("FalconH1")
    hooks = Hooks(model)
    mixers = [module for module in model.modules() if isinstance(module, FalconH1Mixer)]
    with hooks.over_pages():
        assert all("forward" in vars(mixer) for mixer in mixers)
    assert not any("forward" in vars(mixer) for mixer in mixers)


@pytest.mark.parametrize("chunk_size", [8, 256])
@pytest.mark.parametrize("length", [1, 2, 31, 129, 300])
def test_logits_of_prompts_in_one_and_in_two_chunks(length, chunk_size):
    model = tiny_model("Bamba", mamba_chunk_size=chunk_size)
    [prompt] = prompts([length], seed=3)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    runner = ModelRunner(model, num_blocks=64)
    for cut in {0, length // 2}:
        sequence = runner.new_sequence()
        found = []
        for part in (prompt[:cut], prompt[cut:]):
            if part:
                sequence.append(len(part))
                found.append(runner.forward([part], [sequence], [len(part)]))
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=3e-5 * float(expected.abs().max()))
        sequence.close()
    runner.close()
