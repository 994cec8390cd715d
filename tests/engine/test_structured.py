"""Structured output: each text follows its grammar or is refused, and a grammar can harm no other request."""

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from fake_runner import VOCABULARY, Bytes, FakeRunner, reason_of
from json_schemas import HOSTILE, random_schema
from refusals import refuses
from scripted_drafts import drafting
from share import WHOLE

from pagepool import Engine, RequestRejected, SamplingParams, SchedulerConfig, Structured
from pagepool.engine import structured as module
from pagepool.engine.sampling import Sampler
from pagepool.engine.structured import Grammars, Matcher

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'pagepool[structured]'")

SECONDS = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Letters(Bytes):
    """`Bytes` with the bytes of single tokens."""

    def __init__(self):
        self.byte_decoder = {chr(byte): byte for byte in range(256)}

    def convert_ids_to_tokens(self, token):
        return chr(token)


def babble(tokens):
    """Random logits of all bytes, seeded with the number of tokens; texts of JSON end soon."""
    logits = np.random.default_rng(len(tokens) * 7919 + tokens[-1]).standard_normal(VOCABULARY).astype(np.float32)
    logits[list(b'"}],')] += 4.0
    logits[0] += 5.0
    return logits


def engine_of(**options):
    return Engine(FakeRunner(num_blocks=400, next_token=babble), Letters(), **options)


def text_of(grammars, structured, count=600, seed=0, **params):
    """Sample a text without an engine; return it and whether it is finished."""
    params = SamplingParams(count, structured=structured, seed=seed, **params).changed(stop_token_ids=frozenset([0]))
    sampler = Sampler(params, 0, [], grammars.compiled(structured).matcher())
    tokens = [seed % 256]
    for _ in range(count):
        token = sampler.sample(babble(tokens))
        if token == 0:
            return bytes(tokens[1:]).decode(), True
        tokens.append(token)
    return bytes(tokens[1:]).decode(errors="replace"), False


@pytest.fixture(scope="module")
def grammars():
    found = Grammars(Letters(), VOCABULARY, [0])
    yield found
    found.close()


@pytest.fixture(scope="module")
def engine():
    with engine_of() as found:
        yield found


def is_person(text):
    found = json.loads(text)
    return set(found) == {"name", "age"} and len(found["name"]) <= 5 and 0 <= found["age"] <= 150


KINDS = [
    (Structured(choice=["yes", "no", 'quote"d', "\u20ac\n\\"]), {"yes", "no", 'quote"d', "\u20ac\n\\"}.__contains__),
    (Structured(regex="[a-z]{3}(-[0-9])?x"), re.compile("[a-z]{3}(-[0-9])?x").fullmatch),
    (Structured(json_schema=PERSON), is_person),
    (Structured(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    (Structured(grammar='root ::= "a" b\nb ::= [0-9] | "x" b'), re.compile("ax*[0-9]").fullmatch),
    (Structured(grammar='start: "a" B\nB: /[0-9]+/'), re.compile("a[0-9]+").fullmatch),
    (
        Structured(
            grammar="start: /[A-Z]/ js\njs: %json "
            + json.dumps({"x-guidance": {"whitespace_flexible": False}, **PERSON})
        ),
        lambda text: is_person(text[1:]),
    ),
]
SAMPLING = [
    {},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 2, "top_p": 0.5, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 1.0, "min_p": 0.9, "repetition_penalty": 100.0},
    {"logit_bias": dict.fromkeys(b'{"0123456789ax-yn', -100.0), "logprobs": 2},
]


@pytest.mark.parametrize("params", SAMPLING)
@pytest.mark.parametrize(("structured", "is_right"), KINDS)
def test_each_text_follows_its_grammar_with_all_sampling_parameters(engine, structured, is_right, params):
    many = [
        engine.submit("hello", SamplingParams(300, structured=structured, seed=seed, **params)) for seed in range(6)
    ]
    ended = [one for one in many if one.result(SECONDS).finish_reason == "stop"]  # others have no end in their grammar
    assert all(is_right(one.text) for one in ended), [one.text for one in ended]
    assert len(ended) == len(many) or structured.kind == "json_object"
    engine.check()


@pytest.mark.parametrize("more", [{"min_tokens": 200}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}])
@pytest.mark.parametrize(("structured", "is_right"), KINDS)
def test_a_complete_text_ends_and_one_that_can_go_on_does_so(engine, structured, is_right, more):
    generation = engine.submit("hello", SamplingParams(200, structured=structured, **more)).result(SECONDS)
    if generation.finish_reason == "stop":
        assert is_right(generation.text)
    else:  # only a number can go on for ever
        assert generation.finish_reason == "length" and re.fullmatch("a[0-9]+", generation.text)


def test_a_limit_or_a_stop_string_may_end_a_text_before_it_is_complete():
    with engine_of() as engine:
        short = engine.submit("hello", SamplingParams(4, structured=KINDS[2][0])).result(SECONDS)
        assert short.finish_reason == "length" and len(short.token_ids) == 4
        cut = engine.submit("hello", SamplingParams(300, structured=KINDS[2][0], stop=['"age']))
        assert cut.result(SECONDS).finish_reason == "stop" and '"name"' in cut.text and "age" not in cut.text


def test_preempted_requests_and_streams_get_the_text_that_they_get_alone():
    jobs = [(structured, seed) for seed in range(5) for structured, _ in KINDS]

    def texts(**options):
        runner = FakeRunner(next_token=babble, **options)
        with Engine(runner, Letters(), config=SchedulerConfig(max_sequences=16, max_batch_sequences=16)) as engine:
            params = [SamplingParams(100, temperature=1.0, seed=seed, structured=one) for one, seed in jobs]
            running = [engine.submit("a prompt", one) for one in params]
            found = ["".join(token.text for token in generation) for generation in running]
            engine.check()
            return found, engine.scheduler.num_preemptions

    wanted, none = texts(num_blocks=2_000)
    found, many = texts(num_blocks=40)
    assert (found, none) == (wanted, 0) and many > 0


@pytest.mark.parametrize("place", [0, 1, 5, 11])
def test_a_request_continues_an_earlier_run_in_its_grammar(place):
    params = SamplingParams(100, temperature=1.0, seed=3, structured=KINDS[2][0])
    with engine_of() as engine:
        whole = engine.submit("hello", params).result(SECONDS).token_ids
        request = engine.read([*b"hello", *whole[:place]], params)
        assert engine._submit(request, place).result(SECONDS).token_ids == whole[place:]


def test_choices_of_one_request_have_states_of_their_own():
    with engine_of() as engine:
        request = engine.read("hello", SamplingParams(100, temperature=1.0, structured=KINDS[2][0]))
        many = [engine.submit(request.choice(seed=seed)) for seed in range(8)]
        texts = {generation.result(SECONDS).text for generation in many}
        assert len(texts) > 1 and all(map(is_person, texts))


def test_log_probabilities_are_those_of_the_model():
    with engine_of() as engine:
        token = next(engine.submit("hello", SamplingParams(1, logprobs=3, structured=KINDS[0][0])))
    logits = babble([*b"hello"]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert token.logprob == pytest.approx(logprobs[token.token_id])
    assert list(token.top_logprobs) == np.argsort(-logprobs)[:3].tolist()


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (Structured(json_schema={"type": "array", "uniqueItems": True}), ["uniqueItems"]),
        (Structured(json_schema={"properties": {"a": {"not": {"type": "null"}}}}), ["not"]),
        (Structured(json_schema={"type": "string", "format": "color"}), ["format", "color"]),
        (Structured(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]}), ["oneOf"]),
        (Structured(json_schema={"x-guidance": {"lenient": True}, "uniqueItems": True}), ["uniqueItems"]),
        (Structured(json_schema=False), ["false"]),
        (Structured(json_schema={"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}), ["exclusiveMinimum", 1]),
        (Structured(json_schema={"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}), ["exclusiveMaximum", 0]),
        (Structured(json_schema={"enum": ["a", {"b": ["\x01c"]}]}), ["enum", "x01"]),
        (Structured(json_schema={"items": {"const": "a\x7f"}}), ["const", "x7f"]),
        (Structured(json_schema={"type": "string", "pattern": "^a\x00"}), ["pattern", "x00"]),
        (Structured(json_schema={"patternProperties": {"^a\x0b": True}}), ["patternProperties", "x0b"]),
        (Structured(json_schema={"enum": [5, -(2**53) - 1]}), ["enum", -(2**53) - 1]),
        (Structured(json_schema={"$ref": "#"}), ["json_schema"]),
        (Structured(json_schema="{"), ["json_schema"]),
        (Structured(regex="(a"), ["regex", "unclosed"]),
        (Structured(regex="(?<=a)b"), ["look"]),
        (Structured(grammar="root ::= x"), ["grammar", "x"]),
        (Structured(grammar="start: x"), ["grammar", "x"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_the_queue(structured, words):
    with engine_of() as engine:
        with refuses(RequestRejected, *words) as refused:
            engine.submit("hello", SamplingParams(9, structured=structured))
        assert refused.value.param == "structured" and engine.num_requests == 0
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({}, ValueError, ["json_schema", "choice", "none"]),
        ({"regex": "a", "json_object": True}, ValueError, ["regex", "json_object"]),
        ({"choice": [""]}, ValueError, ["choice", 0]),
        ({"choice": "ab"}, TypeError, ["choice"]),
        ({"choice": [1]}, TypeError, ["choice"]),
        ({"choice": ["x"] * 1025}, ValueError, [1024, 1025]),
        ({"regex": 1}, TypeError, ["regex"]),
        ({"json_object": 1}, TypeError, ["json_object"]),
        ({"json_schema": {"a": {1}}}, ValueError, ["json_schema"]),
        ({"json_schema": [1]}, TypeError, ["json_schema"]),
        ({"grammar": "x" * 131_073}, ValueError, ["grammar", 131_072, 131_073]),
    ],
)
def test_a_wrong_value_is_refused(fields, error, words):
    with refuses(error, *words):
        Structured(**fields)
    with refuses(TypeError, "structured"):
        SamplingParams(1, structured=fields)


def test_a_value_can_be_compared_and_sent_to_another_process():
    one = Structured(json_schema=PERSON)
    assert one == pickle.loads(pickle.dumps(one)) and hash(one) == hash(Structured(json_schema=json.dumps(PERSON)))
    assert [structured.kind for structured, _ in KINDS[:5]] == [
        "choice",
        "regex",
        "json_schema",
        "json_object",
        "grammar",
    ]


def test_random_schemas_are_refused_or_every_finished_text_is_valid(grammars):
    jsonschema = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed: make test")
    rng, finished = random.Random(5), 0
    for number in range(1000 if WHOLE else 40):
        schema = random_schema(rng)
        try:
            grammars.compiled(Structured(json_schema=schema))
        except RequestRejected:
            continue
        try:
            text, is_finished = text_of(grammars, Structured(json_schema=schema), seed=number, temperature=0.7)
        except RequestRejected:
            continue
        if is_finished:
            finished += 1
            assert jsonschema.is_valid(schema, json.loads(text)), (schema, text)
    assert finished > number // 3


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_generates_and_the_engine_goes_on(grammars, name):
    try:
        text_of(grammars, Structured(**HOSTILE[name]), count=20)
    except (RequestRejected, ValueError) as error:
        assert 0 < len(str(error)) < 500
    assert text_of(grammars, KINDS[0][0])[0] in ("yes", "no", 'quote"d', "\u20ac\n\\")


def test_a_failure_of_llguidance_ends_its_request_and_no_other(monkeypatch):
    class Panic(BaseException):
        """A panic in Rust is not an Exception."""

    class Broken:
        def __init__(self, state):
            self.state = state

        def __getattr__(self, name):
            return getattr(self.state, name)

        def consume_tokens(self, tokens):
            raise Panic("panic in Rust")

    copied = Matcher.copied
    with engine_of() as engine:
        bad, good = Structured(regex="a{50}"), Structured(regex="b{50}")

        def break_one(self, output):
            found = copied(self, output)
            if self._kind == "regex" and self is first:
                found._state = Broken(found._state)
            return found

        first = engine.grammars.compiled(bad)._first
        monkeypatch.setattr(Matcher, "copied", break_one)
        others = [engine.submit("x", SamplingParams(99, structured=good)) for _ in range(3)]
        failed = engine.submit("x", SamplingParams(99, structured=bad))
        assert reason_of(failed) == "error" and failed.error.param == "structured" and "panic" in str(failed.error)
        assert [one.result(SECONDS).text for one in others] == ["b" * 50] * 3
        assert engine.is_accepting and engine.failure is None
        engine.check()


def test_a_grammar_that_takes_long_for_a_token_ends_its_request_and_is_then_refused(grammars, monkeypatch):
    slow, other = Structured(choice=["y" * 100]), Structured(choice=["z"])
    assert text_of(grammars, slow)[0] == "y" * 100
    with monkeypatch.context() as patched:
        patched.setattr(module, "MASK_SECONDS", 0.0)
        with refuses(RequestRejected, "choice", "0 s"):
            text_of(grammars, slow)
        with refuses(RequestRejected, "choice", "0 s"):
            grammars.compiled(other)
    with refuses(RequestRejected, "choice", "0 s"):
        grammars.compiled(slow)
    assert text_of(grammars, other)[0] == "z"


def test_a_model_that_fails_is_seen_behind_a_mask():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[5] = np.nan
    with Engine(FakeRunner(next_token=lambda tokens: logits), Letters()) as engine:
        failed = engine.submit("x", SamplingParams(5, structured=KINDS[0][0]))
        assert reason_of(failed) == "error" and not isinstance(failed.error, RequestRejected)


@pytest.mark.parametrize("more", [{"bad_words": ["y", "n", "q", "\u20ac"]}, {}])
def test_a_request_without_a_possible_token_ends_with_an_error(more):
    logits = np.full(VOCABULARY, -np.inf if not more else 0.0, np.float32)
    logits[ord("z")] = 1.0
    with Engine(FakeRunner(next_token=lambda tokens: logits), Letters()) as engine:
        failed = engine.submit("x", SamplingParams(5, structured=KINDS[0][0], **more))
        assert reason_of(failed) == "error" and isinstance(failed.error, RequestRejected)
        assert failed.error.param == "structured" and engine.is_accepting


def test_a_check_beyond_its_limits_refuses_one_grammar(grammars, monkeypatch):
    known, other = Structured(choice=["known"]), Structured(choice=["other"])
    assert text_of(grammars, known)[0] == "known"
    for name, value, words in (("CHECK_SECONDS", 0.0, ["choice", 0]), ("CHECK_BYTES", 0, ["choice"])):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            with refuses(RequestRejected, *words):
                grammars.compiled(other)
            assert text_of(grammars, known)[0] == "known"
    assert text_of(grammars, other)[0] == "other"


@pytest.mark.parametrize("size", [10, 100_000])  # of the grammar: the larger one does not fit a pipe
def test_a_checker_that_is_stopped_refuses_one_grammar_in_bounded_time(size, grammars, monkeypatch):
    grammars.compiled(Structured(choice=[f"known {size}"]))
    (checker,) = grammars._checkers
    checker.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.3)
    with refuses(RequestRejected, "choice", "0.3 s"):
        grammars.compiled(Structured(choice=["a" * size]))
    assert checker.returncode == -signal.SIGKILL and not grammars._checkers
    monkeypatch.undo()
    grammars.compiled(Structured(choice=[f"other {size}"]))


def test_workers_of_openmp_sleep_while_a_grammar_is_compiled(monkeypatch):
    seen = []
    with engine_of() as engine:
        workers, asked = engine._openmp, module._ask
        monkeypatch.setattr(module, "_ask", lambda *given: (seen.append(workers._num_blocks), asked(*given))[1])
        for text in ("a", "a", "b"):  # the second one is kept
            engine.submit("x", SamplingParams(2, structured=Structured(choice=[text]))).result(SECONDS)
        with refuses(RequestRejected, "regex"):
            engine.submit("x", SamplingParams(2, structured=Structured(regex="(")))
        assert seen == [1, 1, 1] and not workers._num_blocks


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot start a process in a group of its own")
def test_a_checker_takes_no_cpu_from_this_process_and_no_ctrl_c_of_its_terminal(grammars):
    grammars.compiled(Structured(choice=["known"]))
    (checker,) = grammars._checkers
    assert os.getsid(checker.pid) == os.getsid(0)  # Linux divides the CPUs among sessions
    assert os.sched_getscheduler(checker.pid) == os.SCHED_IDLE
    assert os.getpgid(checker.pid) == checker.pid != os.getpgid(0)


def test_one_process_checks_all_grammars_and_is_replaced_after_a_kill(monkeypatch):
    grammars = Grammars(Letters(), VOCABULARY, [0])
    with closing(grammars):
        for number in range(3):
            grammars.compiled(Structured(choice=[f"a{number}"]))
            (checker,) = grammars._checkers
        assert checker.poll() is None
        assert os.sched_getscheduler(checker.pid) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, checker.pid) == 19
        checker.kill()
        checker.wait()
        grammars.compiled(Structured(choice=["b"]))
        (other,) = grammars._checkers
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        with monkeypatch.context() as patched:  # it ends without an answer
            patched.setattr(module, "_new_checker", lambda: subprocess.Popen(["true"], **options))
            grammars._end_checkers()
            with refuses(RequestRejected, "choice", "process"):
                grammars.compiled(Structured(choice=["c"]))
        assert other.poll() is not None and not grammars._checkers
        grammars.compiled(Structured(choice=["c"]))


def test_grammars_that_many_threads_compile_at_once_have_a_bounded_number_of_processes():
    grammars = Grammars(Letters(), VOCABULARY, [0])
    with closing(grammars), ThreadPoolExecutor(8) as threads:
        assert (
            len(list(threads.map(grammars.compiled, [Structured(choice=[f"{number}"]) for number in range(16)]))) == 16
        )
        assert 1 <= len(grammars._checkers) <= module.MAX_COMPILING


def test_a_fork_of_the_process_has_a_checker_of_its_own():
    grammars = Grammars(Letters(), VOCABULARY, [0])
    with closing(grammars):
        grammars.compiled(Structured(choice=["a"]))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                grammars._checked(Structured(choice=["b"]))
                grammars._end_checkers()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        grammars.compiled(Structured(choice=["c"]))


def test_no_thread_no_process_and_no_grammar_outlives_its_use():
    before = set(threading.enumerate())
    with engine_of() as engine:
        for number in range(module.MAX_GRAMMARS + 3):
            engine.submit("x", SamplingParams(2, structured=Structured(choice=[f"{number}"]))).result(SECONDS)
        assert len(engine.grammars._kept) == module.MAX_GRAMMARS
        started = {thread.name.rpartition("_")[0] or thread.name for thread in set(threading.enumerate()) - before}
        assert started - {"pagepool-openmp"} == {"pagepool-engine", "pagepool-masks"}
        (checker,) = engine.grammars._checkers
    assert not set(threading.enumerate()) - before and checker.returncode is not None


def test_it_needs_a_tokenizer_a_stop_token_and_llguidance(monkeypatch):
    params = SamplingParams(2, structured=KINDS[0][0])
    with Engine(FakeRunner()) as engine, refuses(RequestRejected, "tokenizer"):
        engine.submit([1], params)
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with Engine(FakeRunner(), tokenizer) as engine, refuses(RequestRejected, "stop"):
        engine.submit([1], params)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with Engine(FakeRunner(), Letters()) as engine, refuses(RequestRejected, "llguidance"):
        engine.submit([1], params)


def accepts(grammars, structured, text):
    state = grammars.compiled(structured).matcher()._state
    return state.consume_tokens([*text.encode()]) and state.is_accepting()


USUAL = {("maximum", 2**63 - 1), ("maximum", 2**64 - 1), ("maximum", 10**18)}
LARGE = [2**53 - 1, 2**53, 2**53 + 1, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1, 10**17 + 3, 10**18, 10**40]


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [sign * bound for bound in LARGE for sign in (1, -1)])
def test_a_large_bound_is_kept_or_refused(grammars, name, bound):
    whole = {
        "minimum": int.__ge__,
        "maximum": int.__le__,
        "exclusiveMinimum": int.__gt__,
        "exclusiveMaximum": int.__lt__,
    }
    structured = Structured(json_schema={"type": "integer", name: bound})
    try:
        grammars.compiled(structured)
    except RequestRejected as error:
        assert "json_schema" in str(error) and abs(bound) >= 2**53 and (name, bound) not in USUAL
        return
    for value in {bound + step for step in (-1025, -2, -1, 0, 1, 2, 1025)} | {0, 2**63 - 1, -(2**63)}:
        assert whole[name](value, bound) or not accepts(grammars, structured, str(value))


def test_bounds_that_do_not_meet_are_accepted(grammars):
    parts = {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {"type": "number", "maximum": 0.5}}
    grammars.compiled(Structured(json_schema={"type": "object", "properties": parts}))
    grammars.compiled(Structured(json_schema={"type": "number", "exclusiveMinimum": 0, "maximum": 1}))


def test_the_name_of_a_property_cannot_be_written_in_another_way(grammars):
    """A second "a" would replace the integer, and a second "x" would count twice."""
    matcher = grammars.compiled(
        Structured(json_schema={"properties": {"a": {"type": "integer"}}, "type": "object"})
    ).matcher()
    for token in b'{"\\':
        matcher.add(token)
    assert not np.isfinite(matcher.masked(np.zeros(VOCABULARY, np.float32))[ord("u")])
    with refuses(RequestRejected, "minProperties", 3, 2):
        grammars.compiled(Structured(json_schema={"type": "object", "minProperties": 3, "required": ["a"]}))
    grammars.compiled(Structured(json_schema={"type": "object", "minProperties": 2, "required": ["a"]}))


class Thinker(Letters):
    """With one special token."""

    class Special(str):
        special = True

    added_tokens_decoder = {1: Special("<end>")}  # noqa: RUF012


@pytest.mark.parametrize("after", ["</think>", "<end>"])
@pytest.mark.parametrize(("structured", "is_right"), KINDS)
def test_free_text_may_come_first_and_only_its_end_begins_the_grammar(structured, is_right, after):
    grammars = Grammars(Thinker(), VOCABULARY, [0])
    first = replace(structured, after=after)
    with pytest.raises(StopIteration), closing(grammars):
        matcher, text, rng = grammars.compiled(first).matcher(), b"", np.random.default_rng(3)
        thought = iter([*b"I </thin <en k\n", *([1] if after == "<end>" else b"</think>"), *b"\n\n"])
        for count in range(400):
            logits = matcher.masked(babble([count]))
            token = next(thought, None)
            if token is None:
                token = int(np.argmax(logits + rng.random(VOCABULARY)))
                if token == 0:
                    assert is_right(text.decode().lstrip(" \n"))
                    raise StopIteration
                text += bytes([token])
            assert logits[token] > -np.inf and (text or logits[0] == -np.inf)
            matcher.add(token)


@pytest.mark.parametrize("after", ["", "</think>", "<end>"])
def test_a_wrong_grammar_is_refused_behind_free_text_too(after):
    """The first mask of a grammar behind free text belongs to the free text."""
    with closing(Grammars(Thinker(), VOCABULARY, [0])) as grammars:
        for fields in (
            {"grammar": "root ::= root"},
            {"grammar": "start: start"},
            {"regex": "(a{1000}){1000}"},
            {"json_schema": {"$ref": "#"}},
        ):
            with refuses(RequestRejected, *fields):
                grammars.compiled(Structured(**fields, after=after))


def test_any_stop_token_of_the_model_ends_a_text():
    grammars = Grammars(Letters(), VOCABULARY, [3, 0, 200])
    matcher = grammars.compiled(Structured(choice=["a"])).matcher()
    matcher.add(ord("a"))
    assert np.flatnonzero(matcher.masked(np.zeros(VOCABULARY, np.float32)) == 0).tolist() == [0, 3, 200]
    grammars.close()


def test_drafts_change_no_token_of_a_grammar():
    """Many of the wrong drafts are forbidden by the grammar."""
    params = [
        SamplingParams(60, structured=Structured(json_schema=PERSON), seed=seed, temperature=1.0) for seed in range(4)
    ]
    prompts = [[65 + seed] for seed in range(4)]
    with engine_of() as engine:
        known = [engine.submit(*request).result(SECONDS) for request in zip(prompts, params, strict=True)]
    texts = {tuple(prompt): one.token_ids + [65] * 9 for prompt, one in zip(prompts, known, strict=True)}
    with drafting(engine_of(drafts="ngram"), texts, seed=2) as engine:
        running = [engine.submit(*request) for request in zip(prompts, params, strict=True)]
        assert [one.result(SECONDS).text for one in running] == [one.text for one in known]
        assert all(one.num_accepted and one.num_rejected for one in running)
        engine.check()
