"""`pagepool serve --workers N`: its arguments, and what it does with signals and changed keys. No Ray is needed."""

import os
import signal
import sys
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from pagepool import cli
from pagepool.cli import workers

MODEL = "bench/tiny_llama"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers: must be from 1 to 64"),
        (["--workers", "65"], "--workers: must be from 1 to 64"),
        (["--prefill-workers", "1"], "--prefill-workers needs --workers"),
        (["--workers", "2", "--store", "x"], "with --store: each engine has a pool of its own"),
        (["--workers", "2", "--shared-pool", "x"], "--workers cannot be used with --shared-pool"),
        (["--workers", "2", "--memory-budget", "x:1G"], "--workers cannot be used with --memory-budget"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_a_sentence(arguments, said, capsys):
    try:
        assert cli.main(["serve", "--model", MODEL, *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert said in capsys.readouterr().err


def test_without_ray_the_command_names_the_extra(monkeypatch, capsys):
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["serve", "--model", MODEL, "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert "pagepool serve --workers needs ray, which is not installed" in error
    assert "pip install 'pagepool[ray]'" in error


class FrontEnd:
    """Records the calls of a handle. A call ends after `steps` looks at its result."""

    def __init__(self, steps):
        self.calls, self.steps = [], steps

    def __getattr__(self, name):
        def remote(*arguments):
            self.calls.append((name, *arguments))
            return self

        return SimpleNamespace(remote=remote)

    def result(self, timeout_s):
        self.steps -= 1
        if self.steps > 0:
            raise TimeoutError


def test_the_first_signal_drains_and_the_second_one_aborts():
    front_end, signals = FrontEnd(5), SimpleQueue()
    workers.drain(SimpleNamespace(front_end=front_end), 60, signals)
    assert front_end.calls == [("drain", 60)]
    front_end.steps = 5
    signals.put(signal.SIGTERM)
    workers.drain(SimpleNamespace(front_end=front_end), 60, signals)
    assert front_end.calls[1:] == [("drain", 60), ("drain", 0)]


def test_signals_are_caught_until_the_end_of_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with workers.caught_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert workers.has_item(signals, 10.0) and not workers.has_item(signals, 0.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_changed_keys_reach_this_front_end_and_the_next_one():
    front_end, service = FrontEnd(0), SimpleNamespace(app={"api_keys": {"old": "one"}})
    cluster = SimpleNamespace(front_end=front_end, door=SimpleNamespace(service=service))
    credentials = SimpleNamespace(api_keys={"new": "one"}, changes=lambda: (True, False))
    options = SimpleNamespace(ssl_certfile="cert", ssl_keyfile="key")
    workers.reload(options, credentials, cluster)
    assert service.app["api_keys"] == {"new": "one"} and front_end.calls == [("set_api_keys", {"new": "one"})]
    credentials.changes = lambda: (False, True)
    workers.reload(options, credentials, cluster)
    assert front_end.calls[1:] == [("load_certificate", "cert", "key")]
