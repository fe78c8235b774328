"""The service on another inference server: the same runs, read from its stream. It knows no engine's wire format and no screen.

What the server does not tell stays unknown: `meta["remote"]` says what that is, and each step carries its source.
"""
from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from . import __version__, metrics
from .errors import Busy, InputError, SpecvizError
from .remote.client import Client, Endpoint
from .remote.engines import ENGINES, EngineKind, detect
from .remote.reading import Ending, Reader, RemoteError
from .service import ChatRequest, Choice, Inspection, Line, MethodInfo, Offer, Status
from .shared_prompt import under
from .trace import PlainToken, StepTrace, Trace

if TYPE_CHECKING:
    from .options import Options

__all__ = ["RemoteRun", "RemoteService"]

METHOD = "server"
REPEAT_NAMES = {"repetition_penalty": "repetition_penalty", "repeat_penalty": "repetition_penalty"}


class RemoteRun:
    """See `service.Run`. The steps are revised once the stream has ended: `trace` has what the last event told of the earlier ones."""

    def __init__(self, client: Client, kind: EngineKind, body: dict[str, Any], meta: dict[str, Any],
                 baseline: tuple[Client, EngineKind, dict[str, Any]] | None) -> None:
        self.meta, self.text, self.reason = meta, "", ""
        self._client, self._kind, self._body, self._baseline = client, kind, body, baseline
        self._steps: list[StepTrace] = []
        self._plain: list[PlainToken] = []
        self._ending: Ending | None = None
        self._cancelled = threading.Event()
        self._measured = False

    place = 0                    # no server tells

    def wait(self, timeout_s: float) -> bool:
        return True

    def __iter__(self) -> Iterator[StepTrace]:
        reader = self._kind.reader()
        try:
            for event, arrival_s in self._client.stream("/chat/completions", self._body):
                steps, self.text = reader.feed(event, arrival_s), reader.text
                for step in steps:
                    self._steps.append(step)
                    yield step
                if self._cancelled.is_set():
                    break
        except RemoteError as error:
            if not self._cancelled.is_set():
                self._end(reader)
                self.reason = "error"
                raise RemoteError(error.kind, self._client.without_secrets(str(error))) from error
        finally:
            self._client.close()
        known = len(self._steps)
        self._end(reader)
        for step in self._ending.steps[known:] if self._ending else ():       # the last one closes only with the stream
            if step.source != "aggregate":
                yield step
        self.reason = "cancelled" if self._cancelled.is_set() else self._ending.reason if self._ending else "eos"

    def _end(self, reader: Reader) -> None:
        ending = reader.finish()
        self._ending, self._steps, self.text = ending, list(ending.steps), reader.text
        if ending.num_prompt_tokens is not None:
            self.meta["prompt_tokens"] = ending.num_prompt_tokens
        self.meta["remote"] = {**self.meta["remote"], "server": ending.server, "notes": list(ending.notes),
                               **({"counted": [list(pair) for pair in ending.counted]} if ending.counted else {})}

    def cancel(self) -> None:
        self._cancelled.set()
        self._client.cut()
        if self._baseline:
            self._baseline[0].cut()

    def measure_plain(self, num_tokens: int = 128) -> Iterator[PlainToken]:
        """The same prompt on the baseline: a second server or model, or the same one with its switch off. Nothing where there is none."""
        if self._baseline is None or self._measured:
            return
        self._measured = True
        client, kind, body = self._baseline
        goal = sum(token.num_tokens for step in self._steps for token in step.emitted)
        reader, body = kind.reader(), {**body, "max_tokens": max(1, goal)}
        done = 0
        try:
            for event, arrival_s in client.stream("/chat/completions", body):
                for step in reader.feed(event, arrival_s):
                    done += 1
                    yield from self._plain_tokens(step)
                if self._cancelled.is_set():
                    return
            for step in reader.finish().steps[done:]:
                yield from self._plain_tokens(step)
        except RemoteError as error:
            if not self._cancelled.is_set():
                raise RemoteError(error.kind, client.without_secrets(str(error))) from error
        finally:
            client.close()

    def _plain_tokens(self, step: StepTrace) -> Iterator[PlainToken]:
        for token in step.emitted:
            for index in range(token.num_tokens):
                share_ms = step.verify_ms / sum(each.num_tokens for each in step.emitted) if self._plain else 0.0
                end_ms = (self._plain[-1].t_ms if self._plain else 0.0) + share_ms
                self._plain.append(PlainToken(token.id, token.text if index == 0 else "", end_ms, share_ms))
                yield self._plain[-1]

    def trace(self) -> Trace:
        trace = Trace(self.meta | {"reason": self.reason}, tuple(self._steps), tuple(self._plain))
        return replace(trace, stats=metrics.summarize(trace).to_dict(), compare=metrics.compare(trace))


class RemoteService:
    """See `service.Service`. Asks the server for its models as soon as it is made, in a thread.

    Nothing is ever guessed in place of a baseline: options.remote_baseline names a second server, `--remote-draft` lets a server with a
    switch for each request give both; without either there is none. api_key: "" takes the environment's. transport: for tests.
    """

    def __init__(self, options: Options, transport: httpx.BaseTransport | None = None, api_key: str = "") -> None:
        self._options, self._transport = options, transport
        self._endpoint = Endpoint(options.remote or "", options.remote_model, api_key, headers=options.remote_headers,
                                  ca_file=str(options.remote_ca or ""), read_s=options.remote_timeout)
        self._baseline = replace(self._endpoint, url=options.remote_baseline, model="") if options.remote_baseline else None
        self._lock = threading.Lock()
        self._status = Status("loading", f"Asking {self._endpoint.root} what it serves", is_loading=True)
        self._kind: EngineKind | None = None
        self._models: list[dict[str, Any]] = []
        self._model, self._baseline_model = "", ""
        self._baseline_kind: EngineKind | None = None
        self._number = 0
        threading.Thread(target=self._attach, args=(options.remote_model,), name="specviz-attach", daemon=True).start()

    # ---- attaching ----------------------------------------------------------------------------------------------------
    def _attach(self, model: str) -> None:
        try:
            models, kind, chosen = self._asked(self._endpoint, model, self._options.remote_kind)
            base = self._asked(self._baseline, "", "auto") if self._baseline else None
        except SpecvizError as error:
            with self._lock:
                state = "ready" if self._model else "failed"
                self._status = Status(state, str(error), last_error=str(error), number=self._number)
            return
        with self._lock:
            self._models, self._kind, self._model = models, kind, chosen
            if base:
                _, self._baseline_kind, self._baseline_model = base
            self._number += 1
            self._status = Status("ready", "Ready.", 1.0, number=self._number)

    def _asked(self, endpoint: Endpoint, model: str, kind: str) -> tuple[list[dict[str, Any]], EngineKind, str]:
        client = Client(endpoint, self._transport)
        try:
            models = client.models()
            found = ENGINES[kind] if kind in ENGINES else detect(client, models)
        finally:
            client.close()
        names = [entry["id"] for entry in models]
        if not model and not names:
            raise RemoteError("no-model", f"{endpoint.root} serves no model at present. Load one there, or name it with --remote-model.")
        if model and names and model not in names:
            raise RemoteError("no-model", f"{endpoint.root} does not list a model {model!r}; it has {', '.join(names[:8])}.")
        return models, found, model or names[0]

    # ---- what anyone may ask ------------------------------------------------------------------------------------------
    def status(self) -> Status:
        with self._lock:
            return self._status

    def config(self) -> dict[str, Any]:
        with self._lock:
            if self._kind is None:
                return {}
            entry = next((each for each in self._models if each["id"] == self._model), {})
            context = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
            return {"target": self._model, "drafter": None, "device": urlsplit(self._endpoint.url).netloc, "engine": self._kind.label,
                    "exactness": "", "evidence": self._kind.evidence, **({"context": context} if isinstance(context, int) else {})}

    def _has_baseline(self, kind: EngineKind) -> bool:
        return self._baseline_kind is not None or bool(kind.switch and self._options.remote_draft)

    def methods(self) -> list[MethodInfo]:
        kind = self._kind
        return [MethodInfo(METHOD, f"As {kind.label} drafts", "The server drafts and verifies as it was started; this screen only reads its "
                           "stream. Draft length, options and verification are decided there, so they are not offered here.", fixed=True,
                           comparable=self._has_baseline(kind),
                           note="" if kind.evidence == "run" else "read from its documentation, not yet tried on a live server")
                ] if kind else []

    def default_method(self) -> str:
        return METHOD if self._kind else ""

    def count_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return 0                                      # the tokenizer is the server's

    def submit(self, request: ChatRequest) -> RemoteRun:
        with self._lock:
            status, kind, model = self._status, self._kind, self._model
        if kind is None:
            raise Busy(f"No server is attached: {status.message}")
        if request.prompt is not None:
            raise InputError("A raw prompt cannot be passed on to an attached server; send messages.")
        body = self._body(kind, model, request)
        client = Client(self._endpoint, self._transport)
        draft = self._options.remote_draft
        baseline = None
        if self._baseline and self._baseline_kind:
            other = self._body(self._baseline_kind, self._baseline_model, request)
            baseline = (Client(self._baseline, self._transport), self._baseline_kind, other)
        elif kind.switch and draft:
            baseline = (Client(self._endpoint, self._transport), kind, dict(body))
        if kind.switch and draft:
            body[kind.switch] = draft
        return RemoteRun(client, kind, body, self._meta(kind, model, request, baseline is not None), baseline)

    def _body(self, kind: EngineKind, model: str, request: ChatRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {"model": model, "messages": [{"role": m["role"], "content": m["content"]} for m in under(self._options.system_prompt, request.messages)],
                                "stream": True, "temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens,
                                "seed": sampling.seed, **kind.extra}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.top_p < 1 and not sampling.greedy:
            body["top_p"] = sampling.top_p
        neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        for name, off in neutral.items():
            value = getattr(sampling, name)
            if value == off or name != "repetition_penalty" and sampling.greedy:
                continue
            field = next((known for known in kind.samplers if REPEAT_NAMES.get(known, known) == name), None)
            if field is None:
                raise InputError(f"{kind.label} takes no {name}; set it to {off:g} (off) for this server.")
            body[field] = value
        return body

    def _meta(self, kind: EngineKind, model: str, request: ChatRequest, has_baseline: bool) -> dict[str, Any]:
        sampling, place = request.sampling, urlsplit(self._endpoint.url).netloc
        return {
            "target": model, "drafter": None, "method": METHOD, "method_label": kind.label,
            "config": {"device": place, "engine": kind.label, "method": METHOD},
            "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
                         "repetition_penalty": sampling.repetition_penalty, "seed": sampling.seed,
                         "max_new_tokens": sampling.max_new_tokens, "stop": list(sampling.stop)},
            "prompt": [dict(message) for message in request.messages], "clock": "client",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"specviz": __version__, "python": platform.python_version()},
            "remote": {"engine": kind.name, "label": kind.label, "address": place, "evidence": kind.evidence, "unknown": kind.unknown,
                       "baseline": "measured" if has_baseline else "none"},
        }

    # ---- models ---------------------------------------------------------------------------------------------------------
    def forget(self, conversation: str) -> None:
        pass                                          # the server keeps what it keeps

    def choice(self) -> Choice | None:
        return Choice(self._model) if self._model else None

    def offers(self) -> list[Offer]:
        return [Offer(entry["id"], entry["id"], f"Served at {urlsplit(self._endpoint.url).netloc}.", "", int(entry.get("max_model_len") or 0), 0,
                      0, None, "") for entry in self._models]

    def advice(self) -> list[Line]:
        return []

    def suggestion(self) -> Offer | None:
        return None

    def inspect(self, choice: Choice) -> Inspection:
        known = any(entry["id"] == choice.target for entry in self._models)
        return Inspection((Line("good" if known else "bad", f"{choice.target} is {'' if known else 'not '}in the server's list."),))

    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        with self._lock:
            if self._status.is_loading:
                raise Busy("The server is being asked already.")
            self._status = replace(self._status, is_loading=True, message=f"Asking {self._endpoint.root} for {choice.target}", last_error="")
        threading.Thread(target=self._attach, args=(choice.target,), name="specviz-attach", daemon=True).start()

    def cancel_load(self) -> None:
        pass                                          # a question of a second; its answer decides

    def unload(self) -> None:
        raise InputError("The model runs on another server; unload it there.")

    can_attach = False                                # the page draws no panel for it

    def attach(self, url: str, **how: Any) -> None:
        raise InputError("This program was started with --remote. Start it without, or with another address, to attach elsewhere.")

    def detach(self) -> None:
        raise InputError("This program was started with --remote, so it has no engine of its own. Start it without to use this machine's.")

    def close(self) -> None:
        pass
