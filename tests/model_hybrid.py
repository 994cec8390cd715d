"""Operations of the random program on recurrent states, and on sequences of pages, windows and a state together."""

from model_world import MODELS, Core, Divergence, Sequence


def state_after(tokens):
    """The result of a recurrence over tokens; 0 without tokens."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % 100_003
    return value


class Hybrid(Sequence):
    """A `HybridSequence` on both sides, its model and its tokens."""

    def __init__(self, pair, model):
        super().__init__(pair)
        self.model = model


OPERATIONS = {
    "lend": 2, "advance": 2, "copy": 2, "give_back": 2,
    "start_hybrid": 3, "resume_hybrid": 2, "append_hybrid": 9, "fork_hybrid": 2, "checkpoint": 4, "forget": 1,
    "roll_back": 3, "roll_to": 3, "cut_hybrid": 2, "draft": 3, "trim": 1, "close_hybrid": 4, "publish_hybrid": 2,
}  # fmt: skip


class Hybrids(Core):
    MOST_HYBRIDS = 5

    def lend(self):
        request = 1 + self.below(8)
        slot = self.both(lambda side, i: side.states.alloc(request))
        if isinstance(slot, int):
            self.slots.append(slot)

    def advance(self):
        slot = self.pick(self.slots)
        if slot is not None:
            self.write_state(slot, self.below(100))

    def write_state(self, slot, value):
        def call(side, i):
            side.states.view(0, "h")[slot] = value
            side.states.slot(slot).step()

        self.both(call)

    def copy(self):
        to, source = self.pick(self.slots), self.pick(self.slots)
        if to is not None:
            self.both(lambda side, i: side.states.copy(to, source))

    def give_back(self):
        slot = self.pick(self.slots)
        if slot is not None:
            self.both(lambda side, i: side.states.release(slot))
            self.slots.remove(slot)

    def start_hybrid(self):
        if len(self.hybrids) < self.MOST_HYBRIDS:
            model, stateful, keep = self.below(len(MODELS)), self.below(4), self.one_of((0, 0, 3))
            hybrid = self.new_hybrid(model, stateful, keep)
            if hybrid:
                self.feed(hybrid, [self.below(2) for _ in range(self.count())])

    def new_hybrid(self, model, stateful, keep):
        pair = self.make(
            lambda side, i: side.api.HybridSequence(
                side.models[model], side.states if stateful else None, label=1, keep=keep
            )
        )
        if pair is None:
            return None
        hybrid = Hybrid(pair, model)
        self.hybrids.append(hybrid)
        return hybrid

    def feed(self, hybrid, tokens):
        """Appends tokens, writes their keys in every group and the state that they lead to; False if refused."""
        slots = self.both(lambda side, i: [row.tolist() for row in hybrid.pair[i].append(len(tokens))])
        if not isinstance(slots, list):
            return False
        hybrid.tokens += tokens
        for group, row in zip(MODELS[hybrid.model], slots, strict=True):
            self.write(self.pools[group], row, tokens)
        if hybrid.pair[0].state is not None and tokens:
            self.write_state(hybrid.pair[0].state.index, state_after(hybrid.tokens))
        return True

    def resume_hybrid(self):
        """A request of a hybrid model starts with the cached pages and state of its prompt."""
        if len(self.hybrids) >= self.MOST_HYBRIDS:
            return
        prompt = [*self.prompt(), 1]
        hybrid = self.new_hybrid(0, True, 0)
        if not hybrid:
            return
        blocks, cached = self.found(prompt)
        slot = hybrid.pair[0].state.index
        begin = self.both(lambda side, i: side.checkpoints.resume(slot, prompt, cached))
        self.both(lambda side, i: hybrid.pair[i].adopt([blocks[: -(-begin // self.block_size)]], begin))
        self.let_go(blocks)
        hybrid.tokens = prompt[:begin]
        stops = self.both(lambda side, i: [tuple(stop) for stop in side.checkpoints.stops(prompt, cached, begin)])
        for position, reason in [*stops, (len(prompt), None)]:
            if not self.feed(hybrid, prompt[len(hybrid.tokens) : position]):
                return
            if reason:
                self.both(lambda side, i, p=position, r=reason: side.checkpoints.save(slot, prompt, p, r))

    def append_hybrid(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            self.feed(hybrid, [self.below(2) for _ in range(1 + self.below(2 * self.window_size + 1))])

    def fork_hybrid(self):
        hybrid = self.pick(self.hybrids)
        if hybrid and len(self.hybrids) < self.MOST_HYBRIDS:
            pair = self.make(lambda side, i: hybrid.pair[i].fork())
            if pair:
                child = Hybrid(pair, hybrid.model)
                child.tokens = list(hybrid.tokens)
                self.hybrids.append(child)

    def checkpoint(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            self.both(lambda side, i: hybrid.pair[i].checkpoint().position)

    def with_checkpoint(self):
        """A hybrid and one of its checkpoints, on both sides."""
        hybrid = self.pick(self.hybrids)
        known = hybrid.pair[0].checkpoints if hybrid else ()
        if not known:
            return None, None
        place = self.below(len(known))
        return hybrid, [side.checkpoints[place] for side in hybrid.pair]

    def forget(self):
        hybrid, marks = self.with_checkpoint()
        if hybrid:
            self.both(lambda side, i: hybrid.pair[i].discard(marks[i]))
            self.retire("checkpoint", (hybrid.pair, marks))

    def roll_to(self):
        hybrid, marks = self.with_checkpoint()
        if hybrid:
            last = [side.checkpoints[-1] for side in hybrid.pair]
            self.rolled(hybrid, self.both(lambda side, i: hybrid.pair[i].rollback(marks[i])))
            if last[0] is not marks[0]:
                self.retire("checkpoint", (hybrid.pair, last))

    def roll_back(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            n = self.below(min(8, len(hybrid.tokens) + 2))
            self.rolled(hybrid, self.both(lambda side, i: hybrid.pair[i].rollback(n)))

    def rolled(self, hybrid, length):
        if isinstance(length, int):
            del hybrid.tokens[length:]

    def cut_hybrid(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            known = [0, len(hybrid.tokens), *[mark.position for mark in hybrid.pair[0].checkpoints]]
            length = self.below(len(hybrid.tokens) + 2) if self.below(2) else self.one_of(known)
            if self.both(lambda side, i: hybrid.pair[i].truncate(length)) is None:
                del hybrid.tokens[length:]

    def draft(self):
        """Tokens of a step, the last ones of them drafts, of which some are accepted."""
        hybrid = self.pick(self.hybrids)
        if not hybrid or any(mark.position == len(hybrid.tokens) for mark in hybrid.pair[0].checkpoints):
            return
        before, count = len(hybrid.tokens), self.below(4)
        if not self.feed(hybrid, [self.below(2)]):
            return
        drafts = [self.below(2) for _ in range(count)]
        slots = self.both(lambda side, i: [row.tolist() for row in hybrid.pair[i].append(count)])
        if not isinstance(slots, list):
            return
        for group, row in zip(MODELS[hybrid.model], slots, strict=True):
            self.write(self.pools[group], row, drafts)
        held = self.both(lambda side, i: hybrid.pair[i].hold_drafts(count)) is None
        for place, slot in enumerate(hybrid.pair[0].drafts, 1):
            self.write_state(slot.index, state_after(hybrid.tokens + drafts[:place]))
        accepted = self.below(count + 1) if held else 0
        hybrid.tokens += drafts[:accepted]
        self.both(lambda side, i: hybrid.pair[i].retract(before + 1 + accepted))

    def trim(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            self.both(lambda side, i: hybrid.pair[i].trim())

    def close_hybrid(self):
        hybrid = self.pick(self.hybrids)
        if hybrid:
            self.both(lambda side, i: hybrid.pair[i].close())
            self.hybrids.remove(hybrid)
            self.retire("hybrid", hybrid.pair)

    def publish_hybrid(self):
        """A request ends: its blocks and its state are cached for later requests with the same prefix."""
        hybrid = self.pick(self.hybrids)
        if hybrid and MODELS[hybrid.model][0] == 0:
            self.cache_tokens(hybrid.tokens, hybrid.pair[1].kv[0].blocks)
            if hybrid.pair[0].state is not None and hybrid.tokens:
                slot, tokens = hybrid.pair[0].state.index, hybrid.tokens
                self.both(lambda side, i: side.checkpoints.save(slot, tokens, len(tokens), "end"))

    def compare(self):
        super().compare()
        view = self.sides[0].states.view(0, "h")
        for hybrid in self.hybrids:
            ours = hybrid.pair[0]
            self.both(lambda side, i, h=hybrid: h.pair[i].check())
            self.both(lambda side, i, h=hybrid: (h.pair[i].len, [mark.position for mark in h.pair[i].checkpoints]))
            for k, group in enumerate(MODELS[hybrid.model]):
                self.compare_table([side.kv[k] for side in hybrid.pair], hybrid.tokens, self.pools[group])
            if ours.state is not None:
                self.both(lambda side, i, h=hybrid: h.pair[i].state.index)
                if view[ours.state.index].tolist() != [state_after(hybrid.tokens)] * 2:
                    raise Divergence(f"the state after {hybrid.tokens} is {view[ours.state.index]}")
                for mark in ours.checkpoints:
                    if mark._state.view(0, "h").tolist() != [state_after(hybrid.tokens[: mark.position])] * 2:
                        raise Divergence(f"the checkpoint at {mark.position} has another state")
