"""Operations of the random program on the prefix cache: hits, publications, evictions."""

from model_world import Core, Sequence

OPERATIONS = {
    "hit": 4, "publish": 5, "evict": 3, "discard": 1, "hold": 1, "reset": 0.1,
}  # fmt: skip


class Cached(Core):
    def found(self, prompt):
        """The cached blocks of a prompt, which the caller frees, and the number of tokens in them."""
        if self.below(2):
            blocks = self.both(lambda side, i: side.cache.match_prefix(prompt))
            return blocks, len(blocks) * self.block_size

        def match(side, i):
            blocks, tokens = side.cache.match_tokens(prompt)
            return blocks.tolist(), tokens

        return self.both(match)

    def let_go(self, blocks):
        self.both(lambda side, i: side.allocator.free(blocks))

    def hit(self):
        """A request begins with the cached prefix of its prompt."""
        if len(self.sequences) >= self.MOST:
            return
        prompt = self.prompt()
        blocks, tokens = self.found(prompt)
        sequence = Sequence(self.make(lambda side, i: side.api.PagedSeqState(side.allocator, self.block_size)))
        self.both(lambda side, i: sequence.pair[i].adopt(blocks, tokens))
        sequence.tokens = prompt[:tokens]
        self.let_go(blocks)
        self.sequences.append(sequence)

    def publish(self):
        sequence = self.pick(self.sequences)
        if sequence and sequence.pair[0].first_block == 0:
            self.cache_tokens(sequence.tokens, sequence.pair[1].blocks)

    def cache_tokens(self, tokens, blocks):
        tokens = list(tokens)
        self.both(lambda side, i: side.cache.cache_blocks(tokens, blocks))

    def evict(self):
        n = self.below(4)
        self.both(lambda side, i: side.cache.evict(n))

    def discard(self):
        blocks = [self.below(self.most) for _ in range(2)]
        self.both(lambda side, i: side.cache.discard(blocks))

    def hold(self):
        """Hold the cached blocks of a prompt until they are freed."""
        self.held += self.found(self.prompt())[0]

    def reset(self):
        self.both(lambda side, i: side.cache.reset_prefix_cache())
