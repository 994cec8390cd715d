"""The version of vLLM that the plug-ins support, and the digest of the weights of its model."""

from __future__ import annotations

from pathlib import Path

import vllm

from pagepool.prefix.fingerprint import weights_digest

__all__ = ["digest_of_model", "refuse_other_versions"]

TESTED = ("0.32.",)  # versions of vLLM with the interfaces that the plug-ins implement


def refuse_other_versions() -> None:
    """Raise `ImportError` for a version of vLLM that the plug-ins were not tested with."""
    if not vllm.__version__.startswith(TESTED):
        raise ImportError(
            f"pagepool.integrations.vllm was tested with vLLM {TESTED[0]}x, not with {vllm.__version__}: "
            "through another interface it could change pages that are being read"
        )


def digest_of_model(name: str, weights: str | None, folder: Path | None) -> str:
    """Return `weights`, or for None the digest of the files of a model, which a file in `folder` remembers.

    Raises `ValueError` if the model is not a directory or file.
    """
    if weights is not None:
        return weights
    if not Path(name).exists():
        raise ValueError(
            f"the model {name!r} is not a directory or file, so its weights have no digest: "
            "set `weights`, a text that names their revision"
        )
    if folder is None:
        return weights_digest(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return weights_digest(name, folder / "weights.json")
