"""`pagepool serve` as a process: keys, sockets, TLS, and its responses while it loads and runs."""

import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

for name in ("torch", "transformers", "starlette", "uvicorn", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

import httpx  # noqa: E402
from fake_runner import Bytes, FakeRunner  # noqa: E402
from test_generate import SECONDS, served, start  # noqa: E402

import pagepool  # noqa: E402
from pagepool import cli  # noqa: E402
from pagepool.cli import serve as serve_command  # noqa: E402
from pagepool.cli.credentials import read_keys  # noqa: E402
from pagepool.cli.supervise import Figures  # noqa: E402
from pagepool.cli.usage import UsageError  # noqa: E402
from pagepool.engine import Engine, SamplingParams  # noqa: E402


def ended(process, status=0):
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == status
    return process.communicate()[1]


def test_keys_come_from_the_command_line_and_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# tenants\n\none first\none second\nthird\n")
    found = read_keys(["fourth"], str(file))
    assert {key: tenant for key, tenant in found.items() if tenant == "one"} == {"first": "one", "second": "one"}
    assert list(found) == ["fourth", "first", "second", "third"] and found["third"] != found["fourth"]
    assert not any(key in tenant for key, tenant in found.items() if key in ("third", "fourth"))


@pytest.mark.parametrize(
    ("given", "text", "said"),
    [
        ([""], None, "--api-key"),
        (["two words"], None, "--api-key"),
        ([], "a b c", "line 1: an API key must be one word"),
        ([], "x\n\nschlüssel", "line 3: an API key"),
        ([], "# nothing\n", "no API key"),
        ([], "one key\ntwo key", "line 2: the key has two tenants, 'one' and 'two'"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_and_not_shown(tmp_path, given, text, said):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        read_keys(given, None if text is None else str(file))
    assert "schlüssel" not in str(error.value)


@pytest.mark.parametrize("text", ["", "1", "2:1", "a:b", "1:2:3", "-99999999999:0"])
def test_priorities_are_two_numbers(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--priorities={text}"])
    assert "LOW:HIGH" in capsys.readouterr().err


def test_a_file_or_size_that_cannot_be_used_gets_one_sentence(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    cases = {
        ("--api-key-file", str(tmp_path / "none")): "cannot be read",
        ("--ssl-certfile", str(file)): "cannot be used for TLS",
        ("--ssl-keyfile", str(file)): "--ssl-keyfile needs --ssl-certfile",
        ("--uds", str(file)): "not a socket",
        ("--uds", str(tmp_path / "none" / "socket")): "cannot listen",
        ("--pool-bytes", "512T"): str(512 << 40),
    }
    for arguments, said in cases.items():
        assert cli.main(["serve", "--port", "0", *arguments]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    assert file.read_text() == "x"


OPTIONS = {
    "port": ("8001", 8001),
    "max-requests": ("7", 7),
    "priorities": ("-1:2", (-1, 2)),
    "openmp": ("sleep", "sleep"),
    "pool-bytes": ("16M", 16 << 20),
    "no-access-log": ("true", True),
    "show-cached-tokens": ("0", False),
    "allowed-host": ("a.example b.example", ["a.example", "b.example"]),
}


def variable(name):
    return "PAGEPOOL_SERVE_" + name.upper().replace("-", "_")


def chosen(monkeypatch, *arguments):
    """The options with which `pagepool serve` would run."""
    found = []
    monkeypatch.setattr(serve_command, "run", lambda options: found.append(vars(options)) or 0)
    assert cli.main(["serve", *arguments]) == 0
    return found[0]


def test_each_option_can_be_set_by_file_and_environment_and_the_command_line_wins(monkeypatch, tmp_path):
    file = tmp_path / "options.toml"
    lines = [
        "max-requests = 5",
        "max_connections = 9",
        'allowed-host = ["x.example"]',
        "no-access-log = true",
        'uds = "u"',
    ]
    file.write_text("\n".join(lines))
    for name, (text, _) in OPTIONS.items():
        monkeypatch.setenv(variable(name), text)
    monkeypatch.setenv(variable("config"), str(file))
    found = chosen(monkeypatch, "--port", "8002", "--allowed-host=c.example")
    wanted = {name.replace("-", "_"): value for name, (_, value) in OPTIONS.items()}
    wanted |= {"port": 8002, "allowed_host": ["c.example"], "max_connections": 9, "uds": "u"}
    assert {name: found[name] for name in wanted} == wanted
    for name in OPTIONS:
        monkeypatch.delenv(variable(name))
    found = chosen(monkeypatch)
    assert (found["max_requests"], found["no_access_log"], found["allowed_host"]) == (5, True, ["x.example"])
    assert chosen(monkeypatch, "--config", "/dev/null")["max_requests"] == 256


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("port", "tcp://10.0.0.1:80", "PAGEPOOL_SERVE_PORT: 'tcp://10.0.0.1:80' is not a whole number"),
        ("max-requests", "0", "PAGEPOOL_SERVE_MAX_REQUESTS: must be from 1"),
        ("openmp", "never", "PAGEPOOL_SERVE_OPENMP: must be one of auto, spin, sleep, not 'never'"),
        ("no-access-log", "maybe", "PAGEPOOL_SERVE_NO_ACCESS_LOG: must be true or false"),
        ("prot", "1", "PAGEPOOL_SERVE_PROT: there is no option --prot"),
        ("config", "/nowhere", "/nowhere: cannot be read"),
        ("config", "max-requests = 0", "max-requests: must be from 1"),
        ("config", "max-requests = [1]", "max-requests: must be a text or a number, not list"),
        ("config", "max-requests", "is not TOML"),
        ("config", "nothing = 1", "nothing: there is no option --nothing"),
    ],
)
def test_a_setting_that_cannot_be_used_gets_one_sentence_with_its_place(
    monkeypatch, tmp_path, capsys, name, text, said
):
    if name == "config" and text[0] != "/":
        (tmp_path / "options.toml").write_text(text)
        text = str(tmp_path / "options.toml")
    monkeypatch.setenv(variable(name), text)
    assert cli.main(["serve"]) == 2
    assert said in capsys.readouterr().err


def test_the_budgets_of_a_step_come_from_the_command_line(monkeypatch, capsys):
    found = []

    def opened(*model, config, **options):
        budgets = (config.max_batch_tokens, config.max_prefill_tokens, config.max_batch_sequences)
        found.append((*budgets, config.policy))
        raise ValueError("no engine")

    monkeypatch.setattr("pagepool.engine.Engine", opened)
    budgets = ["--max-batch-tokens", "2048", "--max-prefill-tokens", "1024", "--max-sequences", "4", "--policy", "fair"]
    for arguments in ([], budgets):
        assert cli.main(["serve", "--port", "0", *arguments]) == 2
    assert found == [(512, 256, 32, "priority"), (2048, 1024, 4, "fair")]
    with pytest.raises(SystemExit):
        cli.main(["serve", "--max-batch-tokens", "0"])
    assert "--max-batch-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tcp://127.0.0.1:5557", "JSON object"),
        ("[]", "JSON object"),
        ("{}", "an endpoint"),
        ('{"endpoint": "tcp://127.0.0.1:5557", "publisher": "kafka"}', 'publisher "zmq"'),
        ('{"endpoint": "tcp://127.0.0.1:5557", "buffer_steps": 3}', "buffer_steps"),
        ('{"endpoint": 5557}', "endpoint must be a text, not 5557"),
    ],
)
def test_a_wrong_config_of_kv_events_gets_one_sentence(text, said, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--kv-events-config", text])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_server_publishes_the_blocks_of_its_prompts(tmp_path):
    msgspec, zmq = (pytest.importorskip(name, reason=f"{name} is not installed") for name in ("msgspec", "zmq"))
    replay = f"ipc://{tmp_path}/replay"
    config = f'{{"endpoint": "ipc://{tmp_path}/events", "replay_endpoint": "{replay}", "topic": "kv"}}'
    process, name, url = served("--kv-events-config", config)
    try:
        body = {"model": name, "prompt": list(range(40)), "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).raise_for_status()
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(replay)
            stored = []
            while not stored:
                socket.send_multipart([b"", bytes(8)])
                while True:
                    assert socket.poll(1000 * SECONDS)
                    _, topic, _, payload = socket.recv_multipart()
                    if not topic:
                        break
                    stored += [one for one in msgspec.msgpack.decode(payload)[1] if one["type"] == "BlockStored"]
        assert stored[0]["token_ids"] == list(range(32)) and stored[0]["parent_block_hash"] is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_unix_socket_is_private_and_removed_at_exit(tmp_path):
    path = tmp_path / "socket"
    for _ in range(2):  # a stale socket of a killed server is replaced
        process, name, _ = served("--uds", str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example") as client:
            assert client.get("/v1/models", timeout=SECONDS).json()["data"][0]["id"] == name
        process.kill()
        process.communicate()
    process, _, _ = served("--uds", str(path))
    second = start("serve", "--uds", str(path))
    assert second.wait(SECONDS) == 2 and "another server uses this socket" in second.communicate()[1]
    ended(process)
    assert not path.exists()


def make_certificate(key, certificate):
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)


def test_tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_certificate(key, certificate)
    process, _, url = served("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    context = ssl.create_default_context(cafile=certificate)
    assert url.startswith("https://") and httpx.get(f"{url}/health", verify=context).json() == {"status": "ok"}
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health".replace("https", "http"))
    ended(process)


def test_keys_and_hosts_of_the_command_line_are_asked_for(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one secret-of-one\n")
    process, _, url = served("--api-key", "mine", "--api-key-file", str(file), "--allowed-host", "pages.example")
    for key, host, status in (
        ("mine", None, 200),
        ("secret-of-one", "pages.example", 200),
        ("mine", "evil.example", 403),
        ("other", None, 401),
    ):
        headers = {"authorization": f"Bearer {key}"} | ({} if host is None else {"host": host})
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
    assert "mine" not in ended(process)


@pytest.mark.slow
def test_keys_and_certificate_are_read_again_when_their_files_change(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    keys, key, certificate = tmp_path / "keys", tmp_path / "key.pem", tmp_path / "certificate.pem"
    keys.write_text("first\n")
    make_certificate(key, certificate)
    secret = ["--api-key-file", str(keys), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    process, _, url = served(*secret)

    def status(name):
        headers = {"authorization": f"Bearer {name}"}
        return httpx.get(f"{url}/v1/models", headers=headers, verify=trusted).status_code

    trusted = ssl.create_default_context(cafile=certificate)
    assert [status("first"), status("second")] == [200, 401]
    keys.write_text("\u00e9\n")
    while "the earlier API keys" not in process.stderr.readline():
        pass
    assert status("first") == 200
    keys.write_text("second\n")
    make_certificate(key, certificate)
    while "certificate.pem: read again" not in process.stderr.readline():
        pass
    trusted = ssl.create_default_context(cafile=certificate)
    assert [status("first"), status("second")] == [401, 200]
    ended(process)


SLOW_START = """
import time
from pagepool.cli import main, serve
open_engine = serve.open_engine
def slowly(*arguments):
    while not os.path.exists("loaded"):
        time.sleep(0.05)
    return open_engine(*arguments)
import os
serve.open_engine = slowly
raise SystemExit(main(["serve", "--port", "0", "--threads", "1"]))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_while_the_model_loads_requests_get_503(tmp_path, is_stopped):
    environment = {**os.environ, "PYTHONPATH": str(Path(pagepool.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    url = re.search(r"loading tiny_llama; (http://\S+)/health", process.stderr.readline())[1]
    health = httpx.get(f"{url}/health", timeout=SECONDS)
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=SECONDS)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "being loaded" in refused.json()["error"]["message"]
    if is_stopped:
        ended(process, -signal.SIGTERM)
        return
    (tmp_path / "loaded").touch()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if " at http" in line:
            break
    said = "".join(lines)
    for word in ("LlamaForCausalLM of 1.9M parameters, float32", "1 of torch", "blocks of 16 tokens", "1,024 tokens"):
        assert word in said
    assert httpx.get(f"{url}/health", timeout=SECONDS).json() == {"status": "ok"}
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=SECONDS)
    assert '"POST /v1/completions" 200 ' in (log := ended(process)) and answer.headers["x-request-id"] in log


def test_throughput_lines_have_vllm_s_format():
    with Engine(FakeRunner(num_blocks=256), Bytes()) as engine:
        figures = Figures(engine)
        time.sleep(0.01)
        assert figures.line() is None
        engine.submit("x" * 40, SamplingParams(10)).result(SECONDS)
        engine.submit("x" * 40, SamplingParams(10)).result(SECONDS)
        line = figures.line()
        numbers = re.fullmatch(
            r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
            r"Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, Prefix cache hit rate: 45.0%",
            line,
        )
        assert float(numbers[1]) == pytest.approx(4 * float(numbers[2]), rel=0.02)
        assert figures.line() is None
