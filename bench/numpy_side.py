"""What one would write with numpy instead: the baselines of the group `numpy`."""

import numpy as np


class NumpyAllocator:
    """Free ids on a stack in an array, reference counts beside it; bulk operations are slices."""

    def __init__(self, num_blocks):
        self.stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.refs = np.zeros(num_blocks, np.int32)
        self.top = num_blocks

    def allocate(self):
        return self.allocate_n(1)[0]

    def allocate_n(self, n):
        if n > self.top:
            raise MemoryError(f"asked for {n} blocks, {self.top} are free")
        self.top -= n
        blocks = self.stack[self.top : self.top + n][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def free(self, blocks):
        blocks = np.atleast_1d(blocks)
        if (self.refs[blocks] < 1).any():
            raise ValueError("a block is not allocated")
        self.refs[blocks] -= 1
        freed = blocks[self.refs[blocks] == 0]
        self.stack[self.top : self.top + len(freed)] = freed
        self.top += len(freed)


class NumpyPages:
    """K and V of one layer as arrays (slots, num_kv_heads, head_dim), in float32: numpy has no fast bfloat16."""

    def __init__(self, layout, num_blocks):
        shape = (num_blocks * layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def append(self, slots, k, v):
        self.k[slots], self.v[slots] = k, v

    def decode(self, q, block_tables, seq_lens, block_size):
        """Gathers each sequence, then two matmuls and a softmax for all of its heads."""
        out = np.empty_like(q)
        scale = np.float32(1 / np.sqrt(q.shape[2]))
        for row, length in enumerate(seq_lens):
            tokens = np.arange(length)
            slots = block_tables[row, tokens // block_size] * block_size + tokens % block_size
            k, v = self.k[slots].transpose(1, 2, 0), self.v[slots].transpose(1, 0, 2)
            scores = np.matmul(q[row].reshape(k.shape[0], -1, q.shape[2]), k) * scale
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            out[row] = np.matmul(weights, v).reshape(q.shape[1:])
        return out
