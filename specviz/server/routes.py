"""The HTTP routes: models, chat and plain completions, health and counters. It knows nothing of the engine behind the service.

A dropped connection cancels its answer within a step. Errors have OpenAI's shape.
"""
from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ..errors import Busy, InputError, NotEnoughMemory, PromptTooLong, SpecvizError, TooManyRequests
from ..limits import Limits, Turnstile
from ..service import Run
from ..trace import StepTrace
from .answers import Answer
from .counted import Counted
from .requests import ApiRequest, BadRequest, parsed

__all__ = ["add_routes"]

MAX_BODY_BYTES = 4_000_000


def add_routes(app: FastAPI, service: Counted, *, key: str = "", limits: Limits = Limits()) -> None:
    """Put the routes on an app. key: what clients must send as a bearer, "" for nothing; it guards everything but /health. limits: what one
    client may take; a client is an address."""
    app.include_router(Api(service, key, limits).router)


class Api:
    """One service's routes."""

    def __init__(self, service: Counted, key: str, limits: Limits) -> None:
        self._service, self._key, self._limits = service, key, limits
        self._turnstile, self._num_open = Turnstile(limits.per_minute, by_address=True), 0
        self.router = APIRouter()
        self.router.add_api_route("/health", self._health, methods=["GET"], include_in_schema=False)
        for path, handler, method in (("/v1/models", self._models, "GET"), ("/v1/models/{name:path}", self._model, "GET"),
                                      ("/metrics", self._metrics, "GET"), ("/v1/chat/completions", self._chat, "POST"),
                                      ("/v1/completions", self._completion, "POST")):
            self.router.add_api_route(path, self._guarded(handler), methods=[method], include_in_schema=False)

    def _guarded(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Request) -> Response:
            sent = request.headers.get("authorization", "")
            if self._key and not hmac.compare_digest(sent.encode(), f"Bearer {self._key}".encode()):
                return _error(401, "Incorrect API key provided.", "invalid_request_error", code="invalid_api_key")
            try:
                return await handler(request)
            except Exception as error:
                return _explained(error)
        return answer

    async def _health(self) -> Response:
        status = self._service.status()
        return JSONResponse({"status": status.state, "message": status.message}, 200 if status.state == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._service.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model_entry(self) -> dict[str, Any] | None:
        config = self._service.config()
        return {"id": config["target"], "object": "model", "created": 0, "owned_by": "specviz",
                **({"max_model_len": config["context"]} if config.get("context") else {})} if config else None

    async def _models(self, request: Request) -> Response:
        entry = self._model_entry()
        return JSONResponse({"object": "list", "data": [entry] if entry else []})

    async def _model(self, request: Request) -> Response:
        entry, name = self._model_entry(), request.path_params["name"]
        if not entry or entry["id"] != name:
            return _error(404, f"The model `{name}` does not exist.", "invalid_request_error", code="model_not_found")
        return JSONResponse(entry)

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, chat=True)

    async def _completion(self, request: Request) -> Response:
        return await self._answered(request, chat=False)

    async def _answered(self, request: Request, *, chat: bool) -> Response:
        client = request.client.host if request.client else ""
        self._turnstile.enter(client)
        asked = parsed(await _json(request), chat=chat, methods=tuple(m.name for m in self._service.methods() if m.available),
                       default_method=self._service.default_method(), most_tokens=self._limits.new_tokens, client=client) \
            if self._service.methods() else None
        if asked is None:
            raise Busy(self._service.status().message)
        entry = self._model_entry()
        if entry and asked.model != entry["id"]:
            return _error(404, f"The model `{asked.model}` does not exist; this server has `{entry['id']}`.", "invalid_request_error",
                          param="model", code="model_not_found")
        if self._num_open >= self._limits.most_open:
            raise self._limits.queue_full()
        run = await asyncio.to_thread(self._service.submit, asked.request)
        if asked.stream:
            return StreamingResponse(self._events(asked, run), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        return await self._whole(request, asked, run)

    async def _events(self, asked: ApiRequest, run: Run) -> AsyncIterator[str]:
        answer = Answer(asked)
        try:
            if opening := answer.opening(run.meta.get("prompt_tokens") or 0):
                yield _event(opening)
            async with aclosing(self._steps(asked, run)) as steps:
                async for step in steps:
                    if chunk := answer.chunk(step, run.text):
                        yield _event(chunk)
            for chunk in answer.closing(run.trace(), run.text, run.reason or "cancelled"):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except Exception as error:                    # the status line is out: the error has to travel in the stream
            yield _event(_body(error))

    async def _whole(self, request: Request, asked: ApiRequest, run: Run) -> Response:
        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            run.cancel()                              # also while it waits for its turn
        watching = asyncio.create_task(watch())
        try:
            async with aclosing(self._steps(asked, run)) as steps:
                async for _ in steps:
                    pass
        finally:
            watching.cancel()
        return JSONResponse(Answer(asked).whole(run.trace(), run.text, run.reason or "cancelled", run.meta.get("prompt_tokens") or 0))

    async def _steps(self, asked: ApiRequest, run: Run) -> AsyncIterator[StepTrace]:
        """The run's steps without blocking the server: a thread of its own reads them, so that it also sees the end of a cancelled run."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

        def read() -> None:
            ending: Exception | None = None
            try:
                for step in run:
                    loop.call_soon_threadsafe(arrived.put_nowait, step)
            except Exception as error:
                ending = error
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, _End(ending))
            except RuntimeError:
                pass                                  # the server has closed meanwhile
        threading.Thread(target=read, name="specviz-answer", daemon=True).start()
        self._num_open += 1
        try:
            while not isinstance(step := await arrived.get(), _End):
                yield step
            if step.error:
                raise step.error
        finally:
            self._num_open -= 1
            if not run.reason:
                run.cancel()
            if not asked.comes_back:
                self._service.forget(asked.request.conversation)


@dataclass(frozen=True, slots=True)
class _End:
    """Behind the last step; error: what ended the run, if anything did."""
    error: Exception | None


async def _json(request: Request) -> Any:
    body = await request.body()
    if len(body) > MAX_BODY_BYTES:
        raise BadRequest(f"The body has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are read.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {str(error)[:100]}.") from error


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


STATUS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"), (InputError, 400, "invalid_request_error", None),
    (TooManyRequests, 429, "requests", None), (Busy, 503, "server_error", "busy"),
    (NotEnoughMemory, 503, "server_error", "not_enough_memory"), (SpecvizError, 500, "server_error", None))


def _body(error: Exception) -> dict[str, Any]:
    for kind, status, name, code in STATUS:
        if isinstance(error, kind):
            return {"error": {"message": str(error), "type": name, "param": getattr(error, "param", None),
                              "code": getattr(error, "code", code), "status": status}}
    return {"error": {"message": f"Internal error ({type(error).__name__}).", "type": "server_error", "param": None, "code": None,
                      "status": 500}}


def _explained(error: Exception) -> JSONResponse:
    body = _body(error)
    status = body["error"].pop("status")
    return JSONResponse(body, status, headers={"Retry-After": str(getattr(error, "retry_s", 2))} if status in (429, 503) else None)


def _error(status: int, message: str, kind: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)
