"""A runner without a model: it computes the next token from all previous tokens, which it reads from the pages."""

import threading
import time
import zlib

import numpy as np

from pagepool import BlockTables, KvCachePool, KvLayout, PrefixCache, PrefixStore, Scheduler
from pagepool.prefix.fingerprint import fingerprint_of

VOCABULARY = 256


class Bytes:
    """A tokenizer with one token per UTF-8 byte. Token 0 ends a text and decodes to nothing."""

    eos_token_id = 0
    chat_template = "{role}: {content}"

    def __call__(self, text, **options):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens=True):
        return bytes(token for token in ids if token).decode(errors="replace")

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True, thinks=True, **variables):
        told = "" if thinks else "think: no\n"
        return told + "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


class FakeRunner:
    """A ModelRunner without a model: `model` is None.

    next_token   a function from all tokens of a sequence to logits of `VOCABULARY` tokens; by default random logits
    fails        a function from the tokens of a step to an exception to raise, or None
    step_seconds duration of a step
    """

    model = None
    states = None
    groups = None
    vocab_size = VOCABULARY

    def __init__(self, num_blocks=64, block_size=4, max_model_len=None, next_token=None, fails=None, step_seconds=0.0):
        layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="float32")
        self.pool = KvCachePool.from_layout(layout, num_blocks)
        self.pools = (self.pool,)
        self.max_model_len = max_model_len
        self.tables = BlockTables(64, num_blocks)
        self.next_token = next_token or random_logits
        self.fails = fails or (lambda tokens: None)
        self.step_seconds = step_seconds
        self.is_closed = False
        self.threads = set()

    def open_store(self, path, max_bytes, weights=None):
        return PrefixStore(path, fingerprint_of(self.pool, weights or "none"), max_bytes)

    def new_prefix_cache(self, max_events=0, store=None):
        return PrefixCache(self.pool.allocator, max_events=max_events, store=store)

    def scheduler(self, config, prefix_cache=None):
        return Scheduler(config, self.pool, prefix_cache)

    def run(self, batch):
        return self.forward(batch.tokens, batch.states, [int(wants) for wants in batch.wants_token])

    def forward(self, tokens, sequences, keep):
        self.threads.add(threading.current_thread().name)
        error = self.fails(tokens)
        if error is not None:
            raise error
        time.sleep(self.step_seconds)
        self.tables.fill(sequences, [len(row) for row in tokens])
        fed = np.concatenate(tokens).astype(np.float32)
        rows = np.repeat(fed, 8).reshape(-1, 1, 8)
        self.pool.append(0, self.tables.slot_mapping, rows, rows)
        logits = []
        for state, count in zip(sequences, keep, strict=True):
            if count:
                k, _ = self.pool.gather(0, state.blocks, state.len)
                known = k[:, 0, 0].astype(int).tolist()
                logits += [self.next_token(known[:end]) for end in range(state.len - count + 1, state.len + 1)]
        return np.array(logits, np.float32).reshape(-1, VOCABULARY)

    def close(self):
        self.is_closed = True


def reason_of(generation, seconds=60):
    """Wait for the end of a generation, which may have failed; return its finish reason."""
    try:
        generation.result(seconds)
    except RuntimeError as error:
        assert error.__cause__ is generation.error is not None
    return generation.finish_reason


def random_logits(tokens):
    """Return random logits of the printable ASCII characters, seeded with a checksum of all previous tokens."""
    logits = np.full(VOCABULARY, -np.inf, np.float32)
    random = np.random.default_rng(zlib.crc32(np.array(tokens, np.int32).tobytes()))
    logits[32:127] = random.standard_normal(95)
    return logits


def says(text):
    """Return a `next_token` that generates the bytes of `text`, then 0, after any prompt of one token."""
    wanted = [*text.encode(), 0]

    def next_token(tokens):
        logits = np.zeros(VOCABULARY, np.float32)
        logits[wanted[len(tokens) - 1]] = 9.0
        return logits

    return next_token
