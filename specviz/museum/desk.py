"""Takes visitors' experiments, runs them one after the other in a worker process, and tells how far each is.

It knows nothing of what an experiment does, and imports nothing heavy. Requests come from browsers and are not trusted.
"""
from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

__all__ = ["Desk", "RECORDED"]

RECORDED = Path(__file__).resolve().parents[2] / "assets" / "museum.json"
_MAX_WAITING, _MAX_KEPT, _MAX_REQUEST = 8, 64, 1000
_IDLE_S = 120.0                  # then the worker's memory is given back
_PLAIN = (str, int, type(None))


class Desk:
    """`answer` takes one of {"do": "recorded"}, {"do": "start", "request": {...}} and {"do": "look", "job": id} and returns JSON.

    recorded: {"results": {...}} as `python -m specviz.museum` wrote it. start: {"job": id}. look: {"state", "error", "done", "waiting"},
    where waiting is how many come before. An answer {"error": sentence} says why there is no more. Equal requests share one job.
    """

    def __init__(self, recorded: Path = RECORDED, idle_s: float = _IDLE_S) -> None:
        self._recorded, self._idle_s = recorded, idle_s
        self._lock = threading.Condition()
        self._jobs: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._waiting: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def answer(self, message: Any) -> str:
        """See the class."""
        kind = message.get("do") if isinstance(message, dict) else None
        if kind == "recorded":
            return self._results()
        if kind == "start" and isinstance(message.get("request"), dict):
            return json.dumps(self._start(message["request"]))
        if kind == "look" and isinstance(message.get("job"), str):
            return json.dumps(self._look(message["job"]))
        return json.dumps({"error": "Expected a request to start an experiment, to look at one, or for recorded results."})

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._closed = True
            process = self._process
            self._lock.notify_all()
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join(10)

    # ---- what visitors ask --------------------------------------------------------------------------------------------
    def _results(self) -> str:
        try:
            return '{"results":' + self._recorded.read_text(encoding="utf-8") + "}"
        except OSError:
            return json.dumps({"error": "No recorded results are here; `python -m specviz.museum` writes them."})

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        if any(not isinstance(value, _PLAIN) for value in request.values()) or len(json.dumps(request)) > _MAX_REQUEST:
            return {"error": "An experiment is asked for with a few names and whole numbers."}
        key = json.dumps(request, sort_keys=True)
        with self._lock:
            for name, job in self._jobs.items():
                if job["key"] == key and not job["error"]:
                    return {"job": name}
            if len(self._waiting) >= _MAX_WAITING:
                return {"error": f"{_MAX_WAITING} experiments wait already. Try again in a moment."}
            name = uuid.uuid4().hex
            self._jobs[name] = {"key": key, "request": dict(request), "state": None, "error": "", "done": False}
            self._waiting.append(name)
            for old in [each for each, job in self._jobs.items() if job["done"]][:max(0, len(self._jobs) - _MAX_KEPT)]:
                del self._jobs[old]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="specviz-museum", daemon=True)
                self._thread.start()
            self._lock.notify_all()
        return {"job": name}

    def _look(self, name: str) -> dict[str, Any]:
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                return {"error": "This experiment is not known here any more. Start it again."}
            waiting = self._waiting.index(name) if name in self._waiting else 0
            return {"state": job["state"], "error": job["error"], "done": job["done"], "waiting": waiting}

    # ---- the thread that serves the worker ----------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed, self._idle_s)
                if self._closed or not self._waiting:
                    self._let_go()
                    self._thread = None
                    return
                job = self._jobs[self._waiting[0]]
            try:
                self._run(job)
            except (OSError, ValueError) as error:
                job["error"] = f"The experiment's process could not be used ({type(error).__name__}: {error}). Try again."
            with self._lock:
                job["done"] = True
                self._waiting.pop(0)

    def _run(self, job: dict[str, Any]) -> None:
        process = self._worker()
        process.stdin.write(json.dumps(job["request"] | {"id": 0}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            said = json.loads(line)
            if said.get("done"):
                return
            if "state" in said:
                job["state"] = said["state"]
            else:
                job["error"] = said["error"]
        self._let_go()
        job["error"] = "The experiment's process has ended too early. The terminal shows why; try again."

    def _worker(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen([sys.executable, "-m", "specviz.museum.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             text=True, encoding="utf-8", cwd=Path(__file__).resolve().parents[2])
        return self._process

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait()
