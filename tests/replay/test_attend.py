"""`--attend`: every token is stored in every layer, and every decode reads all tokens of its sequence."""

import json

import numpy as np
import pytest

import pagepool
from pagepool import BlockTables, KvCachePool, KvLayout, SchedulerConfig
from pagepool.cli import main
from pagepool.replay.attend import GEOMETRIES, Attention, Geometry
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import MeteredBlockManager, Replay
from pagepool.replay.ptrace import read_trace

SMALL = Geometry(num_layers=3, num_qo_heads=4, num_kv_heads=2, head_dim=16)


class Recorder:
    """A stand-in for the module `pagepool` that checks and records the calls of `decode`."""

    BlockTables = BlockTables

    def __init__(self):
        self.layers = []
        self.read = 0

    def decode(self, q, pool, layer, block_tables, seq_lens, *, out, **options):
        assert q.shape == (len(seq_lens), 4, 16) and q.shape == out.shape
        result = pagepool.decode(q, pool, layer, block_tables, seq_lens, out=out, **options)
        assert result is out and np.isfinite(out).all()
        self.layers.append(layer)
        self.read += int(seq_lens.sum())
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_stores_and_reads_every_token(make_trace, dtype):
    pool = KvCachePool.from_layout(KvLayout(SMALL.num_layers, SMALL.num_kv_heads, SMALL.head_dim, 4, dtype), 40)
    memory = Recorder()
    attention = Attention(memory, pool, SMALL, max_sequences=8, max_tokens=16, max_blocks_per_seq=8)
    config = SchedulerConfig(block_size=4, max_batch_tokens=16, max_prefill_tokens=16)
    stored = []
    append = attention.run

    def run(batch):
        append(batch)
        for state in batch.states:
            k, v = pool.gather(2, state.blocks, state.len)
            stored.append(bool(np.any(k, axis=(1, 2)).all() and np.any(v, axis=(1, 2)).all()))

    attention.run = run
    path = make_trace([[0, 10, 4, []], [0, 7, 3, []], [0, 5, 1, []]])
    replay = Replay(read_trace(path), config, MeteredBlockManager(pool.allocator, 4), CostModel(), attention)
    replay.run()
    assert stored and all(stored)
    # Decodes of A read 11, 12, 13 tokens, decodes of B 8 and 9. Prefill gives the first token.
    per_layer = 11 + 12 + 13 + 8 + 9
    assert memory.read == 3 * per_layer
    element = 4 if dtype == "float32" else 2
    assert attention.kv_bytes == 3 * per_layer * 2 * 2 * 16 * element
    assert attention.calls == len(memory.layers) and set(memory.layers) == {0, 1, 2}
    assert attention.seconds > 0 and attention.append_seconds > 0


def test_the_geometries_are_those_of_the_models():
    assert {name: (g.num_layers, g.num_qo_heads, g.num_kv_heads, g.head_dim) for name, g in GEOMETRIES.items()} == {
        "qwen2.5-0.5b": (24, 14, 2, 64),
        "llama-3.2-1b": (16, 32, 8, 64),
        "llama-3.1-8b": (32, 32, 8, 128),
    }


def test_the_command_attends(make_trace, capsys):
    path = make_trace([[0, 20, 4, []], [0, 12, 3, []]])
    arguments = ["replay", str(path), "--attend", "qwen2.5-0.5b", "--json", "-"]
    assert main(arguments) == 0
    numbers = json.loads(capsys.readouterr().out)
    per_layer = 21 + 22 + 23 + 13 + 14
    assert numbers["attention"]["kv_bytes"] == 24 * per_layer * 2 * 2 * 64 * 2
    assert numbers["attention"]["calls"] == 24 * 3 and numbers["attention"]["gb_per_s"] > 0
    assert 0 < numbers["memory_s"] < numbers["wall_s"]
    assert numbers["memory_share"] == pytest.approx(numbers["memory_s"] / numbers["wall_s"])
    assert main(["replay", str(path), "--attend", "qwen2.5-0.5b"]) == 0
    assert "keys and values read" in capsys.readouterr().out


def test_attention_takes_at_most_two_gibibytes_by_default(make_trace, capsys):
    """A request that needs more is refused, not started."""
    path = make_trace([[0, 20_000, 4, []], [0, 4, 2, []]])
    assert main(["replay", str(path), "--attend", "llama-3.1-8b", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["blocks"], numbers["refused"], numbers["finished"]) == (1024, 1, 1)
