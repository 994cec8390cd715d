"""`pagepool generate` and `pagepool serve` on the command line, with the tiny model of the repository."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import refuses

import pagepool
from pagepool import Engine, SamplingParams, cli
from pagepool.cli import generate, model_options
from pagepool.integrations.transformers.pretrained import ModelError, load_pretrained

ROOT = Path(__file__).parents[2]
TINY = ROOT / "bench" / "tiny_llama"

for name in ("torch", "transformers", "jinja2"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")
if not (TINY / "model.safetensors").is_file():
    pytest.skip("needs bench/tiny_llama of a checkout", allow_module_level=True)

SECONDS = 120


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("PAGEPOOL_NUM_THREADS", "1")


def run(capsys, *arguments):
    """Run the command in this process; return exit code, stdout and stderr."""
    code = cli.main(["generate", "--threads", "1", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def start(*arguments, env=None, **options):
    """Run `pagepool` in a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    environment.update(env or {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "pagepool", *arguments], env=environment, **{**pipes, **options})


def test_a_schema_or_a_grammar_constrains_the_texts(capsys, tmp_path):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"enum": ["left", "right"]}')
    grammar.write_text('root ::= "up" | "down"')
    for option, file, texts in (
        ("--json-schema", schema, ('"left"', '"right"')),
        ("--grammar", grammar, ("up", "down")),
    ):
        code, out, _ = run(capsys, "x = ", option, str(file))
        assert code == 0 and out.rstrip("\n") in [f"x = {text}" for text in texts]
    schema.write_text('{"uniqueItems": true}')
    for arguments, word in (
        (["--json-schema", str(schema)], "uniqueItems"),
        (["--json-schema", str(schema), "--grammar", str(grammar)], "together"),
        (["--grammar", str(tmp_path / "none")], "none"),
        (["--grammar", os.devnull], "grammar"),
    ):
        code, out, err = run(capsys, "x = ", *arguments)
        assert code == 2 and not out and word in err


def test_the_tiny_model_writes_python(capsys):
    prompt = "class Reader:\n    def __init__(self, "
    code, out, err = run(capsys, prompt, "--max-new-tokens", "100")
    assert code == 0 and out.startswith(prompt)
    assert "    def " in out[len(prompt) :] and "self." in out and re.search(r"^        \w", out, re.MULTILINE)
    assert "100 tokens in" in err and "first token after" in err and "MiB" in err


def test_loading_a_model_leaves_gradients_to_the_process():
    load_pretrained(TINY)
    assert sys.modules["torch"].is_grad_enabled()


def test_the_files_of_the_tiny_model_are_small():
    files = [path for path in TINY.iterdir() if path.is_file() and path.suffix != ".py"]
    assert sum(path.stat().st_size for path in files) <= 4_000_000


def test_log_probabilities_of_prompts_match_transformers_alone_and_in_a_batch():
    import torch

    model, tokenizer = load_pretrained(TINY)
    text = Path(generate.__file__).read_text()
    tokens = tokenizer(text)["input_ids"]
    prompts = [tokens[begin : begin + 16 + 7 * number] for number, begin in enumerate(range(0, 400, 50))]
    params = SamplingParams(1, prompt_logprobs=3)
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0].double().log_softmax(-1) for prompt in prompts]
    with Engine(model, tokenizer, num_blocks=256) as engine:
        alone = [engine.submit(prompt, params).result(SECONDS) for prompt in prompts]
        among = [engine.submit(prompt, params) for prompt in prompts for _ in range(2)]
        for rows, wanted, *found in zip(logits, alone, among[::2], among[1::2], strict=True):
            for generation in (wanted, *found):
                for token, row in zip(generation.result(SECONDS).prompt_logprobs[1:], rows, strict=False):
                    assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
                    assert list(token.top_logprobs.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        engine.check()


def test_prompts_run_together_and_json_has_all_figures(capsys, tmp_path):
    (tmp_path / "prompts").write_text("import os\n\ndef main():\n", encoding="utf-8")
    target = tmp_path / "found.json"
    options = ["--file", str(tmp_path / "prompts"), "--json", str(target), "--max-new-tokens", "12"]
    code, out, _ = run(capsys, "import sys", *options, "--temperature", "0.8", "--seed", "3")
    numbers = json.loads(target.read_text())
    assert code == 0
    assert [output["prompt"] for output in numbers["outputs"]] == ["import sys", "import os", "def main():"]
    for number, output in enumerate(numbers["outputs"], 1):
        assert f"--- {number} of 3\n{output['prompt']}{output['text']}\n" in out
        assert output["generated_tokens"] == 12 or output["finish_reason"] == "stop"
        assert 0 < output["time_to_first_token"] <= numbers["time_to_first_token"]["max"]
    assert numbers["generated_tokens"] == sum(output["generated_tokens"] for output in numbers["outputs"])
    assert numbers["tokens_per_second"] == pytest.approx(numbers["generated_tokens"] / numbers["seconds"])
    assert 0 < numbers["memory"]["pages_peak_bytes"] < numbers["memory"]["pool_bytes"]
    again = run(capsys, "import sys", "--json", "-", "--max-new-tokens", "12", "--temperature", "0.8", "--seed", "3")
    assert json.loads(again[1])["outputs"][0]["text"] == numbers["outputs"][0]["text"]


def test_a_prompt_that_cannot_run_leaves_the_others_alone(capsys):
    code, out, err = run(capsys, "import os", "x = 1\n" * 2000, "--json", "-", "--max-new-tokens", "4")
    good, bad = json.loads(out)["outputs"]
    assert code == 1 and good["error"] is None and good["generated_tokens"] == 4
    assert re.search(r"pagepool: prompt 2: .*prompt .*\d+ tokens and 4 new .* 1024\n", err)
    assert re.search(r"prompt .*\d+ tokens and 4 new .* 1024$", bad["error"])


def test_without_a_number_of_tokens_a_text_goes_on_to_the_end_of_the_model(capsys):
    code, out, _ = run(capsys, "0 " * 480, "--json", "-", "--stop", "never")
    (output,) = json.loads(out)["outputs"]
    assert code == 0 and output["prompt_tokens"] + output["generated_tokens"] <= 1024


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no prompt: give one, --file or --chat"),
        ([""], "prompt 1 is empty"),
        (["x", ""], "prompt 2 is empty"),
        (["--file", "{tmp}/none"], "none: cannot be read: No such file or directory"),
        (["--file", "{tmp}/empty"], "empty: the file has no prompts"),
        (["--file", "{tmp}/latin"], "latin: line 2 is not UTF-8: byte 1 is invalid"),
        (["x", "--chat"], "--chat reads messages from standard input"),
        (["x", "--system", "y"], "--system needs --chat"),
        (["x", "--temperature", "-1"], "temperature must be 0.0 or more, not -1.0"),
        (["x", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
        (["x", "--stop", ""], "a stop string needs at least 1 character, got 0"),
        (["x", "--json", "{tmp}/none/found.json"], "cannot be written: No such file or directory"),
        (["x", "--model", "{tmp}/none"], "none: there is no such directory"),
        (["x", "--model", "{tmp}"], "it has no config.json, so it holds no model"),
        (["x", "--pool-bytes", "1k"], "pool_bytes must be at least"),
        (["x" * 200_000, "--max-new-tokens", "4"], "and 4 new ones, the limit of the model is 1024"),
        (["\udcff"], "the prompt is not valid Unicode: character 0 is a surrogate"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_gets_one_sentence(capsys, tmp_path, arguments, sentence):
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "latin").write_bytes(b"good\na\xe9\n")
    code, out, err = run(capsys, *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("pagepool: ") and sentence in err and err.count("\n") == 1


def copied(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


BROKEN = {
    "config cut off": (lambda folder: cut(folder / "config.json"), "config.json cannot be read"),
    "config no object": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no object"),
    "weights cut off": (lambda folder: cut(folder / "model.safetensors"), "cannot be loaded"),
    "weights missing": (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights"),
    "tokenizer cut off": (lambda folder: cut(folder / "tokenizer.json"), "cannot be loaded"),
    "tokenizer missing": (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be loaded"),
    "unknown model": (lambda folder: change_config(folder, model_type="nothing"), "cannot be loaded"),
    "another size": (lambda folder: change_config(folder, hidden_size=96), "cannot be loaded"),
    "more layers": (lambda folder: change_config(folder, num_hidden_layers=6), "weights are missing, the first is"),
    "no causal LM": (lambda folder: change_config(folder, model_type="vit"), "cannot be loaded"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_directory_gets_one_sentence(capsys, tmp_path, fault):
    folder = copied(tmp_path)
    break_it, sentence = BROKEN[fault]
    break_it(folder)
    code, out, err = run(capsys, "x", "--model", str(folder))
    assert (code, out) == (2, "")
    assert f"pagepool: {folder}: " in err and sentence in err and err.count("\n") == 1


def test_a_dtype_that_weights_cannot_have_is_refused(capsys):
    with refuses(ModelError, "dtype", "float32", "bfloat16", "float16", "int3"):
        load_pretrained(TINY, "int3")
    with pytest.raises(SystemExit):
        run(capsys, "x", "--dtype", "int3")
    assert "invalid choice: 'int3'" in capsys.readouterr().err


def test_a_directory_with_a_gguf_file_alone_names_the_file(tmp_path):
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"no config.json.*give its path, .*model.Q4_0.gguf"):
        load_pretrained(tmp_path)


def test_pages_of_int4_are_not_offered(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "x", "--kv-dtype", "int4")
    assert "--kv-dtype: invalid choice: 'int4'" in capsys.readouterr().err


def test_weights_of_float16_are_computed_in_float32():
    assert str(load_pretrained(TINY)[0].dtype) == "torch.float32"
    assert str(load_pretrained(TINY, "bfloat16")[0].dtype) == "torch.bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_pages_of_other_dtypes_write_python_too(capsys, dtype):
    prompt = "class Reader:\n    def __init__(self, "
    code, out, _ = run(capsys, prompt, "--kv-dtype", dtype, "--max-new-tokens", "40", "--no-prefix-cache")
    assert code == 0 and "self." in out[len(prompt) :]


def test_a_missing_model_or_package_is_reported_with_its_source(capsys, monkeypatch):
    monkeypatch.setattr(model_options, "TINY_LLAMA", Path("/nowhere"))
    code, _, err = run(capsys, "x")
    assert code == 2 and "--model" in err and "bench/tiny_llama" in err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "x")
    assert code == 2 and "pip install 'pagepool[transformers]'" in err


def test_progress_is_said_while_texts_go_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(generate, "PROGRESS_SECONDS", 0.0)
    _, _, err = run(capsys, "import os", "--json", "-", "--max-new-tokens", "4")
    assert re.search(r"pagepool: [01] of 1 prompts, \d tokens, [\d.]+ tokens/s\n", err)


def test_a_chat_streams_answers_and_remembers(tmp_path):
    process = start("generate", "--chat", "--threads", "1", "--max-new-tokens", "8", "--system", "write code")
    out, err = process.communicate("open a file\n\nread it\n", SECONDS)
    assert process.returncode == 0, err
    first, second = re.findall(r"(\d+) of (\d+) prompt tokens cached", err)
    assert int(first[0]) == 0 and int(second[1]) > int(first[1]) + 8
    assert len(out) > 8


def test_a_chat_needs_a_template(capsys, tmp_path):
    folder = copied(tmp_path)
    (folder / "chat_template.jinja").unlink()
    code, _, err = run(capsys, "--chat", "--model", str(folder))
    assert code == 2 and "--chat needs" in err and "chat template" in err


@pytest.mark.slow
def test_a_chat_reports_a_prompt_that_does_not_fit_and_continues():
    process = start("generate", "--chat", "--threads", "1", "--max-new-tokens", "8")
    out, err = process.communicate("x = 1; " * 900 + "\nshort\n", SECONDS)
    assert process.returncode == 0 and out
    assert "1024" in err and "8 tokens" in err


@pytest.mark.slow
def test_a_chat_forgets_its_oldest_turns_when_the_context_is_full():
    process = start("generate", "--chat", "--threads", "1", "--max-new-tokens", "8", "--system", "write code")
    _, err = process.communicate(("x = 1; " * 40 + "\n") * 6, SECONDS)
    assert process.returncode == 0, err
    lengths = [int(length) for length in re.findall(r"of (\d+) prompt tokens cached", err)]
    dropped = re.findall(r"the context is full: the oldest (\d+) of (\d+) turns are forgotten", err)
    assert len(lengths) == 6 and all(length + 8 <= 1024 for length in lengths)
    assert lengths[0] < lengths[1] < lengths[2] and dropped
    turn = lengths[1] - lengths[0]
    assert lengths[-1] + turn + 8 > 1024  # no more turns are dropped than necessary


@pytest.mark.slow
def test_a_chat_restarts_after_reset():
    process = start("generate", "--chat", "--threads", "1", "--max-new-tokens", "8", "--system", "write code")
    _, err = process.communicate("open a file\nread it\n/reset\nopen a file\n", SECONDS)
    assert process.returncode == 0, err
    first, second, third = (int(length) for length in re.findall(r"of (\d+) prompt tokens cached", err))
    assert first == third < second


@pytest.mark.slow
def test_a_chat_on_a_terminal_greets_and_edits_lines():
    pytest.importorskip("readline", reason="this Python has no readline")
    ours, theirs = os.openpty()
    arguments = ("generate", "--chat", "--threads", "1", "--max-new-tokens", "8", "--stop", "> ")
    process = start(*arguments, stdin=theirs, stdout=theirs, env={"TERM": "xterm"})
    os.close(theirs)
    shown = ""

    def type_in(keys):
        """Wait for the prompt, then send these keys."""
        nonlocal shown
        while not shown.endswith("> "):
            assert select.select([ours], [], [], SECONDS)[0], shown
            shown += os.read(ours, 1 << 12).decode()
        os.write(ours, keys)
        shown += "|"

    try:
        greeting = process.stderr.readline()
        assert "tiny_llama" in greeting and "Ctrl-D" in greeting and "/reset" in greeting
        type_in(b"pen a file\x01o\r")  # Ctrl-A: start of the line
        type_in(b"\x1b[A\r")  # the arrow up: the line before
        type_in(b"\x04")
        assert process.wait(SECONDS) == 0
        first, second = re.findall(r"of (\d+) prompt tokens cached", process.stderr.read())
        assert int(second) > int(first) and "|open a file" in shown and "^[" not in shown, shown
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def test_ctrl_c_ends_an_answer_and_then_the_chat():
    process = start("generate", "--chat", "--threads", "1", "--max-new-tokens", "900", "--stop", "never comes")
    process.stdin.write("for\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    line = process.stderr.readline()
    try:
        assert "prompt tokens cached" in line, line
        for _ in range(5):  # CPython misses a signal that arrives just before it waits for a line
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS / 5)
                break
        assert process.poll() == 130
    finally:
        process.kill()
        process.communicate()


def served(*arguments):
    """Start `pagepool serve` at a free port; return its process and address."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: make test-models")
    pytest.importorskip("httpx", reason="httpx is not installed: make test-models")
    process = start("serve", "--port", "0", "--threads", "1", "--no-access-log", *arguments)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"(\S+) at (\S+)/v1$", line):
            return process, *found.groups()
    raise AssertionError("".join(lines))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_end_and_refuses_others_until_then(number):
    process, name, url = served()
    import httpx

    assert name == "tiny_llama" and httpx.get(f"{url}/ready").json() == {"status": "ready"}
    body = {"model": name, "prompt": "import", "max_tokens": 800, "stream": True, "ignore_eos": True}
    chunks, found = [], []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as response:
        for line in response.iter_lines():
            if line and not chunks:
                process.send_signal(number)
                while (ready := httpx.get(f"{url}/ready")).status_code == 200:
                    time.sleep(0.01)
                found = [ready, httpx.get(f"{url}/health"), httpx.post(f"{url}/v1/completions", json={"prompt": "x"})]
            chunks += [line] if line else []
    assert chunks[-1] == "data: [DONE]"
    assert json.loads(chunks[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert [answer.status_code for answer in found] == [503, 200, 503] and found[2].headers["retry-after"] == "1"
    assert process.wait(SECONDS) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    (line,) = process.communicate()[1].splitlines()
    assert "1 request runs, waiting up to 60 s" in line


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("drain", "signals"), [("0", 1), ("60", 2)])
def test_requests_after_the_drain_time_get_503_as_json(stream, drain, signals):
    process, _, url = served("--drain", drain, "--name", "mine")
    import httpx

    body = {"prompt": ["import"] * 64, "max_tokens": 1000, "ignore_eos": True, "temperature": 1.5, "stream": stream}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=SECONDS)
        while "pagepool:num_requests_running 0.0" in httpx.get(f"{url}/metrics").text:
            time.sleep(0.05)
        for number in range(signals):
            time.sleep(0.5 * number)
            process.send_signal(signal.SIGINT)
        response = waiting.result(SECONDS)
    if stream:
        *_, last = [line for line in response.text.split("\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert response.status_code == 200 and "shutting down" in error["message"]
    else:
        assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
    assert process.wait(SECONDS) == 0
    (line,) = process.communicate()[1].splitlines()
    assert f"64 requests run, waiting up to {drain} s" in line


def test_the_process_ends_with_status_1_when_the_engine_fails_or_a_step_hangs():
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: make test-models")
    import httpx

    faults = {"raise ArithmeticError('why')": "ArithmeticError: why", "time.sleep(600)": "--step-timeout"}
    for broken, said in faults.items():
        code = f"""
import time
from pagepool.cli import main
from pagepool.scheduling.scheduler import Scheduler
def schedule(self, drafts):
    {broken}
Scheduler.schedule = schedule
raise SystemExit(main(["serve", "--port", "0", "--threads", "1", "--step-timeout", "1"]))
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1]), "HF_HUB_OFFLINE": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        url = next(found[1] for line in process.stderr if (found := re.search(r"at (http://\S+)/v1$", line)))
        with contextlib.suppress(httpx.HTTPError):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=SECONDS).status_code == 500
        assert process.wait(SECONDS) == 1
        assert said in process.communicate()[1]


def test_an_address_or_a_model_that_cannot_be_served_gets_one_sentence(capsys, monkeypatch):
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: make test-models")
    assert cli.main(["serve", "--host", "256.0.0.1"]) == 2
    assert "256.0.0.1:8000: cannot listen" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "0", "--model", "/nowhere"]) == 2
    assert "/nowhere: there is no such directory" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert cli.main(["serve"]) == 2
    assert "pip install 'pagepool[serve]'" in capsys.readouterr().err
