"""The KV connector for hybrid models of vLLM on CPUs: their recurrent states are pages of the tier too.

vLLM keeps the state of a recurrent layer in blocks: block i has the state after i + 1 full blocks of tokens, if a step
has ended there. In the tier, the pages of this state follow the pages of the blocks, under tokens that no prompt has:

    block 0, block 1, ..., block i, states

So the states are there only if all pages before them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, SupportsHMA
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from pagepool.integrations.vllm_connector import BlockCopy, PagepoolConnector, Rows

__all__ = ["PagepoolHybridConnector"]

STATE_TOKEN = 2**31 - 1  # the token of pages with states: no vocabulary is so large
STATES = "GDN_ATTN"  # vLLM's name of gated delta nets


class PagepoolHybridConnector(PagepoolConnector, SupportsHMA):
    """`PagepoolConnector` for models with layers of full attention and of gated delta nets, such as Qwen3-Next.

    A prefix is found up to the last block with states in the tier. vLLM ends a step there: at the last full block
    of a prompt, at each block that new tokens complete, and at the end of each part of a long prompt.

    Pages are copied between two steps, because vLLM copies states before a step computes.

    Parameters and errors as in `PagepoolConnector`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._states = [place for place, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]
        [self._attention] = set(range(len(groups))) - set(self._states)
        self._ends: dict[str, int] = {}  # Used by the scheduler: blocks of the prompts in `_matches`
        # Used by the worker:
        self._state_rows: list[Rows] = []  # of each group of states
        self._results = KVConnectorTransferResults()

    # The scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the computed ones the tier has with states, and True: a step before loads them.

        Returns None while a thread reads pages from the store. vLLM runs other requests and asks again.
        """
        if request.request_id not in self._requests or request.skip_reading_prefix_cache:
            return 0, False
        first, num_states = num_computed_tokens // self._size, len(self._states)
        most = (request.num_tokens - 1) // self._size  # vLLM must compute one token
        match, _ = self._matches.pop(request.request_id, (None, 0))
        end = self._ends.pop(request.request_id, most)
        tokens = super()._tokens(request, end)  # once: a list takes longer to convert than to look up
        while match is not None or end > first:
            if match is None:
                match = self._tier.submit_match(
                    self._with_states(tokens[: end * self._size]), cache_salt=request.cache_salt
                )
            is_found = match.done() and match.result().num_tokens == (end + num_states) * self._size
            if not match.done() or (is_found and end > first):
                self._matches[request.request_id], self._ends[request.request_id] = (match, first), end
                return (end * self._size - num_computed_tokens, True) if is_found else (None, False)
            match.result().close()
            end = min(end - 1, match.result().num_tokens // self._size)
            match = None
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of a request that vLLM has found blocks for."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._ends.pop(request.request_id, None)

    def update_connector_output(self, connector_output: Any) -> None:
        """Compute requests without the tier after a load that has failed."""
        for request_id in connector_output.failed_recving:
            self._requests.pop(request_id, None)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the store write the pages of a request that has ended. vLLM frees its blocks now."""
        self._ends.pop(request.request_id, None)
        return self.request_finished(request, block_ids[self._attention])

    def _tokens(self, request: Any, num_blocks: int) -> NDArray[np.int32]:
        return self._with_states(super()._tokens(request, num_blocks))

    def _with_states(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([tokens, np.full(len(self._states) * self._size, STATE_TOKEN, np.int32)])

    def _end_of_save(self, num_tokens: int) -> int:
        return num_tokens // self._size if num_tokens % self._size == 0 else 0  # states of other steps are overwritten

    def _copy(self, request: Any, block_ids: Sequence[list[int]], first: int, end: int) -> BlockCopy:
        attention = [ids for place, ids in enumerate(block_ids) if place not in self._states]
        copy = super()._copy(request, attention, first, end)
        copy.state_ids = [block_ids[place][end - 1] for place in self._states]
        return copy

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the memory of vLLM's blocks."""
        super().register_kv_caches(kv_caches)
        num_blocks, groups = self._kv_cache_config.num_blocks, self._kv_cache_config.kv_cache_groups
        for group in (groups[place] for place in self._states):
            size, rows = group.kv_cache_spec.page_size_bytes, []
            for name in group.layer_names:
                layer = kv_caches[name]
                step = layer.stride(0) * layer.element_size()
                if (
                    layer.device.type != "cpu"
                    or len(layer) != num_blocks
                    or step != size
                    or not layer[0].is_contiguous()
                ):
                    raise ValueError(
                        f"the states of {name} must be {num_blocks} blocks of {size} bytes on the CPU, not "
                        f"{len(layer)} of {step} on {layer.device.type}"
                    )
                # vLLM pads the states of a block to the size of a page.
                rows.append(layer.view(torch.uint8).as_strided((num_blocks, size), (size, 1)).numpy())
            self._state_rows.append(rows)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests with a load in this step, and the requests with a load that failed."""
        for load in self._copies().loads:
            self._results.finished_recving.add(load.request_id)
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def _fail(self, load: BlockCopy) -> None:
        self._results.failed_recving.add(load.request_id)

    def _pages(self, copy: BlockCopy) -> Sequence[Rows]:
        states = zip(self._state_rows, copy.state_ids, strict=True)
        return [*super()._pages(copy), *([row[block] for row in rows] for rows, block in states)]

    # Both.

    @staticmethod
    def _unsupported_groups(kv_cache_config: Any) -> str | None:
        groups = kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        kinds = [str(getattr(getattr(spec, "mamba_type", None), "name", type(spec).__name__)) for spec in specs]
        if sorted(set(kinds)) != [FullAttentionSpec.__name__, STATES] or kinds.count(FullAttentionSpec.__name__) != 1:
            return f"KV cache groups of {', '.join(kinds)}, only one group of full attention and groups of {STATES}"
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        modes = {spec.mamba_cache_mode for spec in states}
        if modes != {"align"}:
            return f"the cache mode {', '.join(sorted(modes))} of states, only align (vLLM's prefix caching)"
        sizes = {kv_cache_config.hash_block_size, *(spec.block_size for spec in specs)}
        if len(sizes) > 1:
            return f"blocks of different sizes: {', '.join(map(str, sorted(sizes)))} tokens"
        pages = {len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups}
        if len(pages) > 1:
            return f"groups with pages of different sizes: {', '.join(map(str, sorted(pages)))} bytes"
        if any(spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks for spec in states):
            return "states inside a step"
        return None
