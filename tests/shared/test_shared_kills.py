"""kills.c with the C of shared pools, and with faults in it that the program must find."""

import pytest
from c_programs import build, build_faulty, run
from share import WHOLE

STRIDE = 4001 if WHOLE else 16001


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    return build("kills.c", tmp_path_factory.mktemp("kills") / "kills")


@pytest.mark.parametrize(
    "arguments, least", [(["stores"], 200), (["recovery", "61"], 50), (["instructions", str(STRIDE)], 40_000 // STRIDE)]
)
def test_no_block_is_lost_wherever_a_process_is_killed(kills, arguments, least):
    done = run(kills, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= least


# Each fault: a file, a text in it, and what replaces the text.
FAULTS = {
    "the sweep clears no bits": ("pool.c", "drop_everywhere(view, (uint64_t)1 << i);", ""),
    "the slot is freed before the sweep": (
        "pool.c",
        "    drop_everywhere(view, (uint64_t)1 << i);\n",
        "    STORE(&slot->state, FREE);\n    PP_STEP();\n    drop_everywhere(view, (uint64_t)1 << i);\n",
    ),
    "a slot is taken without a sweep": ("pool.c", "if (LOAD(&slot->state) != FREE) sweep(view, i);", ""),
    "a refused call keeps its blocks": ("pool.c", "while (i > 0) drop_one(view, blocks[--i]);", ""),
    "a search sees half of the blocks": ("pool.c", "i < limit; i++) {", "i < limit / 2; i++) {"),
    "memory in use is returned": (
        "pool.c",
        "while (b < end && b - first < most && claim(view, b)) b++;",
        "while (b < end && b - first < most) b++;",
    ),
    "the limit rises before its memory": (
        "pool.c",
        "        if (next > before) error = pp_os_commit_file(",
        "        STORE(&view->header->limit, next);\n        PP_STEP();\n"
        "        if (next > before) error = pp_os_commit_file(",
    ),
    "cached blocks stay above the limit": ("index.c", "count += release_block(view, (int32_t)b, 0);", ""),
    "memory above the limit stays": ("pool.c", "if (to > from) pp_os_punch_file(view->fd, from, to - from);", ""),
    "the index is not built again": ("index.c", "if (LOAD(&view->header->dirty)) rebuild(view);", ""),
    "the index is never dirty": (
        "index.c",
        "    STORE(&view->header->dirty, 1);\n    PP_STEP();\n    return 0;",
        "    return 0;",
    ),
    "the index is clean too early": (
        "index.c",
        "    PP_STEP();\n    unlink_node(view, b);",
        "    STORE(&view->header->dirty, 0);\n    PP_STEP();\n    unlink_node(view, b);",
    ),
    "the node is written after its bit": (
        "index.c",
        "        write_tokens(view, b, tokens);\n        PP_STEP();\n"
        "        word = __atomic_fetch_or(&view->words[b], (uint64_t)PP_INDEX_BIT, __ATOMIC_ACQ_REL);\n",
        "        word = __atomic_fetch_or(&view->words[b], (uint64_t)PP_INDEX_BIT, __ATOMIC_ACQ_REL);\n"
        "        PP_STEP();\n        write_tokens(view, b, tokens);\n",
    ),
    "eviction leaves the chain as it is": ("index.c", "unlink_node(view, b); /*", "/*"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_recovery_is_found(tmp_path, fault):
    program = build_faulty("kills.c", tmp_path, FAULTS[fault])
    found = [run(program, *arguments) for arguments in (["stores"], ["recovery", "41"])]
    assert any(done.returncode for done in found), "the kill test has not found it"
