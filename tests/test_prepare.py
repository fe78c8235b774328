"""`--prepare`: everything is fetched, nothing is loaded, and a later start needs no network."""
from __future__ import annotations

import pytest
from fake_hub import FakeHub
from tiny import save_tiny

import app
from specviz import hub, prepare
from specviz.errors import InputError, LoadError
from specviz.loading import load_target
from specviz.options import Options, parse


def test_target_and_draft_are_fetched_for_later(tmp_path, monkeypatch):
    """Two hub models are on this machine afterwards, weights included, without a single model having been built."""
    monkeypatch.setattr(hub, "CACHE", tmp_path / "cache")
    server = FakeHub({"owner/large": save_tiny(tmp_path / "large"), "owner/small": save_tiny(tmp_path / "small", num_hidden_layers=1)})
    monkeypatch.setattr(hub, "ENDPOINT", server.url)
    lines: list[str] = []
    prepare.prepare(Options(target="owner/large", draft="owner/small"), lines.append)
    server.close()
    assert lines[-1] == "owner/small is ready for use without a network." and "owner/large is ready for use without a network." in lines
    for name in ("owner/large", "owner/small"):
        assert load_target(name, device="cpu", offline=True).name == name


def test_what_cannot_run_is_not_fetched(tmp_path):
    """A broken local folder and a missing one end the preparation with their sentence."""
    folder = save_tiny(tmp_path / "broken")
    (folder / "tokenizer.json").unlink()
    for target, message in ((str(folder), "has no tokenizer"), ("./nowhere", "no file or folder")):
        with pytest.raises(LoadError, match=message):
            prepare.prepare(Options(target=target), lambda line: None)


def test_the_program_prepares_and_ends(tmp_path, capsys):
    """app.py --prepare returns 0 when all is there and 1 with a sentence when it is not; it opens no port. Not together with --offline."""
    assert app.main(["--prepare", "--target", str(save_tiny(tmp_path / "mine"))]) == 0
    assert "mine is ready for use without a network." in capsys.readouterr().out
    assert app.main(["--prepare", "--target", "./nowhere"]) == 1
    assert "no file or folder ./nowhere" in capsys.readouterr().err
    with pytest.raises(InputError, match="--prepare"):
        parse(["--prepare", "--offline"])
