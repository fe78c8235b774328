"""Switching between pairs on the real service with tiny checkpoints on disk, most of it while an answer is being written."""
from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from tiny import save_tiny, swap_tokens, tiny_tokenizer

from specviz import loading, opening
from specviz.engine.sampling import SamplingParams
from specviz.errors import Busy, LoadError, SpecvizError
from specviz.local_service import LocalService
from specviz.opening import Opened, open_engine
from specviz.options import Options
from specviz.remembered import Remembered
from specviz.service import ChatRequest, Choice

PATIENCE_S = 120                 # for what must happen; nothing is judged by how long it takes
PROMPT = "Guess, check, keep what was right. Guess, check, keep what was right. Guess, check"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Folders: two targets, a draft model, one with cut weights, one with another tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, settings in {"first": {}, "second": {"family": "qwen3", "seed": 5}, "draft": {"seed": 1, "num_hidden_layers": 2},
                           "cut": {}, "stranger": {"seed": 2}}.items():
        save_tiny(folder / name, **settings)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    swap_tokens(folder / "stranger")
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What the libraries made at import is left out of the many collections here: they take half a second each otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def choice(shelf, target: str, draft: str | None = None, **settings) -> Choice:
    return Choice(str(shelf / target), str(shelf / draft) if draft else None, **{"device": "cpu", "quantization": "none", **settings})


def wait(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def settled(service) -> None:
    wait(lambda: not service.status().is_loading)


def endless(options, progress) -> Opened:
    """The real opener, but no token ends an answer (random weights would choose one soon), and no forward is spent on measuring costs."""
    opened = open_engine(options, progress)
    opened.eos_ids, opened.trial = frozenset(), None
    return opened


@pytest.fixture
def start(shelf):
    """Makes services on the checkpoint "first"; all are closed at the end."""
    made = []

    def make(opener=endless, remembered=None, **changes) -> LocalService:
        options = Options(**{"target": str(shelf / "first"), "device": "cpu", "quantization": "none", "threads": 1, "browser": False, **changes})
        made.append(LocalService(options, opener, remembered))
        settled(made[-1])
        return made[-1]
    yield make
    for service in made:
        service.close()
    gc.collect()


def ask(method: str = "plain", **sampling) -> ChatRequest:
    return ChatRequest(({"role": "user", "content": PROMPT},), SamplingParams(**{"max_new_tokens": 60, **sampling}), method, 4)


def tokens(steps) -> list[int]:
    return [token.id for step in steps for token in step.emitted]


class Chat:
    """An answer that is certainly still being written: the engine's forwards wait until they are allowed, `finish` allows all."""

    def __init__(self, service, monkeypatch, method: str = "prompt_lookup", num_tokens: int = 60) -> None:
        self.expected = tokens(service.submit(ask(method, max_new_tokens=num_tokens)))
        assert len(self.expected) == num_tokens
        self._free, self._allowed = threading.Event(), threading.Semaphore(0)
        target = service._opened.parts.target
        forward = target.forward

        def slow(*args, **kwargs):
            while not self._free.is_set() and not self._allowed.acquire(timeout=0.01):
                pass
            return forward(*args, **kwargs)
        monkeypatch.setattr(target, "forward", slow)
        self.run = service.submit(ask(method, max_new_tokens=num_tokens))
        self._iterator, self.steps = iter(self.run), []
        self.go_on()

    def go_on(self, count: int = 2) -> None:
        """A few more steps: the engine answers while something else is going on."""
        for _ in range(count):
            self._allowed.release()
            self.steps.append(next(self._iterator))

    def finish(self) -> list[int]:
        assert not self.run.reason, "the answer was to be unfinished so far"
        self._free.set()
        self.steps += self._iterator
        return tokens(self.steps)


# ---- success ----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["float32", "bfloat16", "int8"])
def test_a_switch_in_the_middle_of_an_answer(start, shelf, monkeypatch, settings):
    """The running answer is finished by the old pair, token for token as without a switch; new questions go to the new pair."""
    service = start()
    chat = Chat(service, monkeypatch)
    before = service.config()
    service.load(choice(shelf, "second", "draft", **settings))
    chat.go_on(3)
    settled(service)
    assert service.status().state == "ready" and service.status().number == 2 and not service.status().last_error
    assert service.config()["target"] == "second" and service.config()["drafter"] == "draft" and before["target"] == "first"
    assert {info.name for info in service.methods() if info.available} >= {"draft_model", "prompt_lookup"}
    assert service.choice() == choice(shelf, "second", "draft", **settings)
    run = service.submit(ask("draft_model"))
    assert list(run) and run.meta["target"] == "second"
    assert chat.finish() == chat.expected and chat.run.reason == "length"
    assert chat.run.meta["target"] == "first"


def test_requests_are_answered_while_loading(start, shelf):
    """Between the beginning of a load and its end the old pair is the pair in use: its methods, its answers, its configuration."""
    gate, number = threading.Event(), []

    def opener(options, progress):
        number.append(1)
        if len(number) > 1:
            progress("Reading the second", 0.25)
            assert gate.wait(PATIENCE_S)
        return endless(options, progress)
    service = start(opener)
    expected = tokens(service.submit(ask()))
    service.load(choice(shelf, "second"))
    wait(lambda: service.status().fraction == 0.25)
    status = service.status()
    assert (status.state, status.message, status.is_loading, status.number) == ("ready", "Reading the second", True, 1)
    run = service.submit(ask())
    assert tokens(run) == expected and run.meta["target"] == "first" and service.config()["target"] == "first"
    with pytest.raises(Busy, match="second is being loaded already"):
        service.load(choice(shelf, "first"))
    gate.set()
    settled(service)
    assert service.config()["target"] == "second" and tokens(service.submit(ask())) != expected


def test_the_old_pair_is_freed(start, shelf, monkeypatch):
    """Once its answers have ended nothing holds the old pair, though the answer itself is still there with its text and trace."""
    service = start(draft=str(shelf / "draft"))
    chat = Chat(service, monkeypatch, "draft_model")
    parts = service._opened.parts
    gone = [weakref.ref(part) for part in (parts.target, parts.draft, parts.cache, service._opened.engine)]
    del parts
    service.load(choice(shelf, "second"))
    settled(service)
    assert all(ref() is not None for ref in gone)
    assert chat.finish() == chat.expected
    monkeypatch.undo()

    def all_gone() -> bool:
        gc.collect()
        return not any(ref() for ref in gone)
    wait(all_gone)
    assert chat.run.text and len(chat.run.trace().steps) == len(chat.steps)
    assert list(chat.run.measure_plain()) == []             # there is nothing left to measure on
    chat.run.cancel()


def test_a_measurement_ends_when_its_pair_goes(start, shelf):
    """Plain decoding that is being measured does not keep the old pair in memory; what was measured stays."""
    service = start()
    run = service.submit(ask(max_new_tokens=400))
    list(run)
    gone = weakref.ref(service._opened.parts.target)
    measured = run.measure_plain(400)
    next(measured)
    service.load(choice(shelf, "second"))
    settled(service)
    assert len(list(measured)) <= 399 and run.trace().plain

    def is_gone() -> bool:
        gc.collect()
        return gone() is None
    wait(is_gone)


def test_threads_are_chosen_again_when_the_old_pair_has_gone(start, shelf, monkeypatch):
    """The number of threads was measured beside a busy engine, so it is measured once more in peace, by the thread that decodes."""
    service, seen = start(), []
    chat = Chat(service, monkeypatch)
    monkeypatch.setattr(opening, "_choose_threads", lambda target, asked: seen.append(threading.current_thread()) or 1)
    service.load(choice(shelf, "second"))
    settled(service)
    assert len(seen) == 1
    chat.finish()
    wait(lambda: len(seen) == 2)
    assert seen[0] is seen[1] and list(service.submit(ask()))


# ---- failure ----------------------------------------------------------------------------------------------------------------------------

def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


BROKEN = {
    "cut": (("cut",), "damaged or cut short"),
    "stranger": (("second", "stranger"), "token 40"),
    "nowhere": (("nowhere",), "nowhere"),
    "memory": (("second",), "memory"),
    "numbers": (("second",), "1.0 MB are free"),
    "unforeseen": (("second",), "ZeroDivisionError"),
}


@pytest.mark.parametrize("trouble", BROKEN)
def test_a_failing_load_changes_nothing(start, shelf, monkeypatch, trouble, capfd):
    """A broken checkpoint, a foreign tokenizer, too little memory: one sentence; the running answer and the next one are as before."""
    service = start()
    chat = Chat(service, monkeypatch)
    before = (service.config(), service.methods(), service.default_method(), service.choice())
    if trouble == "memory":
        monkeypatch.setattr(opening, "_warm_up", no_memory)
    if trouble == "numbers":
        monkeypatch.setattr(loading, "available", lambda device: 1_000_000)
    if trouble == "unforeseen":
        monkeypatch.setattr(opening, "_warm_up", lambda target: 1 / 0)
    names, words = BROKEN[trouble]
    service.load(choice(shelf, *names))
    chat.go_on(3)
    settled(service)
    status = service.status()
    assert status.state == "ready" and status.number == 1 and words in status.last_error
    assert before == (service.config(), service.methods(), service.default_method(), service.choice())
    assert chat.finish() == chat.expected
    assert tokens(service.submit(ask("prompt_lookup"))) == chat.expected
    assert ("Traceback" in capfd.readouterr().err) == (trouble == "unforeseen")
    monkeypatch.undo()
    service.load(choice(shelf, "second"))
    settled(service)
    assert service.config()["target"] == "second" and not service.status().last_error


def test_what_a_failed_load_took_is_freed(start, shelf, monkeypatch):
    """A load that fails at its very last step leaves no model behind."""
    service, made = start(), []
    build = opening.language_model
    monkeypatch.setattr(opening, "language_model", lambda *args, **kwargs: (model := build(*args, **kwargs), made.append(weakref.ref(model)))[0])
    monkeypatch.setattr(opening, "_warm_up", no_memory)
    service.load(choice(shelf, "second", "draft"))
    settled(service)
    assert service.status().last_error and len(made) == 2

    def all_gone() -> bool:
        gc.collect()
        return not any(ref() for ref in made)
    wait(all_gone)


def test_a_start_that_fails_can_be_mended_on_the_page(start, shelf):
    """Without a pair the state is "failed" with the sentence; another choice can be loaded and everything works."""
    service = start(target=str(shelf / "cut"))
    assert service.status().state == "failed" and "cut short" in service.status().message
    with pytest.raises(Busy, match="cut short"):
        service.submit(ask())
    service.load(choice(shelf, "first"))
    settled(service)
    assert service.status().state == "ready" and list(service.submit(ask()))


# ---- cancel, unload, make room ----------------------------------------------------------------------------------------------------------

def test_cancelling_a_load(start, shelf, monkeypatch):
    """Cancel takes effect at once for everyone who looks; the pair in use stays; the thread lets go, and then the next load goes on."""
    inside, gate, ends = threading.Event(), threading.Event(), []

    def opener(options, progress):
        if options.target.endswith("second") and not ends:
            inside.set()
            assert gate.wait(PATIENCE_S)
            try:
                progress("Reading", 0.5)
            except BaseException as error:
                ends.append(error)
                raise
        return endless(options, progress)
    service = start(opener)
    chat = Chat(service, monkeypatch)
    service.load(choice(shelf, "second"))
    assert inside.wait(PATIENCE_S)
    service.cancel_load()
    status = service.status()
    assert (status.state, status.is_loading, status.last_error, status.message) == ("ready", False, "", "Ready.")
    service.load(choice(shelf, "second", "draft"))          # waits until the cancelled one has ended
    chat.go_on(2)
    assert service.status().is_loading and not ends
    gate.set()
    settled(service)
    assert len(ends) == 1 and service.config()["drafter"] == "draft" and service.status().number == 2
    assert chat.finish() == chat.expected
    service.cancel_load()                                   # nothing to cancel


def test_unloading(start, shelf, monkeypatch):
    """The running answer ends first; then the memory is free and questions are refused with what to do; loading brings it back."""
    service = start()
    chat = Chat(service, monkeypatch)
    gone = weakref.ref(service._opened.parts.target)
    service.unload()
    assert service.status().state == "unloaded" and service.config() == {} and service.methods() == [] and service.choice() is None
    with pytest.raises(Busy, match="Models"):
        service.submit(ask())
    assert chat.finish() == chat.expected
    monkeypatch.undo()

    def is_gone() -> bool:
        gc.collect()
        return gone() is None
    wait(is_gone)
    service.unload()
    service.load(choice(shelf, "first"))
    settled(service)
    assert list(service.submit(ask()))


@pytest.mark.parametrize("target", ["second", "cut"])
def test_making_room_first(start, shelf, monkeypatch, target):
    """Where both do not fit, the old pair ends its answers and goes first; should the new one fail, the old one comes back."""
    service = start()
    chat = Chat(service, monkeypatch)
    gone = weakref.ref(service._opened.parts.target)
    service.load(choice(shelf, target), unload_first=True)
    wait(lambda: service.status().state == "loading")
    with pytest.raises(Busy, match="loading"):
        service.submit(ask())
    assert gone() is not None
    assert chat.finish() == chat.expected
    monkeypatch.undo()
    settled(service)
    status = service.status()
    gc.collect()
    assert status.state == "ready" and gone() is None
    assert ("cut short" in status.last_error) == (target == "cut")
    assert service.config()["target"] == ("second" if target == "second" else "first")
    assert list(service.submit(ask()))


def test_closing_in_the_middle_of_everything(start, shelf, monkeypatch):
    """Close ends a running answer and a load in progress; no thread of the service stays."""
    before = set(threading.enumerate())
    service = start()
    chat = Chat(service, monkeypatch)
    service.load(choice(shelf, "second"))
    chat._free.set()
    service.close()
    assert list(chat._iterator) is not None and chat.run.reason
    wait(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name == "specviz-engine"])


# ---- what is remembered -----------------------------------------------------------------------------------------------------------------

def test_the_choice_is_remembered(start, shelf, tmp_path):
    """Only what was chosen and worked is written; a start without --target takes it up; --target and a failed start do not change it."""
    remembered = Remembered(tmp_path / "new folder")
    service = start(remembered=remembered)
    assert remembered.read() is None
    service.load(choice(shelf, "cut"))
    settled(service)
    assert remembered.read() is None
    wanted = choice(shelf, "second", "draft")
    service.load(wanted)
    settled(service)
    assert remembered.read() == wanted
    again = start(remembered=remembered, target=None)
    assert again.choice() == wanted and again.config()["target"] == "second"
    assert start(remembered=remembered).config()["target"] == "first"
    assert remembered.read() == wanted


def test_a_remembered_model_that_is_gone(start, shelf, tmp_path):
    """The start falls back to the default and says what happened; nothing is fetched in its place."""
    remembered, opened = Remembered(tmp_path), []
    remembered.write(Choice("owner/never-fetched"))

    def opener(options, progress):
        opened.append(options.target)
        return endless(replace(options, target=str(shelf / "first")), progress)
    service = start(opener, remembered, target=None)
    assert opened == ["default"] and service.status().state == "ready"
    assert "never-fetched" in service.status().last_error


@pytest.mark.parametrize("text", ["{", "[]", '{"target": "x"}', '{"target": 1, "draft": null, "quantization": "", "device": "", "dtype": ""}'])
def test_a_broken_memory_is_no_memory(tmp_path, text):
    (tmp_path / "choice.json").write_text(text)
    assert Remembered(tmp_path).read() is None


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    Remembered(tmp_path / "file").write(Choice())


def test_a_shared_page_remembers_nothing(monkeypatch):
    """What a visitor of a public page would load is nobody's choice for the next start."""
    from specviz import local_service, service
    seen = []
    monkeypatch.setattr(local_service, "LocalService", lambda options, remembered=None: seen.append(remembered))
    service.open_service(Options(share=True, auth=("a", "b")))
    service.open_service(Options())
    assert seen[0] is None and isinstance(seen[1], Remembered)
