"""A model hub on this machine: repositories are folders, spoken to by the real client over HTTP. It can cut a download short.

It knows nothing of specviz. Only what huggingface_hub asks for is answered: model info, file list, files with ranges.
"""
from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "FakeHub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `folders`: repository name -> folder. gated: names that answer as gated ones do. cut_after: bytes after which the connection
    of each weight download ends, once for each file; None never. requests: what was asked for, (method, path, range)."""

    def __init__(self, folders: dict[str, Path], gated: frozenset[str] = frozenset(), cut_after: int | None = None) -> None:
        self.folders, self.gated, self.cut_after = folders, gated, cut_after
        self.requests: list[tuple[str, str, str]] = []
        self.cut: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *unused: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        wanted = request.headers.get("Range", "")
        self.requests.append((request.command, path, wanted))
        is_api = path.startswith("api/models/")
        repo = next((name for name in self.folders if (path.removeprefix("api/models/") + "/").startswith(name + "/")), None)
        if repo is None:
            return self.send(request, 404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
        if repo in self.gated and not is_api:      # who may not read the files may still see their names
            return self.send(request, 403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"}, with_body)
        folder = self.folders[repo]
        rest = path.removeprefix("api/models/").removeprefix(repo).strip("/")
        if is_api:
            if "revision/" in rest and rest.partition("revision/")[2] not in ("main", COMMIT):
                return self.send(request, 404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"}, with_body)
            files = [path for path in sorted(folder.iterdir()) if path.is_file()]
            if "tree/" in rest:
                body = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
            else:
                body = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "gated": "manual" if repo in self.gated else False,
                        "siblings": [{"rfilename": file.name, "size": file.stat().st_size} for file in files]}
            return self.send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)
        file = folder / rest.partition(f"resolve/{COMMIT}/")[2]
        if not file.is_file():
            return self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status = 200
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
        if self.cut_after is not None and name.endswith(".safetensors") and name not in self.cut and len(body) > self.cut_after:
            self.cut.add(name)
            request.wfile.write(body[:self.cut_after])
            request.wfile.flush()
            request.close_connection = True
            request.connection.close()
            return
        request.wfile.write(body)
