"""Mamba-2's recurrence in the slots of the running step. It replaces the functions of transformers."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F

from pagepool.integrations.transformers.step import current_step

__all__ = ["forward_in_place"]

STEP, SCAN = "mamba2_selective_state_update", "mamba2_chunk_scan"
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
    """Update the states by one token of each sequence, as `mamba2_selective_state_update` with dt_softplus=True.

    transformers allocates several tensors of the size of all states. This function updates the states of one sequence
    after another in place, while they are in the CPU's cache. It computes the decay once per head, not per element.

    Parameters
    ----------
    states : torch.Tensor
        float32 (slots, heads, head_dim, state_size): the states of all slots of the pool. Updated in place.
    hidden_states : torch.Tensor
        float32 (sequences, heads, head_dim).
    dt, A, B, C, D, dt_bias, z
        As in `mamba2_selective_state_update`.

    Returns
    -------
    torch.Tensor
        float32 (sequences, heads, head_dim).
    """
    heads = hidden_states.shape[1]
    dt = F.softplus(dt[..., 0] + dt_bias[:, 0])
    decay = torch.exp(dt * A[:, 0, 0])[..., None, None]
    inputs = (dt[..., None] * hidden_states)[..., None]
    B, C = (rows.repeat_interleave(heads // rows.shape[1], 1) for rows in (B, C))
    out = hidden_states.new_empty(hidden_states.shape)
    for row, slot in enumerate(current_step().slots):
        state = states[slot]
        state.mul_(decay[row]).baddbmm_(inputs[row], B[row, :, None])
        torch.bmm(state, C[row, :, :, None], out=out[row, :, :, None])
    out += hidden_states * D
    return out if z is None else out * F.silu(z)


def forward_in_place(module: Any) -> MethodType | None:
    """Return a forward that updates states in place for a Mamba-2 mixer in float32, or None for any other module."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or STEP not in forward.__code__.co_names or "forward" in vars(module):
        return None
    if any(weight.dtype != torch.float32 for weight in module.parameters()):  # some may be kept in float32
        return None
    names = forward.__globals__
    scan = names[SCAN]

    def scan_in_short_chunks(hidden_states: torch.Tensor, *args: Any, chunk_size: int, **kwargs: Any) -> Any:
        longest = 1 << (hidden_states.shape[1] - 1).bit_length()
        return scan(hidden_states, *args, chunk_size=min(chunk_size, CHUNK, longest), **kwargs)

    ours = {**names, STEP: step_in_place, SCAN: scan_in_short_chunks}
    return MethodType(FunctionType(forward.__code__, ours, argdefs=forward.__defaults__), module)
