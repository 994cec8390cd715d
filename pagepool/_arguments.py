"""Checks of arguments at the entry of a call. Numbers become Python's own, so that none can wrap or round later."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["dtype_name", "integer", "plain_dtype", "real", "wrong"]


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int from `low` to `high`.

    Raises `TypeError` for anything but an integer and `ValueError` for one out of range, with name, bounds and value.

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
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number


def real(name: str, value: Any, low: float = float("-inf")) -> float:
    """`value`, a real number of at least `low`, unchanged. Raises `TypeError` and `ValueError` as `integer` does.

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
    """The name of a dtype that NumPy lacks: of torch, which need not be there, and bfloat16. Any other as it is.

    >>> plain_dtype(np.float32)
    <class 'numpy.float32'>
    """
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    return "bfloat16" if "bfloat16" in (getattr(dtype, "__name__", None), getattr(dtype, "name", None)) else dtype


def dtype_name(name: str, dtype: Any) -> str:
    """The name of a dtype of NumPy, torch or ml_dtypes; a str is one. Raises `TypeError` for what is no dtype.

    >>> dtype_name("dtype", np.float32)
    'float32'
    """
    found = plain_dtype(dtype)
    if isinstance(found, str):
        return found
    error = wrong(name, "a dtype or the name of one", dtype)
    if found is None:  # which NumPy takes for float64
        raise error
    try:
        return str(np.dtype(found).name)
    except (TypeError, ValueError):
        raise error from None


def wrong(name: str, wanted: str, value: Any) -> TypeError:
    """A `TypeError` for an argument of the wrong type.

    >>> wrong("states", "an SsmStatePool or None", 5)
    TypeError('states must be an SsmStatePool or None, not int: 5')
    """
    if value is None:
        return TypeError(f"{name} must be {wanted}, not None")
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}: {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
