"""The router knows the contents of the caches, despite lost messages and failed workers, and chooses by them."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, PoolError, PrefixCache
from pagepool.cluster.router import Choice, Router
from pagepool.prefix.events import PrefixEvent, PrefixSnapshot, prefix_names
from pagepool.prefix.keys import root_key, root_name

SALTS = (None, "a", 0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Worker:
    """A worker with a small cache of prompts, which sends its changes."""

    def __init__(self, name, max_events=64):
        self.name, self.max_events, self.epoch = name, max_events, 0
        self.restart()

    def restart(self):
        self.epoch += 1
        self.cache = PrefixCache(BlockAllocator(12), 2, "lru", max_events=self.max_events)

    def message(self):
        return self.name, self.epoch, self.cache.drain_events()


def router_of(**names):
    """Return a router with blocks of 2 tokens, workers "a", "b", "c" with empty caches, and the clock."""
    clock = Clock()
    router = Router(2, 4, clock=clock, **names)
    workers = {name: Worker(name) for name in "abc"}
    for worker in workers.values():
        tell(router, worker)
    return router, workers, clock


def tell(router, worker, load=0, room=0):
    router.update(*worker.message(), load=load, room=room)


def forecasts(router, worker, prompts):
    return [router.forecast(prompt, cache_salt=salt).get(worker, 0) for prompt in prompts for salt in SALTS]


def truth(cache, prompts):
    """Return the tokens of each prompt that a worker finds: full blocks, without the last token."""
    found = [cache.cached_tokens(prompt[:-1], cache_salt=salt) for prompt in prompts for salt in SALTS]
    return [tokens - tokens % 2 for tokens in found]


PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=12)
STEP = st.one_of(
    st.tuples(st.just("prompt"), st.integers(0, 2), PROMPT, st.sampled_from(SALTS)),
    st.tuples(st.just("evict"), st.integers(0, 2), st.integers(1, 12)),
    st.tuples(st.sampled_from(["reset", "restart", "send", "lose", "resync"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["deliver", "repeat"]), st.integers(0, 1_000)),
)


@examples(100)
@given(st.lists(STEP, max_size=60), st.lists(PROMPT, min_size=1, max_size=4), st.integers(2, 64))
def test_the_index_matches_the_caches_after_lost_repeated_and_late_messages(steps, prompts, max_events):
    router, workers = Router(2, 3, clock=Clock()), [Worker(name, max_events) for name in range(3)]
    flight = []  # messages in transit

    def deliver(message):
        try:
            router.update(*message, load=0, room=0)
        except PoolError as error:
            assert "was lost" in str(error)

    for kind, which, *rest in steps:
        worker = workers[which % 3]
        if kind == "prompt":
            worker.cache.touch(rest[0], cache_salt=rest[1])
        elif kind == "evict":
            worker.cache.evict(rest[0])
        elif kind == "reset":
            worker.cache.reset_prefix_cache()
        elif kind == "restart":
            worker.restart()
        elif kind == "send":
            flight.append(worker.message())
        elif kind == "lose":
            worker.message()
        elif kind == "resync":
            router.restore(worker.name, worker.epoch, worker.cache.snapshot(), load=0, room=0)
        elif flight:  # any message in transit, so that messages overtake each other
            message = flight[which % len(flight)]
            deliver(message)
            if kind == "deliver":
                flight.remove(message)
    for worker in workers:
        worker.cache.touch([7, 8])  # a later event reveals a gap
        try:
            router.update(*worker.message(), load=0, room=0)
        except PoolError:
            router.restore(worker.name, worker.epoch, worker.cache.snapshot(), load=0, room=0)
        for message in [None, *flight]:  # late messages change nothing
            if message:
                deliver(message)
            assert forecasts(router, worker.name, prompts) == truth(worker.cache, prompts)
    held = {event.name for worker in workers for event in worker.cache.snapshot().stored}
    assert router.stats()["blocks"] == len(held)
    router.check()


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 2), PROMPT, st.sampled_from(SALTS)), max_size=30), PROMPT)
def test_without_delays_the_forecast_matches_the_worker_s_hits(served, prompt):
    router, workers = Router(2, 3, clock=Clock()), [Worker(name) for name in range(3)]
    for which, tokens, salt in served:
        workers[which].cache.touch(tokens, cache_salt=salt)
        for worker in workers:
            tell(router, worker)
        for worker in workers:
            assert forecasts(router, worker.name, [prompt, tokens]) == truth(worker.cache, [prompt, tokens])


def test_the_prefix_rule_orders_by_prefix_then_load_then_room_then_idle_time():
    router, workers, _ = router_of(rule="prefix")
    workers["a"].cache.touch([1, 2, 3, 4])
    workers["b"].cache.touch([1, 2, 3, 4, 5, 6])
    tell(router, workers["a"], load=0, room=9)
    tell(router, workers["b"], load=50, room=0)
    tell(router, workers["c"], load=0, room=9)
    assert router.choose([1, 2, 3, 4, 5, 6, 7]) == Same("b", 6)
    assert router.choose([1, 2, 3, 4, 9]) == Same("a", 4)  # b has as many tokens but more load
    tell(router, workers["a"], load=7, room=9)
    tell(router, workers["c"], load=7, room=8)
    assert router.choose([8]) == Same("a", 0)  # more room
    tell(router, workers["a"], load=7, room=8)
    assert router.choose([8]) == Same("c", 0)  # never chosen
    tell(router, workers["c"], load=7, room=8)
    assert router.choose([8]) == Same("a", 0)


class Same:
    """Compares equal to a choice of this worker with this forecast."""

    def __init__(self, worker, tokens):
        self.wanted = worker, tokens

    def __eq__(self, choice):
        return (choice.worker, choice.forecast_tokens) == self.wanted

    def __repr__(self):
        return repr(self.wanted)


def test_a_prompt_goes_where_load_and_computed_tokens_cost_least():
    """Caches are large enough to avoid evictions. Two of three workers are busy, so the weight is 5/3."""
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4, 5, 6])
    tell(router, workers["a"], load=9, room=1_000)
    tell(router, workers["b"], load=100, room=1_000)
    tell(router, workers["c"], load=0, room=1_000)
    assert router.choose([1, 2, 3, 4, 5, 6, 7]) == Same("a", 6)  # 9 + 5/3 * 1 at a, 0 + 5/3 * 7 at c
    tell(router, workers["a"], load=11, room=1_000)
    assert router.choose([1, 2, 3, 4, 5, 6, 8]) == Same("c", 0)  # 11 + 5/3 * 1 at a


def test_computed_tokens_weigh_less_while_more_workers_are_idle():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4, 5, 6])
    tell(router, workers["a"], load=9, room=1_000)
    assert router.choose([1, 2, 3, 4, 5, 6, 7]).worker in "bc"  # the weight is 4/3: 9 + 4/3 * 1 at a, 4/3 * 7 there


def test_computed_tokens_weigh_more_while_every_worker_is_busy():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4])
    for worker in workers.values():
        tell(router, worker, load=1, room=1_000)
    router.choose([9] * 10)  # a prompt has 10 tokens to compute
    tell(router, workers["a"], load=120, room=1_000)
    tell(router, workers["b"], load=100, room=1_000)
    tell(router, workers["c"], load=100, room=1_000)
    # The weight is 1 + 3/3 + 100 / 10: 120 + 12 * 1 at a, 100 + 12 * 5 at b and c.
    assert router.choose([1, 2, 3, 4, 5]) == Same("a", 4)


def test_tokens_that_must_be_evicted_cost_as_often_as_recent_prompts_were_cached():
    router, workers, _ = router_of()
    for name in "ab":
        workers[name].cache.touch([1, 2, 3, 4])
    tell(router, workers["a"], load=3, room=1_000)
    tell(router, workers["b"], load=0, room=0)
    tell(router, workers["c"], load=1_000, room=0)
    # b would evict 6 tokens, but no token of a prompt was cached until now: 0 + 5/3 * 6 at b, 3 + 5/3 * 6 at a.
    assert router.choose([1, 2, 3, 4, *range(10, 16)]) == Same("b", 4)
    tell(router, workers["b"], load=0, room=0)
    # 40 % of the prompt before was cached: 0 + 5/3 * 9 + 0.4 * 9 at b, 3 + 5/3 * 9 at a.
    assert router.choose([1, 2, 3, 4, *range(20, 29)]) == Same("a", 4)


@pytest.mark.parametrize(
    ("move_cost", "choice"),
    [
        (0.25, ("b", 0)),  # b moves 4 tokens and computes 2: 5/3 * (0.25 * 4 + 2), against 5 + 5/3 * 2 at a
        (1.0, ("a", 4)),  # as if b computed all of them
        (3.0, ("a", 4)),  # b would compute them
    ],
)
def test_tokens_that_can_be_moved_cost_less_than_computed_ones(move_cost, choice):
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4])
    for name, load in (("a", 5), ("b", 0), ("c", 1_000)):
        tell(router, workers[name], load=load, room=1_000)
    assert router.choose([1, 2, 3, 4, 5, 6], movable_tokens=4, move_cost=move_cost) == Same(*choice)


@pytest.mark.parametrize(("rule", "used"), [("cost", 64), ("prefix", 1)])
def test_prompts_that_share_one_block_use_all_workers(rule, used):
    """A shared block of 512 tokens costs less than a queue: each prompt has 4,096 tokens, and all arrive at once."""
    router = Router(512, 64, rule=rule, max_imbalance=1 << 20, clock=Clock())
    for worker in range(64):
        router.update(worker, 1, [], load=0, room=1_024)
    shared = [7] * 512
    chosen = [router.choose([*shared, *[number + 10] * 3_584]).worker for number in range(64)]
    assert len(set(chosen)) == used


def test_avoided_workers_come_last():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4])
    tell(router, workers["a"])
    assert router.choose([1, 2, 3, 4, 5], avoid={"a", "unknown"}).worker in "bc"
    assert router.choose([1, 2, 3, 4, 5], avoid="abc") == Same("a", 4)


def test_a_choice_is_load_until_the_worker_reports():
    router, workers, _ = router_of()
    chosen = [router.choose([10 * number] * 5).worker for number in range(1, 7)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["a", "b", "c"]
    tell(router, workers["b"], load=0)
    assert [router.choose([number, 9, 9]).worker for number in (100, 200)] == ["b", "b"]


def test_a_load_includes_requests_in_transit_to_the_worker():
    router, workers, _ = router_of()
    tell(router, workers["b"], load=1000)
    tell(router, workers["c"], load=1000)
    assert [router.choose([number] * 100).worker for number in range(3)] == ["a"] * 3
    router.update(*workers["a"].message(), load=800, room=0, received=0)  # plus 300 tokens in transit: 1,100
    assert router.choose([9] * 10).worker == "b"
    router.update(*workers["a"].message(), load=790, room=0, received=1)
    assert router.choose([10] * 60).worker == "a"  # before 990, now 1,050
    assert router.choose([11] * 10).worker == "c"
    router.update(*workers["a"].message(), load=999, room=0)  # includes all sent requests
    assert router.choose([12] * 500).worker == "a"
    workers["a"].restart()
    router.update(*workers["a"].message(), load=900, room=0, received=0)  # requests in transit are lost
    assert router.choose([13]).worker == "a"


def test_a_worker_far_ahead_of_the_others_is_passed_over():
    router, workers, _ = router_of(rule="prefix", max_imbalance=100)
    workers["a"].cache.touch([1, 2])
    tell(router, workers["a"], load=102)
    assert router.choose([1, 2, 3]) == Same("a", 2)  # limit: 100, plus 2 tokens that another worker had to compute
    tell(router, workers["a"], load=103)
    assert router.choose([1, 2, 3]) == Same("b", 0)
    tell(router, workers["b"], load=1)
    tell(router, workers["c"], load=1)
    assert router.choose([1, 2, 4]) == Same("b", 2)  # b was chosen for this prefix as well, and has less load


def test_prompts_with_a_common_prefix_stay_together_before_any_event():
    router, workers, clock = router_of(max_staleness=10)
    first = router.choose([1, 2, 3, 4, 5])
    assert first.forecast_tokens == 0
    assert router.choose([1, 2, 3, 4, 6]) == Same(first.worker, 4)
    clock.now = 9
    assert router.choose([1, 2, 3, 4, 6]) == Same(first.worker, 4)
    for clock.now in (15, 24, 33, 42):  # the forecast does not come true
        for worker in workers.values():
            tell(router, worker)
        router.choose([7])
    assert router.choose([1, 2, 3, 4, 6]).forecast_tokens == 0
    worker = workers[router.choose([1, 2, 3, 4, 6]).worker]
    worker.cache.touch([1, 2, 3, 4])
    worker.cache.evict(2)
    tell(router, worker)
    assert router.choose([1, 2, 3, 4, 6]).forecast_tokens == 0  # an eviction ends the forecast at once


def test_salts_and_keys_stay_apart():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4], cache_salt="tenant")
    workers["b"].cache.touch([1, 2, 3, 4], extra_keys=(b"image",))
    for worker in workers.values():
        tell(router, worker)
    prompt = [1, 2, 3, 4, 5]
    assert router.forecast(prompt) == {}
    assert router.forecast(prompt, cache_salt="tenant") == {"a": 4}
    assert router.forecast(prompt, cache_salt=b"tenant") == router.forecast(prompt, cache_salt="other") == {}
    assert router.choose(prompt, extra_keys=(b"image",)) == Same("b", 4)
    chosen = router.choose(prompt, cache_salt="other")  # expected blocks do not count for other salts
    assert router.choose(prompt, cache_salt="third").forecast_tokens == 0 and chosen.forecast_tokens == 0


def test_a_silent_worker_is_chosen_last_and_its_cache_is_ignored():
    router, workers, clock = router_of(max_staleness=5)
    workers["a"].cache.touch([1, 2, 3, 4])
    tell(router, workers["a"])
    clock.now = 5.0
    assert router.choose([1, 2, 3, 4, 5]) == Same("a", 4)
    clock.now = 5.5
    tell(router, workers["b"], load=10**6)
    assert router.choose([1, 2, 3, 4, 5]) == Same("b", 0) and router.stats()["stale"] == 2
    clock.now = 20.0
    assert router.choose([1, 2, 3, 4, 5]).forecast_tokens == 0 and router.stats()["stale"] == 3
    tell(router, workers["a"], load=10**6)
    assert router.choose([1, 2, 3, 4, 5]) == Same("a", 4)  # a heartbeat without changes


def test_a_restart_clears_the_worker_and_late_messages_are_ignored():
    router, workers, _ = router_of()
    worker = workers["a"]
    worker.cache.touch([1, 2, 3, 4])
    late = worker.message()
    router.update(*late, load=0, room=0)
    worker.restart()
    tell(router, worker)
    assert router.forecast([1, 2, 3, 4, 5]) == {} and router.stats()["epochs"] == 1
    router.update(*late, load=10**9, room=0)
    assert router.forecast([1, 2, 3, 4, 5]) == {} and router.choose([1, 2, 3, 4, 5]) == Same("a", 0)
    worker.cache.touch([1, 2])
    tell(router, worker)  # events are numbered from 1 again: no snapshot is needed
    assert router.forecast([1, 2, 3]) == {"a": 2} and router.stats()["snapshots"] == 0


def test_a_worker_with_a_refused_first_message_is_not_added():
    router = Router(2, max_workers=1)
    with refuses(PoolError, 1, "a", 7):
        router.update("a", 1, [EVENT._replace(sequence=7)], load=0, room=0)
    with pytest.raises(PoolError, match="no worker can be chosen"):
        router.choose([1, 2, 3])
    router.update("b", 1, [], load=0, room=0)
    assert router.choose([1, 2, 3]).worker == "b"
    with refuses(PoolError, "a", 1, "max_workers"):
        router.update("a", 1, [], load=0, room=0)


def test_a_new_epoch_clears_the_worker_even_if_its_first_message_is_refused():
    router = Router(2)
    name = prefix_names([1, 2], 2, root_name(root_key(None, ())))[0]
    router.update("a", 1, [EVENT._replace(name=name)], load=0, room=0)
    assert router.forecast([1, 2, 3]) == {"a": 2}
    with pytest.raises(PoolError, match="was lost"):
        router.update("a", 2, [EVENT._replace(sequence=7)], load=0, room=0)
    assert router.forecast([1, 2, 3]) == {}
    router.check()


def test_a_lost_event_changes_nothing_and_a_snapshot_helps():
    router, workers, _ = router_of()
    worker = workers["a"]
    worker.cache.touch([1, 2])
    tell(router, worker)
    worker.cache.touch([3, 4])
    worker.message()  # lost
    worker.cache.touch([5, 6])
    message, before = worker.message(), router.stats()
    with refuses(PoolError, 2, "a", 3):
        router.update(*message, load=5, room=5)
    assert router.stats() == {**before, "gaps": 1} and router.forecast([5, 6, 7]) == {}
    router.restore("a", 1, worker.cache.snapshot(), load=0, room=0)
    router.update(*message, load=0, room=0)  # the message arrives a second time
    assert [router.forecast([start, start + 1, 0]) for start in (1, 3, 5)] == [{"a": 2}] * 3
    assert router.stats()["snapshots"] == 1


def test_an_outdated_snapshot_is_ignored():
    router, workers, _ = router_of()
    worker = workers["a"]
    old = worker.cache.snapshot()
    worker.cache.touch([1, 2])
    tell(router, worker)
    router.restore("a", 1, old, load=0, room=0)
    assert router.forecast([1, 2, 3]) == {"a": 2} and router.stats()["snapshots"] == 0


def test_a_snapshot_cut_short_is_one_clear_error_and_leaves_nothing():
    router, workers, _ = router_of()
    worker = workers["a"]
    worker.cache.touch([1, 2])
    tell(router, worker)
    worker.cache.touch([3, 4, 5, 6, 7, 8])
    whole, before = worker.cache.snapshot(), router.stats()
    for length in range(4):
        with refuses(PoolError, 4, length):
            router.restore("a", 1, whole._replace(stored=whole.stored[:length]), load=0, room=0)
        with pytest.raises(PoolError, match="cut short"):
            router.restore("new", 1, whole._replace(stored=whole.stored[:length]), load=0, room=0)
        assert router.stats() == before and router.forecast([1, 2, 3]) == {"a": 2}
    odd = whole.stored[0]._replace(name=b"short")
    with refuses(ValueError, 16, "bytes", 5):
        router.restore("a", 1, whole._replace(stored=[*whole.stored[1:], odd]), load=0, room=0)
    assert router.stats() == before
    router.restore("a", 1, whole, load=0, room=0)
    assert router.stats()["blocks"] == 4
    router.check()


def test_a_snapshot_of_names_is_as_good_as_one_of_events():
    router, workers, _ = router_of()
    worker = workers["a"]
    worker.cache.touch([1, 2, 3, 4, 5, 6])
    names = worker.cache.name_snapshot()
    assert len(names.names) == 16 * names.num_blocks == 48
    router.restore("a", 1, names, load=0, room=0)
    assert router.forecast([1, 2, 3, 4, 5, 6, 7]) == {"a": 6} and router.stats()["blocks"] == 3
    before = router.stats()
    for odd, error in (
        (names._replace(names=names.names[:32]), PoolError),
        (names._replace(names="x" * 48), TypeError),
        (names._replace(num_blocks=-3), ValueError),
        (names._replace(next_sequence=None), TypeError),
    ):
        for worker_name in ("a", "new"):
            with pytest.raises(error):
                router.restore(worker_name, 1, odd, load=0, room=0)
    assert router.stats() == before
    worker.cache.touch([8, 9])
    tell(router, worker)
    assert router.forecast([8, 9, 0]) == {"a": 2}
    router.check()


def test_reports_add_up_to_the_error_of_the_forecast():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2, 3, 4])
    tell(router, workers["a"])
    choices = [router.choose([1, 2, 3, 4, 5]) for _ in range(3)]
    for choice, found in zip(choices, (4, 0, 6), strict=True):
        router.report(choice, found)
    stats = router.stats()
    assert (stats["choices"], stats["reports"], stats["forecast_tokens"], stats["found_tokens"]) == (3, 3, 12, 10)
    assert (stats["overestimated"], stats["underestimated"]) == (4, 2)
    with refuses(ValueError, "found_tokens", 4, 2):
        router.report(choices[0], 2)
    assert router.stats() == stats


def test_a_removed_worker_is_forgotten_and_its_place_is_free():
    router, workers, _ = router_of()
    workers["a"].cache.touch([1, 2])
    tell(router, workers["a"])
    tell(router, Worker("d"))
    with refuses(PoolError, "worker", "e", 4, "max_workers"):
        tell(router, Worker("e"))
    router.remove_worker("a")
    assert router.forecast([1, 2, 3]) == {} and router.stats()["workers"] == 3
    assert all(router.choose([1, 2, 3]).worker != "a" for _ in range(8))
    tell(router, Worker("e"))
    assert router.stats()["workers"] == 4
    with pytest.raises(KeyError):
        router.remove_worker("a")
    for name in "bcde":
        router.remove_worker(name)
    with refuses(PoolError, 0):
        router.choose([1, 2, 3])


EVENT = PrefixEvent(1, "stored", 0, bytes(16), bytes(16), b"")


@pytest.mark.parametrize(
    ("use", "error", "sentence"),
    [
        (lambda r: Router(0), ValueError, "block_size must be from 1 to 1024, not 0"),
        (lambda r: Router(2, 0), ValueError, "max_workers must be from 1 to 65536, not 0"),
        (lambda r: Router(2, rule="fast"), ValueError, "rule must be one of cost, prefix, not 'fast'"),
        (lambda r: Router(2, max_staleness=-1), ValueError, "max_staleness must be 0 or more, not -1"),
        (lambda r: Router(2, max_imbalance=None), TypeError, "max_imbalance must be an integer, not None"),
        (lambda r: r.update("a", 1, 5, load=0, room=0), TypeError, "events must be a list of PrefixEvent, not int: 5"),
        (
            lambda r: r.update("a", 1, [EVENT, 5], load=0, room=0),
            TypeError,
            "events must be a list of PrefixEvent, not list",
        ),
        (
            lambda r: r.update("a", 1, [], load=-1, room=0),
            ValueError,
            "load must be from 0 to 9007199254740992, not -1",
        ),
        (lambda r: r.update("a", 1, [], load=0, room=0.5), TypeError, "room must be an integer, not float: 0.5"),
        (
            lambda r: r.update("a", 1, [], load=0, room=0, received=-1),
            ValueError,
            "received must be at least 0, not -1",
        ),
        (lambda r: r.update("a", None, [], load=0, room=0), TypeError, "epoch must be an integer, not None"),
        (
            lambda r: r.update("a", 1, [EVENT._replace(kind="lost")], load=0, room=0),
            ValueError,
            "event 1 has kind 'lost', not one of stored, removed, cleared",
        ),
        (
            lambda r: r.update("a", 1, [EVENT, EVENT._replace(sequence=2, name=b"")], load=0, room=0),
            ValueError,
            "event 2, 'stored', must have a name of 16 bytes, not 0",
        ),
        (
            lambda r: r.update("a", 1, [EVENT, EVENT._replace(sequence=2, name="x" * 16)], load=0, room=0),
            TypeError,
            "the name of event 2 must be bytes, not str",
        ),
        (
            lambda r: r.update("a", 1, [EVENT, EVENT._replace(sequence=2, kind="unknown")], load=0, room=0),
            ValueError,
            "event 2 has kind 'unknown', not one of stored, removed, cleared",
        ),
        (lambda r: r.restore("a", 1, [], load=0, room=0), TypeError, "snapshot must be a PrefixSnapshot, not list: []"),
        (lambda r: r.choose(["a"]), TypeError, "tokens must be integers, not <U1"),
        (lambda r: r.choose([1], cache_salt=0.5), TypeError, "cache_salt must be str, bytes, bool, int"),
        (
            lambda r: r.choose([1], movable_tokens=-1),
            ValueError,
            "movable_tokens must be at least 0, not -1",
        ),
        (lambda r: r.choose([1], move_cost=-0.5), ValueError, "move_cost must be 0.0 or more, not -0.5"),
        (lambda r: r.report(None, 0), TypeError, "choice must be a Choice, not None"),
        (lambda r: r.report(Choice("a", 0), -1), ValueError, "found_tokens must be at least 0, not -1"),
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(use, error, sentence):
    router, _, _ = router_of()
    before = router.stats()
    with refuses(error, sentence):
        use(router)
    assert router.stats() == before
    router.check()


def test_an_empty_prompt_is_routed():
    router, _, _ = router_of()
    assert router.choose([]).forecast_tokens == 0
    assert router.choose(np.array([1], np.int32)).forecast_tokens == 0


def test_the_blocks_of_64_workers_take_at_most_100_bytes_each():
    router, random = Router(16, 64, clock=Clock()), np.random.default_rng(1)
    for worker in range(64):
        stored = [PrefixEvent(0, "stored", 0, random.bytes(16), b"", b"") for _ in range(1_000)]
        router.restore(worker, 1, PrefixSnapshot(1, stored, len(stored)), load=0, room=0)
    stats = router.stats()
    assert stats["blocks"] == 64_000 and stats["bytes"] <= 100 * stats["blocks"]


def test_threads_may_share_it():
    router, workers = Router(2, 8), [Worker(name) for name in range(4)]
    failures = []

    def serve(worker):
        random = np.random.default_rng(worker.name)
        try:
            for _ in range(150):
                prompt = random.integers(0, 2, random.integers(1, 12)).tolist()
                worker.cache.touch(prompt)
                router.update(*worker.message(), load=0, room=0)
                router.report(router.choose(prompt), 0)
                router.stats()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and router.stats()["reports"] == 600
    router.check()
