"""Loads a model and its tokenizer from a directory in transformers' format. Needs the extra `transformers`."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ModelError", "load_pretrained"]

WEIGHTS = ("*.safetensors", "*.bin")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class ModelError(ValueError):
    """A directory has no model that can be loaded."""


def load_pretrained(directory: str | Path, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the causal LM of a directory, in evaluation mode on the CPU, and its tokenizer. Nothing is downloaded.

    directory  has config.json, weights in safetensors and a tokenizer, as `save_pretrained` writes them
    dtype      of the weights: "float32", "bfloat16", "float16" or "auto", that of the file, but float32 for float16,
               with which CPUs compute slowly

    Raises `ModelError` with one sentence where something is missing, cut off or not known to transformers, and
    ImportError without torch and transformers.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = Path(directory)
    config = _read_config(folder)
    import_module("torch")  # transformers is there without it, and says less of what is missing
    transformers = import_module("transformers")
    if dtype == "auto" and str(config.get("dtype", config.get("torch_dtype"))) == "float16":
        dtype = "float32"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of safetensors, tokenizers, transformers and torch: each has its own
        raise ModelError(f"{folder}: cannot be loaded: {_first_line(error)}") from error
    if found["missing_keys"]:
        names = sorted(found["missing_keys"])
        raise ModelError(f"{folder}: {len(names)} weights are missing, the first is {names[0]}")
    return model.eval(), tokenizer


def _read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises `ModelError` for a folder that can have no model."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such directory")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: it has no config.json, so it holds no model") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{folder}: config.json cannot be read: {_first_line(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder}: config.json holds no object")
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        raise ModelError(f"{folder}: it has no weights (*.safetensors)")
    return config


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
