"""A random program of 100,000 operations on the compiled memory and on reference; `make model-test` is the long run."""

import model_run
import pytest

from pagepool import reference


@pytest.mark.parametrize("seed", [1, 20261121])
def test_no_divergence_in_fifty_thousand_operations(seed):
    done = []
    model_run.run(seed, 50_000, done.append)
    assert done[-1] == 50_000


def test_the_program_reaches_every_operation_with_and_without_a_transaction(monkeypatch):
    seen = set()

    def recorded(name):
        method = getattr(model_run.World, name)

        def call(self):
            seen.add((name, bool(self.taking_part)))
            method(self)

        return call

    for name in model_run.OPERATIONS:
        monkeypatch.setattr(model_run.World, name, recorded(name))
    model_run.run(3, 8000)
    assert seen == {(name, within) for name in model_run.OPERATIONS for within in (False, True)}


@pytest.mark.parametrize(
    "name, method",
    [("BlockAllocator", "free"), ("PagedSeqState", "abort"), ("SsmStatePool", "copy"), ("PrefixCache", "evict")],
)
def test_a_fault_is_found(monkeypatch, name, method):
    """The program can fail: on one side, one call in a hundred does nothing."""
    owner = getattr(reference, name)
    right, calls = getattr(owner, method), []

    def faulty(self, *given, **names):
        calls.append(1)
        return [] if len(calls) % 100 == 0 else right(self, *given, **names)

    monkeypatch.setattr(owner, method, faulty)
    with pytest.raises(AssertionError):
        model_run.run(5, 20_000)
