"""Recurrent layers over the slots of the running step, also for drafts. It replaces functions of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pagepool.integrations.transformers.step import current_step

__all__ = ["Recurrence", "recurrence_of"]

CONVOLUTION = "causal_conv1d_update"
STEP, SCAN = "mamba2_selective_state_update", "mamba2_chunk_scan"
# Functions that compute one token of each row. The state is their argument `state`, which they update in place, or
# `initial_state`, and they return the next one after their result.
UPDATES = {
    STEP: "state",
    "mamba_selective_state_update": "state",
    "torch_recurrent_gated_delta_rule": "initial_state",
    "recurrent_kimi_delta_attention": "initial_state",
}
WEIGHTS = {"A", "D", "dt_bias"}  # arguments that have no dimension of rows
CHUNK = 128  # largest chunk in tokens: the cost of the products within a chunk is quadratic in its length


def step_in_place(
    states: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None = None,
    **ignored: Any,
) -> torch.Tensor:
    """Update the states by one token of each row, as `mamba2_selective_state_update` with dt_softplus=True.

    transformers allocates several tensors of the size of all states. This function updates the states of one sequence
    after another in place, while they are in the CPU's cache. It computes the decay once per head, not per element. The
    state of a draft is computed from the slot of the row before it, which stays as it is.

    Parameters
    ----------
    states : torch.Tensor
        float32 (slots, heads, head_dim, state_size): the states of all slots of the pool. Updated in place.
    hidden_states : torch.Tensor
        float32 (rows, heads, head_dim).
    dt, A, B, C, D, dt_bias, z
        As in `mamba2_selective_state_update`.

    Returns
    -------
    torch.Tensor
        float32 (rows, heads, head_dim).
    """
    heads = hidden_states.shape[1]
    dt = F.softplus(dt[..., 0] + dt_bias[:, 0])
    decay = torch.exp(dt * A[:, 0, 0])[..., None, None]
    inputs = (dt[..., None] * hidden_states)[..., None]
    B, C = (rows.repeat_interleave(heads // rows.shape[1], 1) for rows in (B, C))
    out = hidden_states.new_empty(hidden_states.shape)
    slots = current_step().slots
    drafts = {row for rows in current_step().drafts for row in rows}
    for row, slot in enumerate(slots):
        state = states[slot]
        torch.mul(states[slots[row - 1]] if row in drafts else state, decay[row], out=state)
        state.baddbmm_(inputs[row], B[row, :, None])
        torch.bmm(state, C[row, :, :, None], out=out[row, :, :, None])
    out += hidden_states * D
    return out if z is None else out * F.silu(z)


def convolved(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `causal_conv1d_update` for rows with drafts. It computes all rows in one call."""

    @wraps(own)
    def update(hidden_states: torch.Tensor, conv_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for rows in current_step().drafts:
            before = [row - 1 for row in rows]
            conv_state[rows] = torch.cat((conv_state[before][..., 1:], hidden_states[before].to(conv_state)), -1)
        return own(hidden_states, conv_state, *args, **kwargs)

    return update


def in_turn(own: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of UPDATES for rows with drafts: it computes first drafts after the tokens before them.

    Calls `own` once for each turn, as steps without drafts would do.
    """
    signature = inspect.signature(own)

    @wraps(own)
    def update(*args: Any, **kwargs: Any) -> Any:
        turns = current_step().drafts
        if not turns:
            return own(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        rows_of = {key: one for key, one in given.items() if isinstance(one, torch.Tensor) and key not in WEIGHTS}
        states = rows_of.pop(name)
        drafts = {row for rows in turns for row in rows}
        found: Any = None
        for rows in ([row for row in range(len(states)) if row not in drafts], *turns):
            before = states[[row - (row in drafts) for row in rows]]
            result = own(**{**given, **{key: one[rows] for key, one in rows_of.items()}, name: before})
            result, after = (result, before) if name == "state" else result
            states[rows] = after.to(states)
            found = result.new_empty((len(states), *result.shape[1:])) if found is None else found
            found[rows] = result
        return found if name == "state" else (found, states)

    return update


class Recurrence(NamedTuple):
    """A forward for a recurrent layer that computes drafts.

    Attributes
    ----------
    forward : method
        The forward.
    steps_in_place : bool
        Whether it updates recurrent states in the slots of the running step, without copies.
    takes : set of str
        The kinds of states that it computes for drafts: "conv_states", "recurrent_states".
    """

    forward: MethodType
    steps_in_place: bool
    takes: set[str]


def recurrence_of(module: Any) -> Recurrence | None:
    """Return the forward for a module that calls the functions above, or None for any other module.

    A Mamba-2 mixer in float32 steps in place.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or "forward" in vars(module):
        return None
    names = forward.__globals__
    called = {CONVOLUTION, *UPDATES}.intersection(forward.__code__.co_names, names)
    if not called:
        return None
    ours: dict[str, Any] = {name: in_turn(names[name], UPDATES[name]) for name in called - {CONVOLUTION}}
    if CONVOLUTION in called:
        ours[CONVOLUTION] = convolved(names[CONVOLUTION])
    # Some weights may be kept in float32.
    steps_in_place = STEP in called and all(weight.dtype == torch.float32 for weight in module.parameters())
    if steps_in_place:
        scan = names[SCAN]

        def scan_in_short_chunks(hidden_states: torch.Tensor, *args: Any, chunk_size: int, **kwargs: Any) -> Any:
            longest = 1 << (hidden_states.shape[1] - 1).bit_length()
            return scan(hidden_states, *args, chunk_size=min(chunk_size, CHUNK, longest), **kwargs)

        ours |= {STEP: step_in_place, SCAN: scan_in_short_chunks}
    takes = {"conv_states" if name == CONVOLUTION else "recurrent_states" for name in called}
    new = FunctionType(forward.__code__, {**names, **ours}, None, forward.__defaults__, forward.__closure__)
    new.__kwdefaults__ = forward.__kwdefaults__
    return Recurrence(MethodType(new, module), steps_in_place, takes)
