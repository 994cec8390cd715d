"""An OpenAI endpoint as `pagepool prove` asks it: which fields it knows, answers, and requests that are cancelled."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Any

from pagepool.cli.output import printable
from pagepool.cli.prove_oracle import Answer
from pagepool.cli.usage import UsageError

if TYPE_CHECKING:
    import httpx

__all__ = ["Endpoint", "Gone"]

SHORT = "able acid aged also"
BUSY_SECONDS = 120.0  # to wait for a server that is full


class Gone(Exception):
    """The server does not answer: it was stopped or killed."""


class Endpoint:
    """A server of OpenAI's API. `probe` finds out which fields it knows.

    Parameters
    ----------
    client : httpx.Client
        Has the address of the server, which ends with /v1.
    model : str or None
        Name of the model. None: the first one that the server lists.
    """

    def __init__(self, client: httpx.Client, model: str | None) -> None:
        self._client = client
        self.url = str(client.base_url)
        self._fixed_model = model
        self.model = model or ""
        self.path = "completions"
        self.top = 0  # log probabilities at each position
        self.cold = ""  # field that makes the server compute a prompt without its cache: echo, cache_prompt, cache_salt
        self.has_salts = False
        self.errors = 0
        self.answers = 0  # requests that were answered by `ask`
        self._salts = itertools.count()
        self._salt = f"prove-{time.time_ns():x}"

    def probe(self) -> None:
        """Find out the model and the fields that the server knows. Raises `UsageError` if it has no such API."""
        self.read_model()
        tried = [("completions", {"logprobs": n} if n else {}, n) for n in (20, 5, 0)]
        tried += [("chat/completions", {"logprobs": True, "top_logprobs": n} if n else {}, n) for n in (20, 5, 0)]
        for self.path, fields, self.top in tried:
            status, found = self._post(self._body(SHORT, 2) | fields)
            answer = self._answer(found, 0.0, False) if status == 200 else None
            if answer is not None and (answer.tops or not self.top):
                break
        else:
            raise UsageError(f"{self.url}: answers status {status} to completions and chats: {_quoted(found)}")
        # A server that ignores unknown fields takes a number too.
        self.has_salts = self._post(self._body(SHORT, 1) | {"cache_salt": 5})[0] in (400, 422)
        self.has_salts &= self._post(self._body(SHORT, 1) | {"cache_salt": self.new_salt()})[0] == 200
        if self.path == "completions" and self.top:
            status, found = self._post(self._body(SHORT, 2) | {"echo": True})
            answer = self._answer(found, 0.0, True) if status == 200 else None
            if answer is not None and found["choices"][0]["text"].startswith(SHORT):
                self.cold = "echo"
        if not self.cold and self._status("/props") == 200:
            self.cold = "cache_prompt"  # llama-server
        if not self.cold and self.has_salts:
            self.cold = "cache_salt"

    def read_model(self) -> None:
        """Read the name of the served model, which may be another one after a restart."""
        import httpx

        if self._fixed_model:
            return
        end = time.monotonic() + BUSY_SECONDS
        try:
            while (answer := self._client.get("models")).status_code == 503 and time.monotonic() < end:
                time.sleep(0.2)  # a server that loads its model
        except httpx.RequestError as error:
            raise UsageError(printable(f"{self.url}: {error}")) from None
        except httpx.InvalidURL as error:
            raise UsageError(str(error)) from None
        try:
            self.model = str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise UsageError(f"{answer.url} lists no model (status {answer.status_code}): give --model") from None

    def fits(self, text: str) -> bool:
        """Return true if the server takes a prompt of this length. Raises `Gone`."""
        status, found = self._post(self._body(text, self.num_tokens))
        if status == 200:
            return True
        if status in (400, 413, 422, 500):
            return False
        raise UsageError(f"{self.url}: status {status}: {_quoted(found)}")

    @property
    def num_tokens(self) -> int:
        """Tokens of an answer. A text without log probabilities must be long enough to tell a secret."""
        return 8 if self.top else 24

    def new_salt(self) -> str:
        """Return a salt that no other request has."""
        return f"{self._salt}-{next(self._salts)}"

    def ask(
        self, text: str, *, cold: bool = False, salt: str | None = None, num_tokens: int | None = None
    ) -> Answer | None:
        """Return the greedy answer, or None if the request failed with an error of the server.

        Raises `Gone` if the server does not answer, and `UsageError` if it refuses the request or answers with anything
        but a completion.
        """
        body = self._body(text, num_tokens or self.num_tokens)
        if cold and self.cold:
            body[self.cold] = {"echo": True, "cache_prompt": False, "cache_salt": self.new_salt()}[self.cold]
        elif salt is not None:
            body["cache_salt"] = salt
        end = time.monotonic() + BUSY_SECONDS
        while True:
            began = time.monotonic()
            status, found = self._post(body)
            if status == 200:
                answer = self._answer(found, time.monotonic() - began, "echo" in body)
                if answer is None:
                    raise UsageError(f"{self.url}: status 200 without a completion: {_quoted(found)}")
                self.answers += 1
                return answer
            if status in (429, 503) and began < end:
                time.sleep(0.2)
            elif status == 503:
                raise Gone(f"status 503 for {BUSY_SECONDS:.0f} seconds")
            elif status >= 500 or status == 429:
                self.errors += 1
                return None
            else:
                raise UsageError(f"{self.url}: status {status}: {_quoted(found)}")

    def cancel(self, text: str, seconds: float) -> None:
        """Send a request and close the connection after some seconds."""
        import httpx

        try:
            body = {**self._body(text, 64), "stream": True}
            self._client.post(self.path, json=body, timeout=httpx.Timeout(30.0, read=max(seconds, 0.001)))
        except (httpx.ReadTimeout, httpx.DecodingError):
            return  # as wanted: httpx closes the connection
        except httpx.TransportError as error:
            raise Gone(str(error)) from None

    def is_there(self) -> bool:
        """Return true if the server lists its models."""
        return self._status("models") == 200

    def _status(self, path: str) -> int:
        import httpx

        try:
            url = self._client.base_url.join(path) if path.startswith("/") else path
            return int(self._client.get(url).status_code)
        except httpx.RequestError:
            return 0

    def _body(self, text: str, num_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": num_tokens, "temperature": 0}
        if self.path == "completions":
            return body | {"prompt": text} | ({"logprobs": self.top} if self.top else {})
        body["messages"] = [{"role": "user", "content": text}]
        return body | ({"logprobs": True, "top_logprobs": self.top} if self.top else {})

    def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status, and what JSON an answer has, or its text."""
        import httpx

        try:
            answer = self._client.post(self.path, json=body)
        except httpx.DecodingError as error:
            return 200, str(error)
        except httpx.TransportError as error:
            raise Gone(printable(f"{type(error).__name__}: {error}")) from None
        try:
            return answer.status_code, answer.json() if answer.status_code == 200 else answer.text
        except ValueError:
            return answer.status_code, answer.text

    def _answer(self, found: Any, seconds: float, is_echo: bool) -> Answer | None:
        """Read an answer. Return None if it is not a completion: any server may send anything."""
        try:
            return self._completion(found, seconds, is_echo)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def _completion(self, found: Any, seconds: float, is_echo: bool) -> Answer:
        choice = found["choices"][0]
        usage = found.get("usage") or {}
        text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
        tokens, tops = _log_probabilities(choice.get("logprobs") or {})
        if is_echo:
            own = int(usage["completion_tokens"])
            tokens, tops = tokens[len(tokens) - own :], tops[len(tops) - own :]
            text = "".join(tokens)
        if not isinstance(text, str) or any(math.isnan(value) for top in tops for value in top.values()):
            raise ValueError("the text is missing, or a log probability is NaN")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(text, tokens, tops, details.get("cached_tokens"), usage.get("prompt_tokens"), seconds)


def _log_probabilities(found: dict[str, Any]) -> tuple[tuple[str, ...], tuple[dict[str, float], ...]]:
    """Read log probabilities of completions or of chats, which llama-server has in completions too."""
    if found.get("content"):
        places = found["content"]
        tops = tuple({top["token"]: float(top["logprob"]) for top in place["top_logprobs"]} for place in places)
        return tuple(place["token"] for place in places), tops
    tokens, tops = found.get("tokens") or (), found.get("top_logprobs") or ()
    return tuple(tokens), tuple({token: float(value) for token, value in (top or {}).items()} for top in tops)


def _quoted(found: Any) -> str:
    return printable(str(found)[:200])
