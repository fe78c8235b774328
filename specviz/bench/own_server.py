"""Our own engine behind its API for the time of a measurement, on a port of its own. It knows nothing of what is measured."""
from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import InputError
from ..limits import Limits
from ..remote.client import Client, Endpoint
from ..remote.reading import RemoteError

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["OwnServer", "own_server"]


@dataclass(frozen=True, slots=True)
class OwnServer:
    """service: the one behind the API. url: host and port. key: what clients must send."""
    service: Service
    url: str
    key: str


@contextmanager
def own_server(target: str | None = None, limits: Limits = Limits(), service: Service | None = None) -> Iterator[OwnServer]:
    """Serve until the block ends, then end everything. service: a ready one; by default the target is loaded. Raises InputError where that
    cannot be."""
    from ..options import Options
    from ..server.counted import Counted
    from ..server.serving import serve_alone
    options = Options(browser=False, api_only=True, api_key=secrets.token_hex(8), target=target, limits=limits)
    if service is None:
        from ..service import open_service
        service = open_service(options)
    try:
        while (status := service.status()).state == "loading":
            time.sleep(0.1)
        if status.state != "ready":
            raise InputError(status.message)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        end = serve_alone(Counted(service), replace(options, limits=limits), port)
        try:
            _wait_for(Endpoint(f"127.0.0.1:{port}", api_key=options.api_key))
            yield OwnServer(service, f"127.0.0.1:{port}", options.api_key)
        finally:
            end()
    finally:
        service.close()


def _wait_for(endpoint: Endpoint) -> None:
    """The routes come a moment after the port."""
    client = Client(endpoint)
    try:
        for _ in range(600):
            try:
                client.models()
                return
            except RemoteError:
                time.sleep(0.1)
    finally:
        client.close()
