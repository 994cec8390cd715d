"""A random program of 100,000 operations on the compiled memory and on reference; `make model-test` is the long run."""

import model_run
import pytest

from pagepool import reference


@pytest.mark.parametrize("seed", [1, 20261121])
def test_no_divergence_in_fifty_thousand_operations(seed):
    done = []
    model_run.run(seed, 50_000, done.append)
    assert done[-1] == 50_000


def test_the_program_does_every_operation_and_has_every_one_that_can_fail_refused():
    counted = model_run.run(3, 40_000)
    assert set(counted) == set(model_run.OPERATIONS)
    assert {name for name, (_, done, _) in counted.items() if not done} == {"free_too_much", "use_stale"}
    never = {"fork", "drop_before", "release", "release_batch", "close", "hit", "publish", "evict", "discard", "reset"}
    never |= {"free", "hold", "advance", "copy", "give_back", "forget", "roll_to", "trim", "close_hybrid"}
    never |= {"publish_hybrid"}
    assert {name for name, (*_, refused) in counted.items() if not refused} <= never


@pytest.mark.parametrize(
    "name, method",
    [
        ("BlockAllocator", "free"),
        ("PagedSeqState", "truncate"),
        ("SsmStatePool", "copy"),
        ("PrefixCache", "evict"),
        ("HybridSequence", "trim"),
        ("HybridSequence", "checkpoint"),
    ],
)
def test_a_fault_is_found(monkeypatch, name, method):
    """The random program detects an error: on one side, one call in a hundred does nothing."""
    owner = getattr(reference, name)
    right, calls = getattr(owner, method), []

    def faulty(self, *given, **names):
        calls.append(1)
        return [] if len(calls) % 100 == 0 else right(self, *given, **names)

    monkeypatch.setattr(owner, method, faulty)
    with pytest.raises(AssertionError):
        model_run.run(5, 40_000)
