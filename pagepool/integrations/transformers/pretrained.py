"""Loads a model and its tokenizer from a directory in transformers' format, or from a GGUF file.

Needs the extra `transformers`, and `gguf` for a GGUF file.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ModelError", "load_pretrained"]

WEIGHTS = ("*.safetensors", "*.bin")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class ModelError(ValueError):
    """The directory or file does not contain a model that can be loaded."""


def load_pretrained(directory: str | Path, dtype: str = "auto") -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a directory or a GGUF file. Nothing is downloaded.

    Parameters
    ----------
    directory : path
        Directory with config.json, weights in safetensors and a tokenizer, as `save_pretrained` writes them. Or a GGUF
        file with weights in Q8_0, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, BF16, F16 or F32.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        Dtype of the weights. "auto": the dtype in the file, but float32 for a file in float16, because CPUs compute
        slowly in float16. For a GGUF file with quantised weights this is the dtype of activations and of the other
        weights, "auto": bfloat16.

    Returns
    -------
    tuple of (PreTrainedModel, PreTrainedTokenizerBase)
        The model, in evaluation mode on the CPU, and the tokenizer.

    Raises
    ------
    ModelError
        A file is missing, truncated or not supported by transformers. The message is one sentence.
    ImportError
        torch, transformers or gguf is not installed.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = Path(directory)
    if folder.is_file():
        return _load_gguf(folder, dtype)
    config = _read_config(folder)
    import_module("torch")  # transformers can be imported without torch, and its later error is less clear
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
    except Exception as error:  # safetensors, tokenizers, transformers and torch have different error types
        raise ModelError(f"{folder}: cannot be loaded: {_first_line(error)}") from error
    if found["missing_keys"]:
        names = sorted(found["missing_keys"])
        raise ModelError(f"{folder}: {len(names)} weights are missing, the first is {names[0]}")
    return model.eval(), tokenizer


def _load_gguf(path: Path, dtype: str) -> tuple[Any, Any]:
    import_module("torch")
    import_module("transformers").logging.set_verbosity_error()
    import_module("gguf")
    module = import_module("pagepool.integrations.transformers.gguf_file")
    try:
        loaded: tuple[Any, Any] = module.load_gguf(path, dtype)
    except Exception as error:  # transformers, tokenizers and numpy have different error types
        reason = "" if isinstance(error, module.GgufError) else f"cannot be loaded: {type(error).__name__}: "
        raise ModelError(f"{path}: {reason}{_first_line(error)}") from error
    return loaded


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises `ModelError` if the directory cannot contain a model."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such directory or file")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = "" if gguf is None else f"; to load the GGUF file in it, give its path, {gguf}"
        raise ModelError(f"{folder}: it has no config.json, so it holds no model{hint}") from None
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
