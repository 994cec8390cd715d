"""A scheduler with transferred blocks generates the same tokens, also after blocks have failed to load."""

import pytest
from fake_runner import FakeRunner, random_logits
from stepped import SteppedTransfer

from pagepool import SchedulerConfig
from pagepool.transfer import LocalTransfer

BLOCK_SIZE = 4
PROMPT = [*range(40, 64)]  # 6 blocks
CONFIG = SchedulerConfig(max_prefill_tokens=8)


class Worker:
    """A pool with a prefix cache and a scheduler. The next token is a function of all tokens in the pages."""

    def __init__(self, transfer, num_blocks=32):
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, next_token=random_logits)
        self.allocator = self.runner.pool.allocator
        self.cache = self.runner.new_prefix_cache()
        self.scheduler = self.runner.scheduler(CONFIG, self.cache)
        self.transfer = transfer
        transfer.register(self.runner.pool)

    def generate(self, prompt, max_new_tokens):
        """Return the output of a prompt, and the number of tokens that the model was fed."""
        number, fed = self.scheduler.add_request(prompt, max_new_tokens=max_new_tokens), 0
        sequence = self.scheduler.get_sequence(number)
        while self.scheduler.has_work:
            fed += self.step()
        return list(sequence.output_tokens), fed

    def step(self):
        """Run one step; return the number of tokens that the model was fed."""
        batch = self.scheduler.schedule()
        rows = iter(self.runner.run(batch))
        tokens = [int(next(rows).argmax()) if wants else None for wants in batch.wants_token]
        self.scheduler.commit(batch, tokens)
        self.scheduler.drain_finished()
        return sum(map(len, batch.tokens))

    def offer(self, prompt, **named):
        """Offer the cached blocks of a prompt; return the lease."""
        found = self.cache.match_prefix(prompt)
        try:
            return self.transfer.offer(found, **named)
        finally:
            self.allocator.free(found)

    def take_in(self, prompt, blocks, result):
        """Cache the blocks before the first failed one, so that the scheduler finds them."""
        good = blocks.index(result.failed[0]) if result.failed else len(blocks)
        self.cache.cache_blocks(prompt[: good * BLOCK_SIZE], blocks[:good])
        self.allocator.free(blocks)

    def close(self):
        self.transfer.close()
        self.cache.reset_prefix_cache()
        self.allocator.check(others=0)
        assert self.allocator.in_use == 0


@pytest.fixture
def workers():
    prefill, decode = Worker(SteppedTransfer("prefill")), Worker(SteppedTransfer("decode"))
    decode.transfer.meet(prefill.transfer.describe())
    yield prefill, decode
    decode.close()
    prefill.close()


@pytest.fixture(scope="module")
def alone():
    """Return the tokens of a worker without transfers."""
    worker = Worker(LocalTransfer("alone"))
    tokens, fed = worker.generate(PROMPT, 12)
    assert fed == len(PROMPT) + 11
    worker.close()
    return tokens


def reuse(worker, blocks):
    """Discard blocks that only the cache holds, and let a new owner overwrite their pages."""
    worker.cache.discard(blocks)
    assert sorted(worker.allocator.allocate_n(len(blocks)).tolist()) == sorted(blocks)
    for block in blocks:
        worker.runner.pool.page(block)[:] = -1


def ended(transfer):
    """Return the result of the only read."""
    for _ in range(1000):
        if results := transfer.poll():
            return results[0]
    raise AssertionError("the read never ended")


@pytest.mark.parametrize("reused", [[], [0], [3], [5], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_tokens_are_the_same_for_any_failed_pages(workers, alone, reused):
    prefill, decode = workers
    assert prefill.generate(PROMPT, 1) == (alone[:1], len(PROMPT))
    ticket = prefill.offer(PROMPT, seconds=0).ticket
    prefill.transfer.poll()
    theirs = [ticket.blocks[place][0] for place in reused]
    reuse(prefill, theirs)
    blocks = decode.allocator.allocate_n(6).tolist()
    decode.transfer.read(ticket, blocks)
    result = ended(decode.transfer)
    assert result.failed == [blocks[place] for place in reused]
    decode.take_in(PROMPT, blocks, result)
    found = min(reused, default=5) * BLOCK_SIZE  # the last token, and so its block, is always computed
    tokens, fed = decode.generate(PROMPT, 12)
    assert tokens == alone
    assert fed == len(PROMPT) + 11 - found, "loaded blocks were computed again"
    assert decode.cache.cached_tokens(PROMPT) == len(PROMPT)
    decode.scheduler.check()
    decode.cache.check()
    prefill.allocator.free(theirs)


def test_an_unchecked_page_changes_the_tokens(workers, alone):
    prefill, decode = workers
    prefill.generate(PROMPT, 1)
    ticket = prefill.offer(PROMPT, seconds=0).ticket
    prefill.transfer.poll()
    theirs = [ticket.blocks[3][0]]
    reuse(prefill, theirs)
    blocks = decode.allocator.allocate_n(6).tolist()
    decode.transfer.read(ticket, blocks)
    result = ended(decode.transfer)
    decode.take_in(PROMPT, blocks, result._replace(failed=[]))
    assert decode.generate(PROMPT, 12)[0] != alone
    prefill.allocator.free(theirs)


def test_late_bytes_change_no_recomputed_token(workers, alone):
    prefill, decode = workers
    prefill.generate(PROMPT, 1)
    lease = prefill.offer(PROMPT)
    blocks = decode.allocator.allocate_n(6).tolist()
    decode.transfer.stopped, decode.transfer.timeout = True, 0.05
    decode.transfer.read(lease.ticket, blocks)
    result = decode.transfer.poll(60)[0]
    assert result.failed == blocks and "has not answered" in result.error
    decode.take_in(PROMPT, blocks, result)
    decode.transfer.stopped = False
    assert decode.transfer.references() == blocks
    number = decode.scheduler.add_request(PROMPT, max_new_tokens=12)
    sequence = decode.scheduler.get_sequence(number)
    while decode.scheduler.has_work:
        decode.step()
        decode.transfer.poll()  # half a page arrives
    assert list(sequence.output_tokens) == alone
    assert decode.transfer.references() == []
    assert decode.runner.pool.page(blocks[0]).any(), "no bytes arrived"
    prefill.transfer.withdraw(lease)


def test_a_full_reader_evicts_for_reads_and_for_running_requests(workers, alone):
    prefill, decode = workers
    for number in range(4):
        decode.generate([number * 30 + place for place in range(28)], 4)
    prefill.generate(PROMPT, 1)
    lease = prefill.offer(PROMPT)
    assert decode.allocator.available < 6
    decode.cache.evict(6 - decode.allocator.available)
    blocks = decode.allocator.allocate_n(6).tolist()
    decode.transfer.read(lease.ticket, blocks)
    decode.scheduler.add_request(range(90, 118), max_new_tokens=12)
    while decode.scheduler.has_work:  # meanwhile another request runs and causes evictions
        assert decode.transfer.poll() == []
        decode.step()
    decode.take_in(PROMPT, blocks, ended(decode.transfer))
    assert decode.generate(PROMPT, 12)[0] == alone
    prefill.transfer.withdraw(lease)
