"""A listening socket that one process after the other serves: each request is answered, none by two."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

for name in ("starlette", "uvicorn", "h11"):
    pytest.importorskip(name, reason=f"{name} is not installed: make test-models")

from pagepool.cluster.door import Door, Service, enter  # noqa: E402

SECONDS = 60
SERVES = """
import asyncio, sys
from pagepool.cluster.door import enter
from starlette.responses import PlainTextResponse

entered = enter(sys.argv[1])
asyncio.run(entered.service.server(PlainTextResponse(sys.argv[2])).serve(sockets=[entered.sock]))
"""


@contextmanager
def door_of(service=None):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        door = Door(sock, service or Service())
        try:
            yield door, sock.getsockname()
        finally:
            door.close()


def ask(address, text="GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"):
    """Return the head and the body of the answer."""
    with socket.create_connection(address, SECONDS) as client:
        client.sendall(text.encode())
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head.lower(), body


def ask_until(address, condition):
    """Ask until an answer fits, and return all answers."""
    found, end = [], time.monotonic() + SECONDS
    while not found or not condition(found[-1]):
        assert time.monotonic() < end, found[-1]
        found.append(ask(address))
        time.sleep(0.01)
    return found


def front_end(door, text):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", SERVES, door.path, text])


def test_without_a_front_end_each_request_gets_503_with_retry_after():
    with door_of() as (_, address):
        for path in ("/ready", "/health"):
            head, body = ask(address, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (
                head.startswith("http/1.1 503") and "retry-after:" in head and json.loads(body)["status"] == "loading"
            )
        post = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        head, body = ask(address, post)
        assert head.startswith("http/1.1 503") and "retry-after:" in head
        assert json.loads(body)["error"]["message"] == "the front end is being started"


def test_one_front_end_after_the_other_answers_and_no_connection_is_refused():
    with door_of() as (door, address):
        first = front_end(door, "first")
        try:
            ask_until(address, lambda answer: answer[1] == "first")
            second = front_end(door, "second")
            try:
                time.sleep(0.5)
                assert ask(address)[1] == "first"  # the second one waits
                first.kill()
                found = ask_until(address, lambda answer: answer[1] == "second")
                assert {head.split()[1] for head, _ in found} <= {"200", "503"}
                second.terminate()
                ask_until(address, lambda answer: " 503 " in answer[0])
            finally:
                second.kill()
                second.wait()
        finally:
            first.kill()
            first.wait()


@pytest.mark.parametrize("is_served", [False, True])
def test_the_parser_is_the_strict_one_with_and_without_a_front_end(is_served):
    many = "".join(f"X{number}: x\r\n" for number in range(200))
    cases = {
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
        "GET / HTTP/1.1\nHost: x\n\n": 400,
        "GET / HTTP/1.1\r\nHost: x\r\nX: " + "x" * 40_000 + "\r\n\r\n": 431,
        f"GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n": 431,
    }
    with door_of() as (door, address):
        process = front_end(door, "served") if is_served else None
        try:
            if is_served:
                ask_until(address, lambda answer: answer[1] == "served")
            for text, status in cases.items():
                assert ask(address, text)[0].startswith(f"http/1.1 {status}"), text[:80]
        finally:
            if process is not None:
                process.kill()
                process.wait()


def test_the_number_of_connections_is_limited():
    with door_of(Service(max_connections=2)) as (_, address):
        ask_until(address, lambda answer: " 503 " in answer[0])
        idle = [socket.create_connection(address, SECONDS) for _ in range(2)]
        try:
            assert "too many connections" in ask(address, "")[1]  # answered before anything is sent
        finally:
            for client in idle:
                client.close()


def test_the_next_front_end_gets_the_service_as_it_is_then():
    with door_of(Service({"api_keys": {"old": "tenant"}})) as (door, _):
        first = enter(door.path)
        door.service.app["api_keys"] = {"new": "tenant"}
        assert first.service.app == {"api_keys": {"old": "tenant"}}
        first.sock.close()
        first.connection.close()
        second = enter(door.path)
        assert second.service.app == {"api_keys": {"new": "tenant"}}
        second.sock.close()
        second.connection.close()


def test_a_front_end_that_waits_at_a_door_that_is_closed_gets_an_error():
    with door_of() as (door, _):
        first, errors = enter(door.path), []

        def wait():
            try:
                enter(door.path)
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
    thread.join(SECONDS)
    assert len(errors) == 1
    first.sock.close()
    first.connection.close()
    with pytest.raises(OSError, match=r"No such file|refused"):
        enter(door.path)
