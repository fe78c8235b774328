"""Start specviz: read the arguments, load the model in the background, build the page and serve it.

It knows nothing of decoding and nothing of how the page looks.
"""
from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specviz.environment import ENVIRONMENT, settle
from specviz.errors import Busy, InputError, SpecvizError
from specviz.options import Options, parse

if TYPE_CHECKING:
    from specviz.service import ChatRequest, Choice, Inspection, Line, MethodInfo, Offer, Run, Service

@dataclass(frozen=True, slots=True)
class Progress:
    """The fields of `service.Status`, which cannot be imported without waiting for torch."""
    state: str
    message: str
    fraction: float | None = None
    is_loading: bool = True
    last_error: str = ""
    number: int = 0


class LateService:
    """A Service whose model is still being opened by another thread. Until it is there, `status` tells how far it is.

    open_service: makes the real service; it may return at once or when all is loaded. What it raises becomes the status "failed".
    """

    def __init__(self, open_service: Callable[[], Service]) -> None:
        self._open = open_service
        self._service: Service | None = None
        self._progress = Progress("loading", "Starting the engine …")
        self._thread = threading.Thread(target=self._work, name="specviz-start", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._service = self._open()
        except SpecvizError as error:
            self._progress = Progress("failed", str(error), is_loading=False)
        except Exception as error:              # shown on the page: a page that says "loading" for ever helps nobody
            self._progress = Progress("failed", f"The model could not be loaded ({type(error).__name__}: {error}).",
                                      is_loading=False)

    def status(self) -> Any:
        return self._service.status() if self._service else self._progress

    def config(self) -> dict[str, Any]:
        return self._service.config() if self._service else {}

    def methods(self) -> list[MethodInfo]:
        return self._service.methods() if self._service else []

    def default_method(self) -> str:
        return self._service.default_method() if self._service else ""

    def count_tokens(self, messages: Any) -> int:
        return self._service.count_tokens(messages) if self._service else 0

    def submit(self, request: ChatRequest) -> Run:
        if self._service is None:
            raise Busy(f"{self._progress.message} Nothing can be answered yet.")
        return self._service.submit(request)

    def forget(self, conversation: str) -> None:
        if self._service is not None:
            self._service.forget(conversation)

    def choice(self) -> Choice | None:
        return self._service.choice() if self._service else None

    def offers(self) -> list[Offer]:
        return self._service.offers() if self._service else []

    def advice(self) -> list[Line]:
        return self._service.advice() if self._service else []

    def suggestion(self) -> Offer | None:
        return self._service.suggestion() if self._service else None

    def inspect(self, choice: Choice) -> Inspection:
        return self._there().inspect(choice)

    def load(self, choice: Choice, *, unload_first: bool = False) -> None:
        self._there().load(choice, unload_first=unload_first)

    def cancel_load(self) -> None:
        if self._service is not None:
            self._service.cancel_load()

    def unload(self) -> None:
        if self._service is not None:
            self._service.unload()

    def attach(self, url: str, **how: str) -> None:
        self._there().attach(url, **how)

    def detach(self) -> None:
        self._there().detach()

    def _there(self) -> Service:
        if self._service is None:
            raise Busy(f"{self._progress.message} No model can be chosen yet.")
        return self._service

    def close(self) -> None:
        if self._service is not None:
            self._service.close()


class Stop:
    """Ctrl-C, asked and waited for in the main thread. An Event would not do: `set` in a handler waits for ever for the lock that the
    interrupted `wait` holds, while `SimpleQueue.put` may be called in the midst of `get`."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._again = False

    def ask(self, number: int, _frame: Any = None) -> None:
        """The signal handler; asked a second time it ends the process at once, whatever is still being closed."""
        if self._again:
            os._exit(128 + number)
        self._again = True
        self._asked.put(number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was asked for, at the latest after timeout_s."""
        try:
            self._asked.put(self._asked.get(timeout=timeout_s))           # back again, for the next one who waits
        except queue.Empty:
            return False
        return True


def free_port(host: str, port: int, tries: int = 100) -> int:
    """The first free port from `port` on; 0 asks the system for any. Raises InputError if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port == 0 else range(port, min(port + tries, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except PermissionError as error:
                raise InputError(f"Port {candidate} on {host} may not be used: {error.strerror}. Choose a --port above 1023.") from error
            except socket.gaierror as error:
                raise InputError(f"--host is {host!r}, which is no address of this machine. Use 127.0.0.1 or 0.0.0.0.") from error
            except OSError:
                continue
            return probe.getsockname()[1]
    raise InputError(f"No free port from {port} on at {host}. Give another --port.")


def main(argv: list[str] | None = None, open_service: Callable[[Options], Service] | None = None) -> int:
    """Run until Ctrl-C. open_service: what makes the service, for tests; by default the real one. Returns the process's exit code."""
    try:
        options = parse(argv)
        port = 0 if options.prepare else free_port(options.host, options.port)
    except SpecvizError as error:
        print(f"specviz: {error}", file=sys.stderr)
        return 2
    if options.prepare:
        return _prepare(options)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"

    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.ask)
    print("specviz: starting …", flush=True)
    from specviz.server.counted import Counted       # no torch here
    service = LateService(lambda: (open_service or _open)(options))
    try:
        end = (_serve_api if options.api_only else _serve_page)(Counted(service), options, port)
    except Exception as error:                       # a relay that cannot be reached, a port taken a moment ago, a full disk
        print(f"specviz: the page could not be started ({type(error).__name__}: {error}).", file=sys.stderr)
        service.close()
        return 1
    _report(service, stop)
    while not stop.wait(0.5):        # a wait without an end cannot be interrupted on Windows
        pass
    print("\nspecviz: closing …", flush=True)
    service.close()
    end()
    return 0


def _serve_page(service: Any, options: Options, port: int) -> Callable[[], None]:
    """The page, and the API beside it; returns what ends them."""
    from specviz.server.serving import attach, not_offered
    from specviz.ui.join import Join
    from specviz.ui.layout import build, launch      # Gradio takes a second or two: after the arguments are known to be good
    from specviz.ui.recordings import opening        # no torch here
    from specviz.ui.strings import not_kept

    recording = opening(options.trace)
    if recording.problem:
        print(f"specviz: {recording.problem}", file=sys.stderr)
    join = Join(options, port)
    page = build(service, recording, method=options.method, k=options.k, options=options.method_options, read_only=options.public,
                 reach=options.reach, not_kept=not_kept(options.public, options.history), limits=options.limits, join=join if join.is_offered else None)
    address, public = launch(page, options, port)
    join.public = public
    if port != options.port and options.port:
        print(f"specviz: port {options.port} is busy, using {port}.")
    if reason := not_offered(options):
        print(f"specviz: {reason}.")
    else:
        attach(page.app, service, options)
        print(f"specviz: OpenAI-compatible API at {address.rstrip('/')}/v1")
    print(f"specviz: open {address} in a browser. Ctrl-C ends the program.", flush=True)
    if public:
        print(f"specviz: public address {public}", flush=True)
    for line in join.lines(drawn=sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()):
        print(f"specviz: {line}" if line.startswith("join") else line, flush=True)
    return lambda: page.close(verbose=False)


def _serve_api(service: Any, options: Options, port: int) -> Callable[[], None]:
    from specviz.server.serving import serve_alone
    end = serve_alone(service, options, port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"specviz: OpenAI-compatible API at http://{host}:{port}/v1. Ctrl-C ends the program.", flush=True)
    return end


def _prepare(options: Options) -> int:
    from specviz.prepare import prepare
    try:
        prepare(options, lambda line: print(f"specviz: {line}", flush=True))
    except SpecvizError as error:
        print(f"specviz: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nspecviz: interrupted; what has arrived is kept.", file=sys.stderr)
        return 1
    return 0


def _open(options: Options) -> Service:
    from specviz.service import open_service
    return open_service(options)


def _report(service: LateService, stop: Stop) -> None:
    """Print how loading goes, one line per change, until it ends."""
    shown, shown_at = "", 0.0
    while not stop.wait(0.2):
        status = service.status()
        percent = "" if status.fraction is None or not status.is_loading else f" {100 * status.fraction:.0f} %"
        line, now = f"specviz: {status.message}{percent}", time.monotonic()
        settled = status.state != "loading"
        if line != shown and (settled or now - shown_at > 2 or status.message not in shown):
            print(line, file=sys.stderr if status.state == "failed" else sys.stdout, flush=True)
            shown, shown_at = line, now
        if settled:
            for note in service.config().get("notes", ()):
                print(f"specviz: {note}", flush=True)
            return


if __name__ == "__main__":
    settle()
    code = main()
    sys.stdout.flush()
    os._exit(code)          # weights may still be loading in a thread that cannot be interrupted
