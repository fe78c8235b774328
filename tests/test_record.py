"""The list of recordings, and one run of it: what the list says reaches the engine and stands in the trace."""
from __future__ import annotations

import pytest
from test_service import ready
from tiny import save_tiny

from specviz import opening
from specviz.cost import CostTable
from specviz.errors import InputError
from specviz.record import ASSETS, Recording, main, read_list, record
from specviz.trace import dumps, load, loads

LIST = """
[[recording]]
file = "x"
title = "A tree"
method = "draft_tree"
prompt = " Guess, check, keep what was right. Guess, "
k = 6
max_new_tokens = 12
options = {width = 1, depth = 3}
"""


def test_a_recording_is_made_as_listed(tmp_path):
    """Method, K and the method's options; trees whole, with parents and scores, and a plain run over the whole answer."""
    (tmp_path / "list.toml").write_text(LIST)
    [listed] = read_list(tmp_path / "list.toml")
    assert (listed.prompt, listed.options) == ("Guess, check, keep what was right. Guess,", (("width", 1), ("depth", 3)))
    service = ready()
    try:
        trace = loads(dumps(record(service, listed)))
        config = trace.meta["config"]
        assert (trace.meta["title"], config["k"], config["options"]) == ("A tree", 6, {"width": 1, "depth": 3, "siblings": "drawn"})
        assert config["changed_options"] == ["width", "depth"] and trace.compare["identical"] and len(trace.plain) == trace.stats["num_tokens"]
        nodes = [node for step in trace.steps for node in step.nodes]
        assert nodes and all(node.score is not None and node.state in ("accepted", "rejected", "unjudged") for node in nodes)
        assert all(node.parent == i - 1 for step in trace.steps for i, node in enumerate(step.nodes))
        with pytest.raises(InputError, match="depth is 0"):
            record(service, Recording("x", "t", "draft_tree", "Guess", options=(("depth", 0),)))
    finally:
        service.close()


def test_the_bundled_list_can_be_read(tmp_path):
    """Every entry is a recording; a list that is none is refused with the fields that there are."""
    assert len({(each.folder, each.file) for each in read_list(ASSETS / "recordings.toml")}) == len(read_list(ASSETS / "recordings.toml")) > 3
    (tmp_path / "list.toml").write_text('[[recording]]\nfile = "x"\nwindow = 3\nprompt = "y"')
    with pytest.raises(InputError, match="list.toml is no list of recordings.*options"):
        read_list(tmp_path / "list.toml")


def test_the_command_waits_for_the_measured_costs(tmp_path, monkeypatch):
    """The trace carries the table of what a step costs here, which a machine that has none measures first."""
    folder = save_tiny(tmp_path / "small")
    monkeypatch.setattr(opening, "default_cache_dir", lambda: tmp_path / "cache")
    (tmp_path / "list.toml").write_text(LIST.replace("draft_tree", "prompt_lookup").replace("options = {width = 1, depth = 3}", ""))
    assert main(["--list", str(tmp_path / "list.toml"), "--out", str(tmp_path), "--target", str(folder), "--quantization", "none"]) == 0
    trace = load(tmp_path / "traces" / "x.json")
    assert trace.meta["target"] == "small" and CostTable.from_json(trace.meta["cost"]).num_tokens[-1] == 64
