"""Access to the server: API keys, Host, Origin, media types, priorities; connections of slow clients."""

import json
import logging
import socket
import time

import pytest
from test_serve import JSON, SECONDS, serving, wait_until

import pagepool
from pagepool.cluster.ray.application import app_options
from pagepool.serve import connections, http
from pagepool.serve.access import is_local

httpx = pytest.importorskip("httpx", reason="httpx is not installed: make test-models")

from fake_runner import FakeRunner  # noqa: E402

KEYS = {"key of one": "one", "another key of one": "one", "key of two": "two"}


@pytest.fixture(scope="module")
def served():
    limits = {"api_keys": KEYS, "allowed_hosts": ["pages.example"], "allowed_origins": ["https://good.example"]}
    with serving(FakeRunner(num_blocks=256), priorities=(-1, 2), shows_cached_tokens=True, **limits) as found:
        found.http.headers["authorization"] = "Bearer key of one"
        yield found


@pytest.mark.parametrize("options", [{}, {"api_keys": KEYS}])
def test_a_cluster_has_the_rules_of_a_server_for_hosts_origins_and_keys(options):
    keys = {"authorization": "Bearer key of two"}
    with serving(FakeRunner(num_blocks=256), **app_options("127.0.0.1", options)) as found:
        assert found.http.get("/v1/models", headers=keys).status_code == 200
        for name, code in (("host", "host_not_allowed"), ("origin", "origin_not_allowed")):
            assert refusal(found.http.get("/v1/models", headers={**keys, name: "http://evil.example"})) == (403, code)
        assert found.http.get("/v1/models").status_code == (401 if options else 200)


def refusal(response):
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer no key", "Basic key of one", "Bearer key of on"])
def test_without_a_known_key_nothing_but_health_is_answered(served, given):
    headers = {} if given is None else {"authorization": given}
    with httpx.Client(base_url=served.url, headers=headers, timeout=SECONDS) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")):
            response = client.request(method, path, **({"json": {"prompt": "x"}} if method == "POST" else {}))
            assert refusal(response) == (401, "invalid_api_key") and response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_tenants_see_no_prefixes_of_one_another(served):
    prompt = "a prompt that is longer than some blocks"
    found = []
    for key in (*KEYS, *KEYS):
        response = served.http.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers={"authorization": f"Bearer {key}"}
        )
        found.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 36, 0, 36, 36, 36]  # two keys belong to one tenant
    salted = [
        served.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "cache_salt": salt}).json()
        for salt in ("x", "x", "y")
    ]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in salted] == [0, 36, 0]


def test_the_scheduler_gets_the_tenant(served, monkeypatch):
    found, submit = [], served.engine.submit

    def noting(request, **options):
        found.append((options["tenant"], options["priority"]))
        return submit(request, **options)

    monkeypatch.setattr(served.engine, "submit", noting)
    for key in ("key of one", "key of two"):
        headers = {"authorization": f"Bearer {key}"}
        assert served.http.post("/v1/completions", json={"prompt": "x", "priority": 2}, headers=headers).is_success
    assert found == [("one", 2), ("two", 2)]


@pytest.mark.parametrize("priority", [-2, 3])
def test_priorities_beyond_the_allowed_ones_are_refused(served, priority):
    response = served.post(prompt="x", priority=priority)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "priority"
    assert error["message"] == f"priority must be from -1 to 2, not {priority}"


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("192.0.2.7", True),
        ("pages.example:80", True),
        ("Pages.Example.", True),
        ("evil.example", False),
        ("pages.example.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_hosts(served, host, is_allowed):
    response = served.http.get("/v1/models", headers={"host": host})
    assert response.is_success if is_allowed else refusal(response) == (403, "host_not_allowed")


def test_pages_of_other_sites_are_refused(served):
    assert refusal(served.http.get("/v1/models", headers={"origin": "https://evil.example"})) == (
        403,
        "origin_not_allowed",
    )
    assert refusal(served.http.get("/v1/models", headers={"origin": "null"})) == (403, "origin_not_allowed")
    response = served.http.get("/v1/models", headers={"origin": "https://good.example"})
    assert response.is_success and response.headers["access-control-allow-origin"] == "https://good.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with httpx.Client(base_url=served.url) as browser:  # a browser sends a preflight request without a key
        for origin, status in (("https://good.example", 200), ("https://evil.example", 400)):
            response = browser.options("/v1/completions", headers={"origin": origin, **asked})
            assert response.status_code == status
            assert ("access-control-allow-origin" in response.headers) == (status == 200)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_form_of_another_site_is_no_request(served, kind):
    headers = {"authorization": "Bearer key of one"} | ({} if kind is None else {"content-type": kind})
    response = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers, timeout=SECONDS)
    assert response.status_code == 415
    headers["content-type"] = "Application/JSON; charset=utf-8"
    response = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers, timeout=SECONDS)
    assert response.status_code == 200


def test_a_server_without_settings_shows_no_cached_tokens_and_takes_no_priority():
    with serving(FakeRunner()) as plain:
        assert "prompt_tokens_details" not in plain.post(prompt="x").json()["usage"]
        assert plain.post(prompt="x", priority=0).status_code == 200
        response = plain.post(prompt="x", priority=1)
        assert response.json()["error"]["message"] == "priority must be 0 on this server, not 1"
        assert plain.http.get("/v1/models", headers={"host": "any.example", "origin": "null"}).status_code == 200


def test_tokens_and_texts_of_a_prompt(served):
    tokens = served.http.post("/tokenize", json={"prompt": "hé"}).json()
    assert tokens == {"count": 3, "max_model_len": served.engine.max_model_len, "tokens": list("hé".encode())}
    assert served.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "fake"}
    assert served.http.post("/tokenize", json=chat).json()["tokens"] == list(b"user: x\nassistant: ")
    bad = [("tokenize", {"prompt": 1}), ("tokenize", {"prompt": "x", "other": 1}), ("tokenize", {"prompt": ""})]
    bad += [("detokenize", {"tokens": tokens}) for tokens in ("x", [True], [-1], [1 << 40])]
    for path, body in bad:
        assert served.http.post(f"/{path}", json=body).status_code == 400, (path, body)
    assert served.http.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert served.http.get("/version").json() == {"version": pagepool.__version__}
    assert served.http.get("/v1/models").json()["data"][0]["max_model_len"] == served.engine.max_model_len


def test_every_answer_has_an_id_and_a_line_in_the_access_log(served, caplog):
    with caplog.at_level(logging.INFO, "pagepool.access"):
        assert served.http.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
        unknown = served.http.get("/no%1b%0athing", headers=[(b"x-request-id", b"a\x9b")])
    own, line = unknown.headers["x-request-id"], caplog.records[-1].getMessage()
    assert len(own) == 32 and own in line and '"GET /no%' in line and '" 404 ' in line and line.isprintable()
    assert ' "GET /health" 200 ' in caplog.records[0].getMessage() and caplog.records[0].getMessage().endswith(
        " s mine"
    )


def test_cached_prefixes_are_forgotten_by_local_clients_or_with_the_admin_key(served):
    prompt = "one more prompt that is longer than some blocks"

    def cached():
        return served.post(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def reset(found, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return found.http.post("/reset_prefix_cache", json={}, headers=headers).status_code

    assert [cached() > 0, cached() > 0] == [False, True]
    assert [reset(served, authorization="Bearer no"), reset(served, x_forwarded_for="192.0.2.7")] == [401, 403]
    assert reset(served, forwarded="for=127.0.0.1") == 403 and cached() > 0
    assert reset(served) == 200 and cached() == 0
    with serving(FakeRunner(), admin_key="root", api_keys=KEYS) as other:
        keys = ["Bearer root", "Bearer key of one", "root", ""]
        assert [reset(other, authorization=key) for key in keys] == [200, 401, 401, 401]
        assert other.http.get("/v1/models", headers={"authorization": "Bearer root"}).status_code == 401


@pytest.mark.parametrize(
    ("client", "is_allowed"),
    [(None, True), (("127.0.0.2", 1), True), (("::1", 1), True), (("192.0.2.7", 1), False), (("name", 1), False)],
)
def test_a_local_client_is_one_of_this_machine(client, is_allowed):
    assert is_local(client) == is_allowed


# Connections.


def is_closed(sock):
    """Read until the other side closes; return whether it does so within `SECONDS`."""
    sock.settimeout(SECONDS)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(scope="module")
def open_server():
    with serving(FakeRunner(num_blocks=8192, max_model_len=4096)) as found:
        yield found


@pytest.mark.parametrize("whole", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HT"])
def test_a_connection_without_complete_headers_is_closed(open_server, monkeypatch, whole, begun):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", open_server.port)) as sock:
        if whole:
            sock.sendall(whole)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        sock.sendall(begun)
        begin = time.monotonic()
        assert is_closed(sock) and time.monotonic() - begin < (
            8 if whole and not begun else 4
        )  # idle connections are closed after 5 s


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ("BODY_SECONDS", b"the body did not arrive within 0.3 s: got 1 bytes"),
        ("PART_SECONDS", b"no part of the body arrived for 0.3 s: got 1 bytes"),
    ],
)
def test_a_body_that_does_not_come_is_given_up(open_server, monkeypatch, limit, sentence):
    monkeypatch.setattr(http, limit, 0.3)
    with socket.create_connection(("127.0.0.1", open_server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + JSON + b"content-length: 100\r\n\r\n{")
        sock.settimeout(SECONDS)
        answer = sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 408 ") and sentence in answer + sock.recv(1 << 16)
        assert is_closed(sock)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + JSON
SECOND = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
MALFORMED = {
    "length and chunks": (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND, 400),
    "chunks of HTTP/1.0": (HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"content-length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "a list of lengths": (HEAD + b"content-length: 2, 2\r\n\r\n{}", 400),
    "LF alone": (SECOND.replace(b"\r\n", b"\n"), 400),
    "LF alone once": (b"GET /version HTTP/1.1\r\nhost: x\nx: y\r\n\r\n", 400),
    "LF alone at the end": (b"GET /version HTTP/1.1\r\nhost: x\r\n\n", 400),
    "CR alone": (b"GET /version HTTP/1.1\r\nhost: x\rx: y\r\n\r\n", 400),
    "a folded header": (b"GET /version HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n", 400),
    "a space before the colon": (b"GET /version HTTP/1.1\r\nhost : x\r\n\r\n", 400),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /version HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
    "HTTP/1.2": (SECOND.replace(b"1.1", b"1.2"), 505),
    "another encoding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n", 501),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a bad chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\n0x1\r\n{\r\n", 400),
    "a chunk that ends with LF": (HEAD + b"transfer-encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n", 400),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n" + SECOND, 400),
    "chunks that end with LF": (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\n" + SECOND, 400),
    "small chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 5000, 400),
    "many headers": (SECOND[:-2] + b"x: y\r\n" * 100 + b"\r\n", 431),
    "large headers": (SECOND[:-2] + b"x: %b\r\n\r\n" % (b"y" * 33_000), 431),
    "a header without an end": (SECOND[:-2] + b"x: " + b"y" * 33_000, 431),
}


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=list(MALFORMED))
def test_what_is_not_strict_http_gets_one_json_error_and_a_closed_connection(open_server, data, status, is_split):
    before = open_server.engine.stats()["ended"]
    with socket.create_connection(("127.0.0.1", open_server.port)) as sock:
        sock.settimeout(SECONDS)
        for part in (data[: len(data) // 2], data[len(data) // 2 :]) if is_split else (data,):
            sock.sendall(part)
            time.sleep(0.02 * is_split)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head and len(answer) < 1000
    assert list(json.loads(body)) == ["error"]  # so it is the only answer
    assert open_server.engine.stats()["ended"] == before


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_is_read(open_server, protocol):
    body = b'{"prompt": "x", "max_tokens": 2}'
    offer = b"connection: Upgrade\r\nupgrade: %b\r\n" % protocol
    with socket.create_connection(("127.0.0.1", open_server.port)) as sock:
        sock.settimeout(SECONDS)
        for chunked in (False, True):
            framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
            sent = b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
            sock.sendall(HEAD + offer + framing + b"\r\n\r\n" + sent)
            answer = sock.recv(1 << 16)
            while b"total_tokens" not in answer and answer.startswith(b"HTTP/1.1 200 "):
                answer += sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"}")


def test_all_bodies_together_have_a_limit(open_server, monkeypatch):
    monkeypatch.setattr(http, "MAX_BODIES_BYTES", 100)
    with socket.create_connection(("127.0.0.1", open_server.port)) as sock:
        sock.sendall(HEAD + b"content-length: 100\r\n\r\n" + b" " * 90)
        wait_until(lambda: open_server.post(prompt="x" * 50, max_tokens=1).status_code == 429)
        sock.sendall(b'{"a": 1}  ')
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert open_server.post(prompt="x" * 50, max_tokens=1).status_code == 200


def too_large(port, size, sent):
    """Return a connection that has announced a body of `size` bytes and sent `sent` of them."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(SECONDS)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (JSON, size)
    sock.sendall(head + b" " * sent)
    return sock


def test_an_announced_body_that_is_too_large_is_refused_before_it_comes(open_server):
    with too_large(open_server.port, (16 << 20) + 1, 0) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_too_much_sees_why(open_server):
    """It sends the whole body before it reads. The connection then accepts another request."""
    with too_large(open_server.port, 64 << 20, 64 << 20) as sock:
        answer = b""
        while b"bytes" not in answer:
            answer += sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"at most 16777216 bytes" in answer
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_sends_too_much_for_too_long_is_left(open_server, monkeypatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    with too_large(open_server.port, 1 << 30, (16 << 20) + 1) as sock:
        assert is_closed(sock)


def test_more_connections_than_allowed_are_refused(monkeypatch):
    monkeypatch.setattr("test_serve.MOST", 3)
    with serving(FakeRunner()) as found:
        socks = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(3)]
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", found.port)) as one_more:
            one_more.settimeout(SECONDS)
            assert one_more.recv(1 << 16).startswith(b"HTTP/1.1 503 ") and is_closed(one_more)
        for sock in socks:
            sock.close()
        wait_until(lambda: found.http.get("/health").is_success)


def test_a_client_that_does_not_read_is_left(open_server, monkeypatch):
    """Its stream and connection end. A client that reads slowly gets the whole stream."""
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.5)
    body = b'{"prompt": "x", "max_tokens": 4000, "stream": true, "logprobs": 20, "n": 4, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (JSON, len(body))
    before = open_server.engine.stats()["ended"]["abort"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", open_server.port))
        sock.sendall(head + body)
        wait_until(lambda: open_server.engine.num_requests > 0)
        wait_until(lambda: open_server.engine.num_requests == 0)
        assert is_closed(sock)
    assert open_server.engine.stats()["ended"]["abort"] > before
