"""Who may ask the status pages for what.

Two kinds of strangers are refused. A *web page* in the browser of somebody on this machine reaches a loopback address as any
program does: what gives it away is the Origin of its requests, and the Host when its own name was made to mean this address
(DNS rebinding). *Anybody on the network* reaches an address off loopback: there a token is needed for all but the pages of
probes and scrapers, whoever asks; where an address of the peer comes from is not known behind proxies and port forwarding.

Owns: that decision. Refuses to know: sockets, pages. A value and no state: any thread may ask.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from email.message import Message

OPEN_PAGES = frozenset({"/metrics", "/livez", "/readyz"})  # to everybody: they name models, never tokens of prompts


@dataclass(frozen=True)
class Refusal:
    """Becomes the answer, with this HTTP code; `reason` is also the label it is counted under."""

    code: int
    reason: str
    message: str


class Access:
    def __init__(self, listens_on: str, host_name: str = "", token: str = "") -> None:
        """`listens_on`: the address that was bound. `host_name`: what --http-host says. Without a token none is asked for, and
        off loopback nobody gets in."""
        self._loopback = ipaddress.ip_address(listens_on).is_loopback
        self._host_name = host_name.lower()
        self._token = token.encode()

    @property
    def shut(self) -> bool:
        """Whether nobody gets more than OPEN_PAGES."""
        return not self._loopback and not self._token

    def refusal(self, method: str, path: str, headers: Message) -> Refusal | None:
        """None if the request may be answered. `path` is without a query."""
        if method == "GET" and path in OPEN_PAGES:
            return None
        hosts = headers.get_all("Host", [])
        if len(hosts) > 1:
            return Refusal(400, "foreign_host", "a request has one Host")
        host = hosts[0].strip() if hosts else ""
        if foreign := _foreign_origin(method, host, headers):
            return Refusal(403, "foreign_origin", foreign)
        if self._token:
            return self._without_token(headers.get_all("Authorization", []))
        if not self._loopback:
            return Refusal(
                403,
                "token_required",
                "off loopback only /metrics, /livez and /readyz are for everybody; start the daemon with --http-token-file FILE and "
                "send the token in that file as Authorization: Bearer",
            )
        if hosts and not self._is_ours(host):  # programs may leave it out in HTTP/1.0, browsers never do
            return Refusal(
                403,
                "foreign_host",
                f"Host {host[:100]!r} is none of this daemon's; ask by an address, localhost or the name given as --http-host",
            )
        return None

    def _without_token(self, shown: list[str]) -> Refusal | None:
        if not shown:
            return Refusal(401, "token_required", "send the token of --http-token-file as Authorization: Bearer")
        scheme, _, token = shown[0].strip().partition(" ")
        right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self._token)
        if len(shown) == 1 and scheme.lower() == "bearer" and right:
            return None
        return Refusal(401, "bad_token", "that is not the token of the daemon's --http-token-file")

    def _is_ours(self, host: str) -> bool:
        """An address cannot be made to mean another machine, so any is fine: those of port forwarding are not ours to know."""
        name = _name(host)
        if name == "localhost" or name.endswith(".localhost") or (name and name == self._host_name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    """Of "name", "name:port" and "[address]:port"; "" if it is none of these."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/\s@]+))(?::\d*)?", host)
    return (match[1] or match[2]).lower().rstrip(".") if match else ""


def _foreign_origin(method: str, host: str, headers: Message) -> str:
    """Why the request is another site's; "" if it is not. Only browsers send these headers, and no page can leave them out."""
    for origin in headers.get_all("Origin", []):
        scheme, _, rest = origin.strip().partition("://")
        if scheme.lower() not in ("http", "https") or rest.lower() != host.lower():
            return f"Origin {origin[:100]!r} is not that of Host {host[:100]!r}"
    site = headers.get("Sec-Fetch-Site", "none").strip().lower()
    if site in ("none", "same-origin"):
        return ""
    followed = (
        method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    )
    return "" if followed else f"Sec-Fetch-Site is {site[:100]!r}"  # following a link shows that page nothing
