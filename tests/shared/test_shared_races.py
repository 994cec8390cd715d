"""race.c with the C of shared pools, and with faults in it that only show when processes run at the same time."""

import json
import os

import pytest
from c_programs import build, build_faulty, run
from share import WHOLE

SECONDS = os.environ.get("PAGEPOOL_RACE_SECONDS", "4" if WHOLE else "1")  # 600 in `make pool-test`


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    return build("race.c", tmp_path_factory.mktemp("race") / "race")


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_no_page_is_wrong_and_no_block_is_lost_while_workers_race(race, kind):
    done = run(race, kind, SECONDS, "1")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert (seen["wrong"], seen["lost"]) == (0, 0)
    assert seen["checked"] > 10_000 and seen["found"] > 1_000


CLAIM = "__atomic_compare_exchange_n(&view->words[b], &word, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)"
DROP = (
    "    const uint64_t word = __atomic_fetch_and(&view->words[b], ~view->bit, __ATOMIC_ACQ_REL);\n    PP_STEP();\n"
    "    view->held"
)
# Each fault: changes of a text in a file.
FAULTS = {
    "a block is claimed by a plain store": [("pool.c", CLAIM, "(STORE(&view->words[b], mine), 1)")],
    "a block is dropped by a plain store": [
        (
            "pool.c",
            DROP,
            "    const uint64_t word = LOAD(&view->words[b]);\n    PP_STEP();\n"
            "    STORE(&view->words[b], word & ~view->bit);\n    view->held",
        )
    ],
    "a block that was found is held by a plain store": [
        (
            "index.c",
            "while (!CAS(&view->words[b], &word, word | view->bit));",
            "while (STORE(&view->words[b], word | view->bit), 0);",
        )
    ],
    "a block that was found is checked by neither guard": [
        (
            "index.c",
            "if ((uint32_t)(word >> 32) != generation || !(word & PP_INDEX_BIT)) return 0;",
            "(void)generation;",
        ),
        ("index.c", "if (!is_node(view, b, &wanted, tokens)) {", "if (0) {"),
    ],
    "two processes write the index": [
        (
            "index.c",
            "if (is_writer && CAS(&view->header->index_lock, &owner, view->bit)) break;",
            "if (is_writer && !LOAD(&view->header->index_lock)) break;",
        )
    ],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_only_shows_in_a_race_is_found(tmp_path, fault):
    program = build_faulty("race.c", tmp_path, *FAULTS[fault])
    found = (run(program, "processes", "2", str(seed)) for seed in range(5))
    assert any(done.returncode == 1 for done in found), "race.c has not found it"
