"""Mamba-2's recurrence in the slots of a step, compared with the functions of transformers."""

import importlib
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test-models")
pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

from families import each, prompts, tiny_model  # noqa: E402
from refusals import refuses  # noqa: E402
from transformers.models.falcon_h1.modeling_falcon_h1 import (  # noqa: E402
    FalconH1Mixer,
    mamba2_selective_state_update,
)

from pagepool.integrations.transformers import ModelRunner  # noqa: E402
from pagepool.integrations.transformers.attention import Hooks  # noqa: E402
from pagepool.integrations.transformers.forward import turns  # noqa: E402
from pagepool.integrations.transformers.recurrent import convolved, in_turn, step_in_place  # noqa: E402
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


def drafted(update, states, given, counts, name):
    """Return results and states of rows with drafts: `counts` are the rows of each sequence."""
    states = states.repeat_interleave(torch.tensor(counts), 0)  # drafts begin with any other state
    states[[row for rows in turns(counts) for row in rows]] = torch.nan
    with running(Step((), (), 1, {}, range(len(states)), drafts=turns(counts))), torch.inference_mode():
        result = update(**given, **{name: states})
    return (result, states) if name in ("state", "conv_state", "states") else result


def one_by_one(own, states, given, counts, name):
    """Return the same from steps without drafts: in each, the next token of every sequence that has one left."""
    begins = [sum(counts[:place]) for place in range(len(counts))]
    weights = {"A", "D", "dt_bias", "weight", "bias"}
    results, after = {}, {}
    for token in range(max(counts)):
        going = [sequence for sequence, count in enumerate(counts) if token < count]
        rows = [begins[sequence] + token for sequence in going]
        of_rows = {
            key: one[rows] if isinstance(one, torch.Tensor) and key not in weights else one
            for key, one in given.items()
        }
        state = states[going]
        with torch.inference_mode(), running(Step((), (), 1, {}, range(len(going)))):
            result = own(**of_rows, **{name: state})
        result, state = (result, state) if name in ("state", "conv_state", "states") else result
        results |= dict(zip(rows, result, strict=True))
        after |= dict(zip(rows, state, strict=True))
        states = states.index_copy(0, torch.tensor(going), state)
    return (torch.stack([found[row] for row in sorted(found)]) for found in (results, after))


def cases():
    """Return functions of transformers and arguments of 9 rows, in whole pairs of vectors as in real models."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    rows, heads, dim, size, wide = 9, 32, 16, 16, 64
    mamba2 = {
        "hidden_states": random(rows, heads, dim),
        "dt": random(rows, heads, 1).expand(-1, -1, dim),
        "A": -random(heads).exp()[:, None, None].expand(-1, dim, size),
        "B": random(rows, 2, size),
        "C": random(rows, 2, size),
        "D": random(heads)[:, None].expand(-1, dim),
        "dt_bias": random(heads)[:, None].expand(-1, dim),
        "z": None,
        "dt_softplus": True,
    }
    mamba = {
        "hidden_states": random(rows, wide),
        "dt": random(rows, wide),
        "A": -random(wide, size).exp(),
        "B": random(rows, size),
        "C": random(rows, size),
        "D": random(wide),
        "z": random(rows, wide),
        "dt_bias": random(wide),
        "dt_softplus": True,
    }
    delta = {
        **{name: random(rows, 1, heads, dim) for name in ("query", "key", "value")},
        "g": -random(rows, 1, heads).exp(),
        "beta": random(rows, 1, heads).sigmoid(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    kimi = {**delta, "g": -random(rows, 1, heads, dim).exp()}
    conv = {"hidden_states": random(rows, wide, 1), "weight": random(wide, 4), "bias": random(wide)}
    state = random(3, heads, dim, size)
    return {
        ("mamba2", "mamba2_selective_state_update", "state"): (mamba2, state),
        ("jamba", "mamba_selective_state_update", "state"): (mamba, random(3, wide, size)),
        ("qwen3_next", "torch_recurrent_gated_delta_rule", "initial_state"): (delta, state),
        ("kimi_linear", "recurrent_kimi_delta_attention", "initial_state"): (kimi, state),
        ("lfm2", "causal_conv1d_update", "conv_state"): ({**conv, "activation": "silu"}, random(3, wide, 4)),
        (None, "step_in_place", "states"): (mamba2, state),
    }


@pytest.mark.parametrize("counts", [[9, 0, 0], [1, 5, 3], [3, 3, 3], [1, 1, 7]])
@pytest.mark.parametrize("case", list(cases()))
def test_rows_of_drafts_have_the_bits_of_one_step_after_another(case, counts):
    family, name, state = case
    given, states = cases()[case]
    counts = [count for count in counts if count]
    if family is None:
        own = update = step_in_place
    else:
        own = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
        update = convolved(own) if state == "conv_state" else in_turn(own, state)
    states = states[: len(counts)]
    found = drafted(update, states, given, counts, state)
    for one, expected in zip(found, one_by_one(own, states, given, counts, state), strict=True):
        assert torch.equal(one, expected) and not torch.isnan(one).any()


@pytest.mark.parametrize("family", each(["Bamba", "Mamba2", "Qwen3Next", "Jamba", "FalconH1", "Zamba2", "Lfm2"]))
def test_states_after_accepted_drafts_are_those_of_single_tokens(family):
    """Whatever is accepted, and in slots that are not neighbours."""
    runner = ModelRunner(tiny_model(family), num_blocks=64, max_sequences=20)
    assert runner.takes_drafts
    [prompt, text] = prompts([9, 40], seed=2)
    plain, one, other = (runner.new_sequence() for _ in range(3))
    for sequence in (plain, one, other):
        sequence.append(len(prompt))
        runner.forward([prompt], [sequence], [1])
    done, spare = 0, [runner.states.alloc(9)]
    for accepted in (0, 3, 1, 0, 2, 3, 0):
        drafts = [*text[done + 1 :][:accepted], *[7, 8, 9][accepted:]]
        for sequence in (one, other):
            sequence.append(4)
            sequence.hold_drafts(3)
        rows = runner.forward([[text[done], *drafts]] * 2, [one, other], [4, 4])
        for sequence in (one, other):
            sequence.retract(sequence.len - 3 + accepted)
        single = []
        for token in text[done : done + 1 + accepted]:
            plain.append(1)
            single.append(runner.forward([[token]], [plain], [1]))
        torch.testing.assert_close(rows[: 1 + accepted], torch.cat(single), rtol=0, atol=1e-3)
        torch.testing.assert_close(rows[:4], rows[4:], rtol=0, atol=1e-3)
        for layer, names in enumerate(runner._memory.views):
            for name in names:
                known = torch.from_numpy(plain.state.view(layer, name))
                for sequence in (one, other):
                    found = torch.from_numpy(sequence.state.view(layer, name))
                    torch.testing.assert_close(found, known, rtol=1e-3, atol=1e-3)
        done += 1 + accepted
        spare.append(runner.states.alloc(9))
    one.append(3)
    one.hold_drafts(2)
    with refuses(ValueError, 2, 2):
        runner.forward([[5, 6]], [one], [1])
    for sequence in (plain, one, other):
        sequence.close()
    assert runner.states.used_count == len(spare)


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
