"""Decides which requests to the status pages are answered.

Two kinds of clients are refused:
- A *web page* in a browser on this machine can send requests to a loopback address as any program can. Its requests carry its
  Origin. If the page's own name was made to resolve to this address (DNS rebinding), they carry that name as Host.
- *Clients on the network* can connect to an address off loopback. There every client needs a token. Exempt are the pages of
  probes and scrapers, and the page's shell, which has a form for the token. The peer's address decides nothing: proxies and port
  forwarding hide it.

Owns: that decision. Refuses to know: sockets, pages. Immutable: any thread may call.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from email.message import Message

OPEN_PAGES = frozenset(
    {"/metrics", "/livez", "/readyz"}
)  # to every client: these pages name models, never tokens of prompts


def is_shell(method: str, path: str) -> bool:
    """True for the page at `/` and its assets. They are the same for every daemon of a version; what the page shows it requests
    with the token that its user enters."""
    return method == "GET" and (path == "/" or path.startswith("/assets/"))


@dataclass(frozen=True)
class Refusal:
    """Refusal with this HTTP code; `reason` is also its label in the metric."""

    code: int
    reason: str
    message: str


class Access:
    def __init__(self, listens_on: str, host_name: str = "", token: str = "") -> None:
        """`listens_on`: the bound address. `host_name`: the value of --http-host. `token`: "" requires no token; off loopback
        only OPEN_PAGES are answered then."""
        self._loopback = ipaddress.ip_address(listens_on).is_loopback
        self._host_name = host_name.lower()
        self._token = token.encode()

    @property
    def shut(self) -> bool:
        """True if no client gets more than OPEN_PAGES."""
        return not self._loopback and not self._token

    def refusal(self, method: str, path: str, headers: Message) -> Refusal | None:
        """Refusal of the request, or None if it may be answered. `path` is without a query."""
        if method == "GET" and path in OPEN_PAGES:
            return None
        hosts = headers.get_all("Host", [])
        if len(hosts) > 1:
            return Refusal(400, "foreign_host", "a request has one Host")
        host = hosts[0].strip() if hosts else ""
        if foreign := _foreign_origin(method, host, headers):
            return Refusal(403, "foreign_origin", foreign)
        if self._token:
            if is_shell(method, path):
                return None
            return self._without_token(headers.get_all("Authorization", []))
        if not self._loopback:
            return Refusal(
                403,
                "token_required",
                "off loopback only /metrics, /livez and /readyz need no token; start the daemon with --http-token-file FILE and "
                "send the token in that file as Authorization: Bearer",
            )
        if hosts and not self._is_ours(host):  # programs may omit it in HTTP/1.0, browsers never do
            return Refusal(
                403,
                "foreign_host",
                f"Host {host[:100]!r} does not name this daemon; use an address, localhost or the name given as --http-host",
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
        """True for any address: it cannot be rebound, and the addresses of port forwarding are unknown here."""
        name = _name(host)
        if name == "localhost" or name.endswith(".localhost") or (name and name == self._host_name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    """The name in "name", "name:port" or "[address]:port"; "" if `host` is none of these."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/\s@]+))(?::\d*)?", host)
    return (match[1] or match[2]).lower().rstrip(".") if match else ""


def _foreign_origin(method: str, host: str, headers: Message) -> str:
    """Reason to believe that the request comes from another site; "" if there is none. Browsers always send these headers, other programs never."""
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
