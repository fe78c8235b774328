"""A small reverse proxy: what is asked below a path is asked of another server without it, and the answer is passed on as it comes.

It knows nothing of specviz.
"""
from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["ReverseProxy"]

_OWN = ("connection", "transfer-encoding", "keep-alive", "content-length", "date", "server")


class ReverseProxy:
    """Serves `backend` (http://host:port) below `path` ("/x"); everything else is not found. missed: what was asked outside of the path."""

    def __init__(self, backend: str, path: str) -> None:
        self.missed: list[str] = []
        target, proxy = urlsplit(backend), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *unused: object) -> None:
                pass

            def forward(self) -> None:
                if not self.path.startswith(path + "/"):
                    proxy.missed.append(self.path)
                    return self.send_error(404)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "host")}
                headers |= {"Host": self.headers["Host"], "X-Forwarded-Host": self.headers["Host"], "X-Forwarded-Proto": "http"}
                connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
                try:
                    connection.request(self.command, self.path[len(path):], body or None, headers)
                    answer = connection.getresponse()
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in _OWN:
                            self.send_header(name, value)
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    while block := answer.read1(1 << 16):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:                          # one of the two has gone
                    self.close_connection = True
                finally:
                    connection.close()

            do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = forward

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{path}/"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
