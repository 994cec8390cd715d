"""Drafts of an engine that come from known texts, some of their tokens replaced by wrong ones."""

import random
from types import SimpleNamespace


class Scripted:
    """The methods of `Drafts` that an engine calls."""

    def __init__(self, continuations, rng, most=7):
        self.continuations, self.rng, self.most = continuations, rng, most
        self.costs = SimpleNamespace(note=lambda rows, seconds: None)

    def drafter(self, prompt, following):
        return ScriptedDrafter(self.continuations[tuple(prompt)])

    def choose(self, drafters, most=None):
        return {seq_id: self.draft(drafter) for seq_id, drafter in drafters.items()}

    def draft(self, drafter):
        known = drafter.text[drafter.num_new :][: self.rng.randint(1, self.most)]
        return [token if self.rng.random() < 0.8 else self.rng.randrange(256) for token in known]


class ScriptedDrafter:
    def __init__(self, text):
        self.text, self.num_new = text, 0

    def add(self, token):
        self.num_new += 1


def drafting(engine, texts, seed, most=7):
    """Let an engine draft from texts: a dict of generated tokens by prompt."""
    engine._drafts = Scripted(texts, random.Random(seed), most)
    return engine
