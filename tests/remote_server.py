"""A scripted inference server over real HTTP: it lists models and answers chats with recorded or invented event streams."""
from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures" / "remote"


def recorded(name: str) -> Iterator[tuple[dict[str, Any], float]]:
    """(event, arrival in seconds) of a recorded stream of a live server."""
    arrival_s = 0.0
    for line in (FIXTURES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("[") and line[1:9].strip().replace(".", "").isdigit():
            arrival_s = float(line[1:9])
        elif line.startswith("{"):
            yield json.loads(line), arrival_s


def wire(events: Iterable[dict[str, Any]], done: bool = True) -> bytes:
    """The events as a server sends them."""
    text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")
    return text.encode()


class Script:
    """What the server says. models: ids; owner: their `owned_by`. body: the stream's bytes, or a list of pieces with pauses between them.
    status, error: answer every chat so. raw: (status, content type, body) for any GET of the model list instead."""

    def __init__(self, body: bytes | list[bytes] = b"", *, owner: str = "vllm", models: tuple[str, ...] = ("smol",), status: int = 200,
                 error: bytes = b"", raw: tuple[int, str, bytes] | None = None, pause_s: float = 0.0, cut: bool = False) -> None:
        self.body, self.owner, self.models, self.status, self.error = body, owner, models, status, error
        self.raw, self.pause_s, self.cut = raw, pause_s, cut
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_sent = 0
        self.dropped = threading.Event()


@contextmanager
def serve(script: Script) -> Iterator[str]:
    """The address of a server that follows the script."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            script.headers.append(dict(self.headers))
            if self.path == "/v1/models":
                entries = [{"id": name, "owned_by": script.owner, "max_model_len": 512} for name in script.models]
                self._answer(*(script.raw or (200, "application/json", json.dumps({"object": "list", "data": entries}).encode())))
            else:
                self._answer(404, "application/json", b'{"detail": "Not Found"}')

        def do_POST(self) -> None:
            script.headers.append(dict(self.headers))
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if script.status != 200:
                self._answer(script.status, "application/json", script.error)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for piece in [script.body] if isinstance(script.body, bytes) else script.body:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                    script.num_sent += 1
                    time.sleep(script.pause_s)
                if not script.cut:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                script.dropped.set()
            if script.cut:
                self.close_connection = True

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
