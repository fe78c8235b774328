"""A service that can be turned to another server and back while the page runs. It knows nothing of screens or wire formats.

The local engine stays as it is meanwhile; the server in use stays until a new one has answered.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import Busy
from .remote.reach import Reach
from .remote_service import RemoteService
from .service import ChatRequest, Choice, Inspection, Line, MethodInfo, Offer, Run, Service, Status

if TYPE_CHECKING:
    from .options import Options

__all__ = ["Attachable"]

STEP = 1_000_000              # pairs of one service are numbered below this; each turn to another service begins a new block


class Attachable:
    """See `service.Service`; `attach` and `detach` choose which service that is."""

    def __init__(self, local: Service, options: Options, make: Callable[..., RemoteService] = RemoteService) -> None:
        self._local, self._now, self._options, self._make = local, local, options, make
        self._lock = threading.Lock()
        self._turns, self._asking, self._problem = 0, "", ""

    # ---- turning ------------------------------------------------------------------------------------------------------
    def attach(self, url: str, *, api_key: str = "", model: str = "", kind: str = "auto", baseline: str = "", draft: str = "",
               reach: Reach | None = None) -> None:
        """Ask a server and use it once it has answered; returns at once, `status` tells how it goes. Raises InputError for what is no
        address, Busy while another one is being asked. api_key: kept in memory only. reach: None is as the command
        line says."""
        reach = reach or self._options.reach
        with self._lock:
            if self._asking:
                raise Busy(f"{self._asking} is being asked already. Wait a moment.")
            options = replace(self._options, remote=url, remote_model=model, remote_kind=kind, remote_draft=draft,
                              remote_baseline=baseline or None, remote_headers=reach.headers, remote_ca=reach.ca_file,
                              remote_timeout=reach.timeout_s)
            service = self._make(options, api_key=api_key)
            self._asking, self._problem = url, ""
        threading.Thread(target=self._wait_for, args=(service,), name="specviz-turn", daemon=True).start()

    def detach(self) -> None:
        """Back to this machine's own engine."""
        with self._lock:
            if self._now is not self._local:
                self._now, self._turns, self._problem = self._local, self._turns + 1, ""

    @property
    def is_attached(self) -> bool:
        return self._now is not self._local

    def _wait_for(self, service: RemoteService) -> None:
        while service.status().is_loading:
            time.sleep(0.02)
        status = service.status()
        with self._lock:
            if status.state == "ready":
                self._now, self._turns = service, self._turns + 1
            else:
                self._problem = status.message
            self._asking = ""

    # ---- the service in use ---------------------------------------------------------------------------------------------
    def status(self) -> Status:
        with self._lock:
            status, asking, problem, turns = self._now.status(), self._asking, self._problem, self._turns
        status = replace(status, number=status.number + STEP * turns)
        if asking:
            return replace(status, is_loading=True, message=f"Asking {asking} what it serves", fraction=None)
        return replace(status, last_error=problem or status.last_error)

    def config(self) -> dict[str, Any]:
        return self._now.config()

    def methods(self) -> list[MethodInfo]:
        return self._now.methods()

    def default_method(self) -> str:
        return self._now.default_method()

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return self._now.count_tokens(messages)

    def submit(self, request: ChatRequest) -> Run:
        return self._now.submit(request)

    def forget(self, conversation: str) -> None:
        for service in {self._now, self._local}:
            service.forget(conversation)

    def choice(self) -> Choice | None:
        return self._now.choice()

    def offers(self) -> list[Offer]:
        return self._now.offers()

    def advice(self) -> list[Line]:
        return self._now.advice()

    def suggestion(self) -> Offer | None:
        return self._now.suggestion()

    def inspect(self, choice: Choice) -> Inspection:
        return self._now.inspect(choice)

    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        self._now.load(choice, unload_first=unload_first)

    def cancel_load(self) -> None:
        self._now.cancel_load()

    def unload(self) -> None:
        self._now.unload()

    def close(self) -> None:
        self._now.close()
        if self._now is not self._local:
            self._local.close()

    def __getattr__(self, name: str) -> Any:
        """What a service offers beyond the protocol."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._now, name)
