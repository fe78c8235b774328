"""One inference server over HTTP: addresses, keys, streams, and every way of failing told apart. It knows no engine.

The key never enters a message, a repr or a trace. httpx comes with Gradio.
"""
from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from ..errors import InputError
from .reading import RemoteError, error_text
from .sse import SseParser

__all__ = ["Client", "Endpoint", "base_url"]

KEYS = ("SPECVIZ_REMOTE_API_KEY", "OPENAI_API_KEY")
MAX_BODY = 2_000_000
MAX_REDIRECTS = 8


def base_url(text: str) -> str:
    """The address of the API from what people type: `host:port` gets `http://`, a bare address gets `/v1`, a path is kept.

    >>> base_url("127.0.0.1:8000"), base_url("https://gpu.example/v3/")
    ('http://127.0.0.1:8000/v1', 'https://gpu.example/v3')

    Raises InputError for what is no address of an HTTP server.
    """
    text = text.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or any(c.isspace() for c in text):
        raise InputError(f"The server's address is {text!r}; expected something like 127.0.0.1:8000 or https://host/v1.")
    if parts.username or parts.password:
        raise InputError("The server's address holds a user name or a password. Give the key in its own field instead.")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is and how it is spoken to. url: as `base_url` gives it. api_key: "" takes SPECVIZ_REMOTE_API_KEY or OPENAI_API_KEY
    from the environment. model: "" takes the first of its list. ca_file: certificates to trust. Times in seconds."""
    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca_file: str = ""
    verify_tls: bool = True
    connect_s: float = 5.0
    read_s: float = 300.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", base_url(self.url))

    @property
    def root(self) -> str:
        """The server itself, without the API's path: where /metrics, /health and /props are."""
        return self.url.rsplit("/v", 1)[0] if self.url.rsplit("/", 1)[-1].startswith("v") else self.url


class Client:
    """Speaks to one endpoint. transport: for tests. Close it when done; all methods raise RemoteError."""

    def __init__(self, endpoint: Endpoint, transport: httpx.BaseTransport | None = None) -> None:
        self.endpoint = endpoint
        key = endpoint.api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
        headers = {"Accept": "application/json, text/event-stream", **dict(endpoint.headers)}
        own = next((name for name in headers if name.lower() == "authorization"), "")
        if endpoint.api_key or key and not own:          # what was typed for this server goes before the environment's
            headers[own or "Authorization"] = f"Bearer {key}"
        verify: Any = _trusting(endpoint.ca_file) if endpoint.ca_file else endpoint.verify_tls
        timeout = httpx.Timeout(endpoint.read_s, connect=endpoint.connect_s)
        try:
            self._http = httpx.Client(headers=headers, timeout=timeout, verify=verify, transport=transport)
        except (UnicodeEncodeError, ValueError) as error:
            raise InputError("The key or an extra header holds characters that no HTTP header may hold. Enter it again.") from error

        self._stream: httpx.Response | None = None
        self._key = key

    def close(self) -> None:
        self._http.close()

    def cut(self) -> None:
        """Drop the connection of the stream in progress, from any thread: a thread that waits for it wakes at once."""
        stream = self._stream.extensions.get("network_stream") if self._stream else None
        line = stream.get_extra_info("socket") if stream else None
        if line is not None:
            try:
                line.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass                                     # it has ended by itself

    def get(self, path: str, *, at_root: bool = False) -> Any:
        """The decoded JSON, or the text where it is none (Prometheus)."""
        response = self._sent("GET", (self.endpoint.root if at_root else self.endpoint.url) + path)
        try:
            self._check(response)
            text = self._body(response)
        finally:
            response.close()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def models(self) -> list[dict[str, Any]]:
        """The records of the model list; the usual first question, so that wrong addresses are recognised here."""
        answer = self.get("/models")
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list):
            raise RemoteError("not-an-api", f"{self.endpoint.url}/models answered, but not with a list of models. Is this the address of an "
                              "OpenAI-compatible API? A web page or a proxy may be in front of it.")
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        """(event, seconds since the request was sent) until the server ends. Closing the generator drops the connection, which is how
        an answer is cancelled. A stream that breaks off raises RemoteError of the kind "cut"; what came before has been yielded."""
        sent_s = time.perf_counter()
        response = self._stream = self._sent("POST", self.endpoint.url + path, json=dict(body))
        parser, finished, any_event = SseParser(), False, False
        try:
            self._check(response)
            for data in self._events(response, parser):
                if data.strip() == "[DONE]":
                    finished = True
                    continue
                event = self._decoded(data)
                any_event = True
                choices = event.get("choices")
                finished = finished or bool(isinstance(choices, list) and choices and isinstance(choices[0], dict)
                                            and choices[0].get("finish_reason")) or bool(event.get("stop"))
                yield event, time.perf_counter() - sent_s
        finally:
            self._stream = None
            response.close()
        if not finished:
            raise RemoteError("cut", "The server ended the stream before the answer was complete; what had arrived is kept." if any_event
                              else "The server closed the connection without an answer.")

    def _events(self, response: httpx.Response, parser: SseParser) -> Iterator[str]:
        try:
            for chunk in response.iter_bytes():
                yield from parser.feed(chunk)
        except httpx.ReadTimeout as error:
            raise RemoteError("timeout", f"Nothing came from the server for {self.endpoint.read_s:g} s; what had arrived is kept.") from error
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise RemoteError("cut", "The connection broke off in the middle of the answer; what had arrived is kept.") from error
        yield from parser.finish()

    def _decoded(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RemoteError("not-an-api", f"The server sent an event that is not JSON: {data[:60]!r}.") from error
        return event if isinstance(event, dict) else {}

    def _sent(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        try:
            return self._followed(self._http.build_request(method, url, **arguments))
        except httpx.ConnectTimeout as error:
            hint = " If it speaks plain HTTP, begin the address with http://." if self.endpoint.url.startswith("https") else ""
            raise RemoteError("timeout", f"{self.endpoint.root} did not accept a connection within {self.endpoint.connect_s:.0f} s. Is the "
                              f"address right, and does a firewall stand between?{hint}") from error
        except httpx.TimeoutException as error:
            raise RemoteError("timeout", f"{self.endpoint.root} did not answer within {self.endpoint.read_s:g} s.") from error
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.UnsupportedProtocol as error:
            raise RemoteError("not-an-api", f"{self.endpoint.root} redirects to an address that is not HTTP.") from error
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise RemoteError("cut", f"{self.endpoint.root} broke the connection off before it answered ({type(error).__name__}). If it "
                              "expects https, begin the address with https://.") from error

    def _followed(self, request: httpx.Request) -> httpx.Response:
        """The answer, redirects followed. httpx drops the key where one leads to another server; the extra headers are dropped here."""
        for _ in range(MAX_REDIRECTS):
            response = self._http.send(request, stream=True)
            following = response.next_request
            if following is None:
                return response
            response.close()
            if not _is_same_server(request.url, following.url):
                for name, _ in self.endpoint.headers:
                    following.headers.pop(name, None)
            request = following
        raise RemoteError("not-an-api", f"{self.endpoint.root} redirects in a circle. Give the address that it ends at.")

    def _unreachable(self, error: httpx.ConnectError) -> RemoteError:
        text, root = str(error).lower(), self.endpoint.root
        if "ssl" in text or "tls" in text or "certificate" in text:
            if "wrong_version" in text or "record layer" in text:
                return RemoteError("tls", f"{root} does not speak TLS. Begin the address with http:// instead of https://.")
            return RemoteError("tls", f"The certificate of {root} is not trusted ({error}). Give its CA file.")
        if any(word in text for word in ("name or service", "nodename", "getaddrinfo", "name resolution", "no address")):
            return RemoteError("dns", f"There is no machine called {urlsplit(root).hostname}. Check the spelling of the address.")
        if "refused" in text:
            return RemoteError("refused", f"Nothing listens at {root}. Start the server, or correct the port.")
        return RemoteError("refused", f"{root} cannot be reached ({error}).")

    def _check(self, response: httpx.Response) -> None:
        """Raise what a status or a body other than an API's means."""
        kind = response.headers.get("content-type", "")
        if response.status_code < 400:
            if "text/html" in kind:
                raise RemoteError("not-an-api", f"{response.url} answered with a web page, not an API. Add the API's path, usually /v1.")
            return
        text = self._body(response)
        try:
            said = error_text(json.loads(text)) or text
        except (ValueError, AttributeError):
            said = text
        said = self.without_secrets(" ".join(said.split()))[:300]
        status, lower = response.status_code, said.lower()
        if status in (401, 403):
            raise RemoteError("auth", f"The server refused the key ({status}: {said}). Enter the key that it was started with.")
        if status == 404 and "model" in lower:
            raise RemoteError("no-model", f"The server does not know this model ({said}). Choose one of its list.")
        if status == 404:
            raise RemoteError("not-an-api", f"{response.url} does not exist on this server ({status}). Its API may have another path than /v1.")
        if status in (429, 503):
            raise RemoteError("busy", f"The server is busy or still loading ({status}: {said}). Try again in a moment.")
        if status in (400, 413, 422) and any(word in lower for word in ("context", "too long", "maximum", "max_tokens", "exceed")):
            raise RemoteError("context", f"The conversation does not fit this server's context: {said}")
        raise RemoteError("server", f"The server answered {status}: {said or response.reason_phrase}")

    def without_secrets(self, text: str) -> str:
        """A server's words, in which it may quote what it refuses."""
        for secret in (self._key, *(value for _, value in self.endpoint.headers)):
            text = text.replace(secret, "…") if len(secret) > 3 else text
        return text

    def _body(self, response: httpx.Response) -> str:
        body = b""
        try:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_BODY:
                    break
        except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
            raise RemoteError("cut", f"{self.endpoint.root} broke its answer off.") from error
        return body[:MAX_BODY].decode("utf-8", "replace")


def _is_same_server(one: httpx.URL, other: httpx.URL) -> bool:
    upgraded = (one.scheme, other.scheme) == ("http", "https") and one.port is other.port is None
    return one.host == other.host and (upgraded or (one.scheme, one.port) == (other.scheme, other.port))


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except FileNotFoundError as error:
        raise InputError(f"There is no CA file {ca_file} on this machine. Give the path of a PEM file.") from error
    except ssl.SSLError as error:                                  # OpenSSL's own words would say less
        raise InputError(f"{ca_file} holds no certificate in PEM form; expected text with BEGIN CERTIFICATE. Convert it, or leave the "
                         "field empty to trust what this machine trusts.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"The CA file {ca_file!r} cannot be read ({type(error).__name__}). Give the path of a PEM file.") from error
