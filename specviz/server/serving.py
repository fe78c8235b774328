"""Puts the API on the page's app, or serves it alone. Imports the routes in a thread: they wait for torch, the page does not."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..options import Options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .counted import Counted

__all__ = ["attach", "not_offered", "serve_alone"]


def not_offered(options: Options) -> str:
    """Why this page has no API, "" if it has one: without a key nobody but this machine may use it."""
    return "" if options.api_key or not options.public else "the API is off: this page can be reached from outside and has no --api-key"


def attach(app: FastAPI, service: Counted, options: Options) -> threading.Thread:
    """Add the routes to a running app, as soon as they are imported. Returns the thread that does it."""
    def work() -> None:
        from .routes import add_routes
        add_routes(app, service, key=options.api_key, limits=options.limits)
    thread = threading.Thread(target=work, name="specviz-api", daemon=True)
    thread.start()
    return thread


def serve_alone(service: Counted, options: Options, port: int) -> Callable[[], None]:
    """Serve the API without a page; returns once it accepts requests. Calling the result ends it."""
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI(title="specviz", openapi_url=None)
    attach(app, service, options)
    server = uvicorn.Server(uvicorn.Config(app, host=options.host, port=port, log_level="warning", root_path=options.root_path or ""))
    thread = threading.Thread(target=server.run, name="specviz-http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.02)

    def stop() -> None:
        server.should_exit = True
        thread.join(5)
    return stop
