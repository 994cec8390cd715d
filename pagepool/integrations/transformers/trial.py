"""Checks whether a model can run over pages: detects the data that it stores, and compares its logits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from pagepool.integrations.transformers.attention import Hooks
from pagepool.integrations.transformers.forward import PagedForward
from pagepool.integrations.transformers.fused import fused_forwards
from pagepool.integrations.transformers.layout import ModelLayout, Unsupported, read_layout
from pagepool.integrations.transformers.linear import PackedLinears
from pagepool.integrations.transformers.memory import ModelMemory, kv_layouts
from pagepool.integrations.transformers.quantised import quantisation_of

__all__ = ["pack_linears", "takes_drafts", "try_out"]

logger = logging.getLogger("pagepool")

LENGTHS = (14, 9)  # number of tokens of each test sequence
CHUNKS = (9, 8)  # number of tokens in the first chunk of each test sequence
# Number of earlier tokens that is passed to the model with the second chunk. Logits must not depend on it, because the
# sequences of a batch have different numbers of earlier tokens.
SEEN = 100_000
SEEDS = (0, 1)
# Largest difference of logits in float32, relative to the largest logit. Sums in another order round differently.
TOLERANCE = 3e-4
HALVES = (torch.float16, torch.bfloat16)
# The same for 16-bit weights that cannot be converted to float32, and for activations that are rounded to 8 bits.
# Models in tests/models differ by up to 0.06. A wrong mask or position changes logits by about their own size.
TOLERANCE_OF_HALVES = 0.1


class InFloat32(TorchFunctionMode):
    """Context manager in which torch computes in float32 instead of 16-bit dtypes. Their rounding would hide errors.

    Weights are converted when they are used, one after another.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with all 16-bit tensors and dtypes converted to float32."""
        if getattr(func, "__name__", None) == "__get__":  # reading an attribute needs no conversion of the weight
            return wide_dtype(func(*args))
        args, kwargs = tree_map_only(torch.Tensor, wide, (args, kwargs or {}))
        args, kwargs = tree_map_only(torch.dtype, wide_dtype, (args, kwargs))
        return func(*args, **kwargs)


def wide_dtype(found: Any) -> Any:
    """Return float32 for a 16-bit dtype, and any other object unchanged."""
    return torch.float32 if isinstance(found, torch.dtype) and found in HALVES else found


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor in float32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def try_out(model: Any) -> PagedForward:
    """Return the forward of a model over pages, after comparing it with the model's own logits for random tokens.

    Raises TypeError if `model` is not a `PreTrainedModel`. Raises ValueError, with the name of its class and the
    reason, if it cannot run over pages.
    """
    require_causal_lm(model)
    if has_foreign_layers(model):
        logger.warning(
            "%s has quantised weights of another library, which can be slower than 16-bit weights for one user: "
            'load the original weights and quantise them with weights="int8" or "int4" (--weights)',
            type(model).__name__,
        )
    try:
        with torch.inference_mode():
            return compared(model)
    except Unsupported as error:
        raise ValueError(f"{type(model).__name__} cannot run over pages: {error}") from error
    except Exception as error:  # a model's code can raise any exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{type(model).__name__} cannot run over pages: its forward raised {reason}") from error


def require_causal_lm(model: Any) -> None:
    """Raise TypeError, or ValueError with the reason, unless `model` can be a causal language model on the CPU."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, not {type(model).__name__}")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} cannot run over pages: it is an encoder-decoder")
    if not model.can_generate():
        raise ValueError(f"{name} cannot run over pages: it has no head that generates tokens")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} cannot run over pages: its weights are {model.dtype}, not a dtype that pages have")
    devices = {str(parameter.device) for parameter in model.parameters()} - {"cpu"}
    if devices:
        why = ": they are not loaded, or a runner that is open has packed them" if "meta" in devices else ""
        raise ValueError(
            f"{name} cannot run over pages: its weights are on {', '.join(sorted(devices))}, not the cpu{why}"
        )
    if model.training:
        raise ValueError(f"{name} cannot run over pages: it is in training mode, call model.eval() first")


def compared(model: Any) -> PagedForward:
    """Return the forward over pages. Raises Unsupported if its logits differ from the model's own logits."""
    hooks = Hooks(model)
    layout = read_layout(model, hooks, random_prompts(model, 0)[0])
    try:
        kv_layouts(layout, 16, "float32")
    except ValueError as error:
        raise Unsupported(f"pages do not hold its keys and values: {error}") from error
    is_quantised = quantisation_of(model) is not None
    if model.dtype in HALVES and not has_own_arithmetic(model):
        try:
            with InFloat32():
                return agreed(model, hooks, layout, TOLERANCE_OF_HALVES if is_quantised else TOLERANCE)
        except Unsupported:
            raise
        except Exception as error:  # such as AWQ's layers, which compute in 16 bit only
            logger.info("%s is tried in %s: in float32 it raised %r", type(model).__name__, model.dtype, error)
    is_rounded = is_quantised or model.dtype in HALVES
    return agreed(model, hooks, layout, TOLERANCE_OF_HALVES if is_rounded else TOLERANCE)


def agreed(model: Any, hooks: Hooks, layout: ModelLayout, tolerance: float) -> PagedForward:
    """Return the forward over pages for a layout. Raises Unsupported if its logits are not those of the model."""
    off = 0.0
    for seed in SEEDS:  # a second try: rounding can route a token to another expert
        prompts = random_prompts(model, seed)
        layouts = [read_layout(model, hooks, prompt) for prompt in prompts]
        for takes_chunks in (True, False) if layout.has_states else (True,):
            parts = logits_over_pages(PagedForward(model, hooks, layouts[0], takes_chunks), prompts)
            off = difference(parts, [found.logits for found in layouts])
            if off <= tolerance:
                return PagedForward(model, hooks, layout, takes_chunks)
    alone = read_layout(model, hooks, prompts[0][:, : CHUNKS[0]]).logits
    changed = float((alone - layouts[0].logits[: CHUNKS[0]]).abs().max() / layouts[0].logits.abs().max())
    if changed > tolerance:
        raise Unsupported(
            f"its own logits of a token change by {changed:.1e} of the largest with the tokens behind it, as they do "
            "where all tokens of a call share a scale"
        )
    raise Unsupported(f"its logits over pages differ from its own by {off:.1e} of the largest")


def has_own_arithmetic(model: Any) -> bool:
    """Return whether weights are tensor subclasses with custom operations, such as torchao's. They stay in 16 bit."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for tensor in tensors)


def has_foreign_layers(model: Any) -> bool:
    """Return whether weights are quantised by torchao or bitsandbytes. One of their layers is up to 3 times slower."""
    modules = {type(module).__module__.partition(".")[0] for module in model.modules()}
    tensors = {type(weight).__module__.partition(".")[0] for weight in model.parameters()}
    return bool((modules | tensors) & {"bitsandbytes", "torchao"})


def random_prompts(model: Any, seed: int) -> list[torch.Tensor]:
    """Return random token ids, int64 (1, length) for each length in LENGTHS."""
    random = np.random.default_rng(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    return [torch.from_numpy(random.integers(0, vocabulary, (1, length))) for length in LENGTHS]


def takes_drafts(forward: PagedForward) -> bool:
    """Return whether a model with recurrent states computes the same logits for tokens that are drafts."""
    if not forward.takes_drafts:
        return False
    model = forward.model
    prompts = random_prompts(model, SEEDS[0])
    with torch.inference_mode():
        own = [torch.cat(parts) for parts in logits_over_pages(forward, prompts)]
        found = logits_over_pages(forward, prompts, drafts=True)
    is_rounded = model.dtype in HALVES or quantisation_of(model) is not None
    return difference(found, own) <= (TOLERANCE_OF_HALVES if is_rounded else TOLERANCE)


def logits_over_pages(
    forward: PagedForward, prompts: list[torch.Tensor], drafts: bool = False
) -> list[list[torch.Tensor]]:
    """Run all prompts together over pages. Return the logits of both chunks of each, (tokens, vocab_size).

    With `drafts` the tokens of the second chunks are drafts, but for the first one.
    """
    slots = sum(LENGTHS) if drafts else len(prompts)
    memory = ModelMemory(forward.layout, 4 * max(1, len(forward.layout.groups)), "float32", max_sequences=slots)
    sequences = [memory.sequence() for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for seen in (0, SEEN):
        pairs = zip(prompts, CHUNKS, strict=True)
        tokens = [prompt[0, slice(cut, None) if seen else slice(cut)].tolist() for prompt, cut in pairs]
        counts = [len(row) for row in tokens]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.append(count)
            if drafts and seen:
                sequence.hold_drafts(count - 1)
        try:
            logits = forward(memory, tokens, sequences, counts, seen).float()
        except IndexError as error:
            if not seen:
                raise
            raise Unsupported(
                "it takes positions from the number of tokens in its cache, which differs from sequence to sequence"
            ) from error
        for parts, part in zip(found, logits.split(counts), strict=True):
            parts.append(part)
    for sequence in sequences:
        sequence.close()
    return found


def pack_linears(forward: PagedForward, drops: bool) -> PackedLinears | None:
    """Pack the weights of linear layers for a forward over pages, if its logits stay the same.

    Parameters
    ----------
    forward : PagedForward
        The forward. It uses the packed layers from now on.
    drops : bool
        Whether the layers drop their own weights until `close` of the result.

    Returns
    -------
    PackedLinears or None
        The packed layers. None if no layer can be packed, or if the logits change. In the second case nothing has
        changed, and the logger "pagepool" reports it.
    """
    model, hooks = forward.model, forward.hooks
    prompts = random_prompts(model, SEEDS[0])
    with torch.inference_mode():
        own = logits_over_pages(forward, prompts)
    off: Any = None
    for fuses in (True, False):  # code between fused layers may need contiguous results
        packed = PackedLinears(model, prompts[0], fuses, drops)
        if not packed.forwards:
            return None
        hooks.use(packed)
        try:
            with torch.inference_mode():
                found = logits_over_pages(forward, prompts)
        except Exception as error:
            off = error
        else:
            whole = [torch.cat(parts) for parts in own]
            is_equal = all(torch.equal(torch.cat(parts), logits) for parts, logits in zip(found, whole, strict=True))
            off = f"its logits change by {difference(found, whole):.1e} of the largest"
            if is_equal or (model.dtype is torch.float32 and difference(found, whole) <= TOLERANCE):
                fuse(forward, packed, prompts, whole)
                return packed
        hooks.use(None)
        packed.close()
    logger.warning("%s runs with weights that are not packed: %s", type(model).__name__, off)
    return None


def fuse(forward: PagedForward, packed: PackedLinears, prompts: list[torch.Tensor], own: list[torch.Tensor]) -> None:
    """Use the first fused forwards with which the logits of all prompts stay the same, bit by bit."""
    off: Any = None
    for fused in fused_forwards(forward.model, packed, forward.layout):
        forward.hooks.use(packed, fused)
        try:
            with torch.inference_mode():
                found = [torch.cat(parts) for parts in logits_over_pages(forward, prompts)]
        except Exception as error:  # a module can call another one in a way that its type does not show
            off = error
        else:
            if all(map(torch.equal, found, own)):
                return
            off = f"its logits change by {difference([[part] for part in found], own):.1e} of the largest"
        forward.hooks.use(packed)
    if off is not None:
        logger.warning("%s runs without fused operations: %s", type(forward.model).__name__, off)


def difference(chunks: list[list[torch.Tensor]], own: list[torch.Tensor]) -> float:
    """Return the largest difference of a chunk, as the median of its tokens, relative to the largest logit."""
    largest = max(float(logits.abs().max()) for logits in own)
    rows = [(torch.cat(parts) - logits).abs().amax(1) for parts, logits in zip(chunks, own, strict=True)]
    medians = [part.median() for row, cut in zip(rows, CHUNKS, strict=True) for part in (row[:cut], row[cut:])]
    return float(torch.stack(medians).max()) / largest
