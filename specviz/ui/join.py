"""How others in the room reach the page: its addresses, each as a QR code, for the projector and for the terminal.

It knows nothing of the rest of the page, and asks nothing of the network: addresses are the machine's own, codes are drawn here.
"""
from __future__ import annotations

import html
import io
import socket
from ipaddress import ip_address

import psutil
import segno

from ..options import LOOPBACK, Options
from . import strings

__all__ = ["Join", "own_addresses"]

EVERY = ("0.0.0.0", "::", "")
INNER = ("docker", "br-", "veth", "virbr", "vmnet", "vbox", "cni", "podman", "lxc", "tailscale", "zt", "utun", "tun", "wg")
MOST = 4
ELSEWHERE = "192.0.2.1"          # reserved for documents, RFC 5737: it only asks the system which way it would go


class Join:
    """What the Join button and the terminal show. public: the address of `--share`, known once the page is served."""

    def __init__(self, options: Options, port: int) -> None:
        self._options, self._port = options, port
        self.public: str | None = None

    @property
    def is_offered(self) -> bool:
        """Whether anybody else can reach the page under an address of this machine; a Space has another one."""
        return self._options.public and not (self._options.api_only or self._options.on_space)

    def addresses(self) -> list[str]:
        """Best first, at most `MOST`; empty where nobody else can reach the page."""
        if not self.is_offered:
            return []
        root, host = self._options.root_path or "", self._options.host
        found = [self.public] if self.public else []
        if "://" in root:                              # a proxy that was told its own name
            return [*found, root]
        if host not in LOOPBACK:
            hosts = own_addresses() if host in EVERY else [host]
            found += [f"http://{f'[{each}]' if ':' in each else each}:{self._port}" for each in hosts]
        return found[:MOST]

    def markup(self) -> str:
        """The dialog: one address at a time, large enough for the last row."""
        addresses = self.addresses()
        if not addresses:
            return f'<dialog class="join"><p class="join-none">{html.escape(strings.JOIN_NONE)}</p>{_CLOSE}</dialog>'
        choices, panels = [], []
        for number, address in enumerate(addresses):
            shown = "" if number == 0 else " hidden"
            panels.append(f'<figure data-join-panel="{number}"{shown}>{_picture(address)}'
                          f'<figcaption>{html.escape(address)}</figcaption></figure>')
            choices.append(f'<button type="button" data-join-choice="{number}" aria-pressed="{str(number == 0).lower()}">'
                           f'{html.escape(address.partition("://")[2])}</button>')
        several = f'<p class="join-choices">{strings.JOIN_OTHERS} {"".join(choices)}</p>' if len(addresses) > 1 else ""
        how = strings.JOIN_ANYWHERE if addresses[0] == self.public else strings.JOIN_HERE
        notes = [how, *([strings.JOIN_PASSWORD] if self._options.auth else [])]
        return (f'<dialog class="join" aria-labelledby="join-title"><h2 id="join-title">{strings.JOIN_TITLE}</h2>{"".join(panels)}'
                f'<p class="join-how">{html.escape(" ".join(notes))}</p>{several}{_CLOSE}</dialog>')

    def lines(self, *, drawn: bool) -> list[str]:
        """For the terminal. drawn: with the first address as a code, where block characters can be shown."""
        addresses = self.addresses()
        lines = [f"join at {address}" for address in addresses]
        if drawn and addresses:
            out = io.StringIO()
            segno.make(addresses[0], error="l", micro=False).terminal(out, compact=True, border=2)
            lines += out.getvalue().rstrip("\n").split("\n")
        return lines


_CLOSE = f'<button type="button" class="join-close" data-join-close aria-label="{strings.JOIN_CLOSE}">×</button>'


def _picture(address: str) -> str:
    """Dark on light in any theme: scanners want it so."""
    return segno.make(address, error="m", micro=False).svg_inline(omitsize=True, border=3, dark="#000", light="#fff", svgclass="join-code",
                                                                  lineclass=None, title=address)


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses on networks that others may be on: the one of the usual route first, those of virtual networks last."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and name in up:
                number = ip_address(address.address)
                if not (number.is_loopback or number.is_link_local):
                    found.append((name.lower().startswith(INNER), not number.is_private, address.address))
    usual = _usual_address()
    return [address for _, _, address in sorted(found, key=lambda each: (each[2] != usual, *each))]


def _usual_address() -> str:
    """The address that the system would send from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
            return probe.getsockname()[0]
        except OSError:
            return ""
