"""Which addresses the Join button and the terminal name, and when. No network is asked."""
from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from specviz.options import Options
from specviz.ui import join
from specviz.ui.join import Join, own_addresses


def interface(*addresses):
    return [SimpleNamespace(family=socket.AF_INET, address=address) for address in addresses]


def test_own_addresses_are_those_of_the_room(monkeypatch):
    """Loopback, link-local and interfaces that are down are left out; the usual route comes first, virtual networks last."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        "lo": interface("127.0.0.1"), "docker0": interface("172.17.0.1"), "eth0": interface("10.0.0.5"), "wlan0": interface("192.168.1.20"),
        "eth1": interface("169.254.3.3"), "off": interface("192.168.9.9")})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "off") for name in (
        "lo", "docker0", "eth0", "wlan0", "eth1", "off")})
    monkeypatch.setattr(join, "_usual_address", lambda: "192.168.1.20")
    assert own_addresses() == ["192.168.1.20", "10.0.0.5", "172.17.0.1"]
    monkeypatch.setattr(join, "_usual_address", lambda: "")
    assert own_addresses() == ["10.0.0.5", "192.168.1.20", "172.17.0.1"]


@pytest.mark.parametrize("options, public, expected", [
    (Options(), None, []),
    (Options(host="0.0.0.0", force_public=True), None, ["http://192.168.1.20:7860", "http://10.0.0.5:7860"]),
    (Options(host="192.168.1.3", force_public=True), None, ["http://192.168.1.3:7860"]),
    (Options(host="fd00::1", force_public=True), None, ["http://[fd00::1]:7860"]),
    (Options(share=True, auth=("a", "b")), "https://x.gradio.live", ["https://x.gradio.live"]),
    (Options(share=True, host="0.0.0.0", auth=("a", "b")), "https://x.gradio.live",
     ["https://x.gradio.live", "http://192.168.1.20:7860", "http://10.0.0.5:7860"]),
    (Options(host="0.0.0.0", force_public=True, root_path="https://lab.example/specviz"), None, ["https://lab.example/specviz"]),
    (Options(host="0.0.0.0", on_space=True), None, []),
    (Options(host="0.0.0.0", api_only=True, api_key="k"), None, [])])
def test_addresses_follow_the_options(monkeypatch, options, public, expected):
    """What is printed, drawn and shown is how the page is really served; a page for this machine alone offers nothing."""
    monkeypatch.setattr(join, "own_addresses", lambda: ["192.168.1.20", "10.0.0.5"])
    others = Join(options, 7860)
    others.public = public
    assert others.addresses() == expected and others.is_offered is (options.public and not options.api_only and not options.on_space)
    assert others.lines(drawn=False) == [f"join at {address}" for address in expected]
    drawn = others.lines(drawn=True)[len(expected):]
    assert bool(drawn) is bool(expected) and len({len(line) for line in drawn}) <= 1 and all(set(line) <= set(" █▀▄") for line in drawn)


def test_without_a_network_the_dialog_says_so(monkeypatch):
    monkeypatch.setattr(join, "own_addresses", list)
    assert "No address was found" in Join(Options(host="0.0.0.0", force_public=True), 1).markup()
