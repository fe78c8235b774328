"""A model hub on this machine: repositories are folders, spoken to by the real client over HTTP. It can cut downloads short or fall silent.

It knows nothing of specviz. Answered is what huggingface_hub asks for: model info, file list, files by commit. Weights are named by their
SHA-256 and handed out, as by the real hub, by a second server on another host name, in ranges.
"""
from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

__all__ = ["COMMIT", "FakeHub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_BLOCK_BYTES = 1 << 15


class FakeHub:
    """Serves `folders`: repository name -> folder. gated: names that answer as gated ones do to whoever has not accepted their terms.

    cut_after: bytes after which the connection of each weight download ends, `num_cuts` times for each file; None never. silent_after: bytes
    after which a weight download gets nothing more; it ends once `go_on` is set. requests: what was asked for, (method, path, range). tokens:
    Authorization headers that the server for weights was sent: there must be none.
    """

    def __init__(self, folders: dict[str, Path], gated: frozenset[str] = frozenset(), cut_after: int | None = None, num_cuts: int = 1,
                 silent_after: int | None = None, port: int = 0) -> None:
        self.folders, self.gated, self.cut_after, self.num_cuts = folders, gated, cut_after, num_cuts
        self.silent_after, self.go_on = silent_after, threading.Event()
        self.requests: list[tuple[str, str, str]] = []
        self.tokens: list[str] = []
        self.cuts: dict[str, int] = {}
        self.is_silent = threading.Event()               # a download has come to the point where nothing more is sent
        self.corrupt = False                             # weights arrive with one byte changed
        self.leaves = self.has_left = False              # after a cut nothing is answered any more
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *unused: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.store_url = f"http://localhost:{self.server.server_address[1]}/store"

    def close(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        wanted = request.headers.get("Range", "")
        if self.has_left:
            request.close_connection = True
            return request.connection.close()
        self.requests.append((request.command, path, wanted))
        is_api, is_store = path.startswith("api/models/"), path.startswith("store/")
        name = path.removeprefix("api/models/").removeprefix("store/")
        repo = next((repo for repo in self.folders if (name + "/").startswith(repo + "/")), None)
        if repo is None:                             # the hub does not tell a stranger whether it is private
            return self.send(request, 401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
        folder = self.folders[repo]
        if is_store:
            self.tokens += [request.headers["Authorization"]] if "Authorization" in request.headers else []
            return self.send_file(request, folder / path.rpartition("/")[2], wanted, {}, with_body)
        if repo in self.gated and not is_api:        # who may not read the files may still see their names
            status = 403 if "Authorization" in request.headers else 401
            return self.send(request, status, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"}, with_body)
        if is_api:
            return self.describe(request, repo, name.removeprefix(repo).strip("/"), with_body)
        file = folder / name.partition(f"resolve/{COMMIT}/")[2]
        if not file.is_file():
            return self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)
        headers = {"X-Repo-Commit": COMMIT}
        if file.suffix != ".safetensors":
            return self.send_file(request, file, wanted, headers | {"ETag": f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"'}, with_body)
        headers |= {"X-Linked-Etag": f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"', "X-Linked-Size": str(file.stat().st_size),
                    "Location": f"{self.store_url}/{quote(repo)}/{file.name}"}
        self.send(request, 302, b"", headers, with_body)

    def describe(self, request: BaseHTTPRequestHandler, repo: str, rest: str, with_body: bool) -> None:
        if "revision/" in rest and rest.partition("revision/")[2] not in ("main", COMMIT):
            return self.send(request, 404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"}, with_body)
        files = [path for path in sorted(self.folders[repo].iterdir()) if path.is_file()]
        if "tree/" in rest:
            body = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
        else:
            body = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "gated": "manual" if repo in self.gated else False,
                    "siblings": [{"rfilename": file.name, "size": file.stat().st_size} for file in files]}
        self.send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)

    def send_file(self, request: BaseHTTPRequestHandler, file: Path, wanted: str, headers: dict[str, str], with_body: bool) -> None:
        content, status = file.read_bytes(), 200
        if self.corrupt and file.suffix == ".safetensors":
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = headers | {"Accept-Ranges": "bytes"}
        if wanted.startswith("bytes="):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[first:]
        self.send(request, status, content, headers, with_body, file.name)

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], with_body: bool, name: str = ""
             ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if not with_body:
            return
        is_weights = name.endswith(".safetensors")
        end = len(body)
        if is_weights and self.cut_after is not None and self.cuts.get(name, 0) < self.num_cuts and end > self.cut_after:
            self.cuts[name] = self.cuts.get(name, 0) + 1
            end, self.has_left = self.cut_after, self.leaves
        try:
            for at in range(0, end, _BLOCK_BYTES):
                if is_weights and self.silent_after is not None and at >= self.silent_after:
                    self.is_silent.set()
                    self.go_on.wait(60)
                    raise ConnectionAbortedError         # whoever gave it up must not get the rest after all
                request.wfile.write(body[at:min(end, at + _BLOCK_BYTES)])
            request.wfile.flush()
        except OSError:                              # whoever asked has gone
            request.close_connection = True
        if end < len(body):
            request.close_connection = True
            request.connection.close()
