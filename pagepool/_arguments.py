"""Checks of arguments at the entry of a call. Numbers become Python numbers, which cannot overflow or round later."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["dtype_name", "integer", "plain_dtype", "real", "wrong"]


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int from `low` to `high`.

    Raises `TypeError` for other types and `ValueError` for an integer out of range, with name, bounds and value.

    >>> integer("keep", 3, low=0)
    3
    >>> integer("keep", -3, low=0)
    Traceback (most recent call last):
    ValueError: keep must be at least 0, not -3
    >>> integer("keep", 3.0)
    Traceback (most recent call last):
    TypeError: keep must be an integer, not float: 3.0
    """
    try:
        number = int(operator.index(value))
    except TypeError:
        raise wrong(name, "an integer", value) from None
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bounds}, not {_short(number)}")
    return number


def real(name: str, value: Any, low: float = float("-inf")) -> float:
    """Return `value` unchanged if it is a real number of at least `low`. Raises the errors of `integer`.

    >>> real("temperature", 2.5, low=0)
    2.5
    >>> real("temperature", float("nan"))
    Traceback (most recent call last):
    ValueError: temperature must be a number, not nan
    """
    try:
        number = float(value) if not isinstance(value, str | bytes | bytearray) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise wrong(name, "a number", value)
    if number != number:
        raise ValueError(f"{name} must be a number, not {value}")
    if number < low:
        raise ValueError(f"{name} must be {low} or more, not {value}")
    found: float = value
    return found


def plain_dtype(dtype: Any) -> Any:
    """Return the name of a dtype of torch, and of bfloat16. Other dtypes are returned unchanged. Never imports torch.

    >>> plain_dtype(np.float32)
    <class 'numpy.float32'>
    """
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    return "bfloat16" if "bfloat16" in (getattr(dtype, "__name__", None), getattr(dtype, "name", None)) else dtype


def dtype_name(name: str, dtype: Any) -> str:
    """Return the name of a dtype of NumPy, torch or ml_dtypes. A str is a name. Raises `TypeError` for other objects.

    >>> dtype_name("dtype", np.float32)
    'float32'
    """
    found = plain_dtype(dtype)
    if isinstance(found, str):
        return found
    error = wrong(name, "a dtype or the name of one", dtype)
    if found is None:  # numpy.dtype(None) is float64
        raise error
    try:
        return str(np.dtype(found).name)
    except (TypeError, ValueError):
        raise error from None


def wrong(name: str, wanted: str, value: Any) -> TypeError:
    """Return a `TypeError` for an argument of the wrong type.

    >>> wrong("states", "an SsmStatePool or None", 5)
    TypeError('states must be an SsmStatePool or None, not int: 5')
    """
    if value is None:
        return TypeError(f"{name} must be {wanted}, not None")
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}: {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
