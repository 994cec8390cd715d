"""Helpers for quantised pages: scales for the channels of keys, and conversion of fp8 values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagepool._arguments import real

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagepool.config import KvLayout

__all__ = ["calibrate_channels", "read_channel_scale", "widen_fp8"]

# Keys of usual size divided by a scale, and queries multiplied by it, stay within float32.
MIN_SCALE, MAX_SCALE = 1e-15, 1e15


def calibrate_channels(keys: Any) -> NDArray[np.float32]:
    """Scales for the channels of quantised keys: `k_channel_scale` of `KvCachePool.from_layout`.

    Returns float32 (num_layers, num_kv_heads, head_dim): each channel's largest absolute value, divided by the largest
    of its head. A channel that was always 0 gets the smallest useful scale, 2^-10. Raises `ValueError` for another
    shape, without a token, and for a key that is not finite.

    Some channels of keys are tens of times as large as the others, in all tokens. Each token and head has one scale for
    all channels, so small channels would be quantised to few steps. After division by these scales, all channels have
    about the same size.

    Parameters
    ----------
    keys
        Float (num_layers, num_tokens, num_kv_heads, head_dim), or without the first axis for one layer: keys as they
        are appended, of at least one token. A few hundred tokens of ordinary text are enough.

    Examples
    --------
    >>> keys = np.ones((100, 1, 8), np.float32)
    >>> keys[:, :, 3] = 30
    >>> [round(float(x), 4) for x in calibrate_channels(keys)[0, 0, 2:5]]
    [0.0333, 1.0, 0.0333]
    """
    array = np.asarray(keys)
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or 0 in array.shape:
        raise ValueError(
            "keys must have shape (num_layers, num_tokens, num_kv_heads, head_dim), each at least 1, "
            f"not {np.shape(keys)}"
        )
    largest = np.abs(array.astype(np.float32, copy=False)).max(1)
    if not np.isfinite(largest).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(largest))} channels of keys have a value that is not finite")
    head = largest.max(2, keepdims=True)
    scale = np.divide(largest, head, out=np.ones_like(largest), where=head > 0)
    clamped: NDArray[np.float32] = np.maximum(scale, np.float32(2.0**-10))
    return clamped


def read_channel_scale(scale: Any, layout: KvLayout) -> NDArray[np.float32] | None:
    """Return a checked, read-only, C-contiguous float32 copy of the scale of a pool's keys; None stays None.

    Raises `ValueError` if the shape is wrong or a scale is out of range, if the layout needs a scale and there is none,
    or if there is one and the layout takes none.
    """
    if scale is None:
        if layout.dtype == "int4":
            raise ValueError("K of int4 needs a k_channel_scale: calibrate_channels makes one")
        return None
    if layout.dtype not in ("int8", "int4"):
        raise ValueError(f"k_channel_scale is for K of int8 or int4, and the layout has {layout.dtype}")
    copy = np.array(scale, np.float32, order="C")
    wanted = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
    if copy.shape != wanted:
        raise ValueError(f"k_channel_scale must have shape {wanted} (layers, num_kv_heads, head_dim), not {copy.shape}")
    bad = copy[~((copy >= MIN_SCALE) & (copy <= MAX_SCALE))]
    if bad.size:
        raise ValueError(f"each k_channel_scale must be from {MIN_SCALE:g} to {MAX_SCALE:g}, not {bad[0]}")
    copy.flags.writeable = False
    return copy


def _fp8_values(kind: str) -> NDArray[np.float32]:
    """The values of all 256 bit patterns of a kind of fp8."""
    exponent_bits, bias = {"e4m3": (4, 7), "e5m2": (5, 15)}[kind]
    mantissa_bits = 7 - exponent_bits
    bits = np.arange(256)
    exponent, mantissa = bits >> mantissa_bits & ((1 << exponent_bits) - 1), bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if kind == "e4m3":  # as ml_dtypes and torch have it: no infinity, one NaN
        values[bits & 0x7F == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    signed: NDArray[np.float32] = np.where(bits & 0x80, -values, values).astype(np.float32)
    return signed


def widen_fp8(values: Any, kind: str, scale: float = 1.0) -> NDArray[np.float32]:
    """Convert fp8 to float32, exactly, for `KvCachePool.append`. Pages do not store fp8, because int8 is more exact.

    Raises `TypeError` for another dtype, `ValueError` for another kind.

    Parameters
    ----------
    values
        Uint8 bits, or an array of float8_e4m3fn or float8_e5m2 of ml_dtypes, of any shape.
    kind
        "e4m3" or "e5m2".
    scale
        Factor for all values: the scale of the layer in the fp8 cache.

    Examples
    --------
    >>> widen_fp8(np.array([0x38, 0xC0, 0x01], np.uint8), "e4m3").tolist()
    [1.0, -2.0, 0.001953125]
    """
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"kind must be 'e4m3' or 'e5m2', not {kind!r}")
    array = np.asarray(values)
    if array.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
        if not array.dtype.name.startswith(f"float8_{kind}"):
            raise TypeError(f"values of {array.dtype.name} are not of kind {kind!r}")
        array = array.view(np.uint8)
    if array.dtype != np.uint8:
        raise TypeError(f"values must be uint8 bits or of float8, not {array.dtype}")
    wide: NDArray[np.float32] = _fp8_values(kind)[array] * np.float32(real("scale", scale))
    return wide
