"""The URLs of L2's tiers: `--l2 URL`.

Owns: their form, and the parameters that tiers of all kinds have. Refuses to know: what a kind of tier does with the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote

from kvserver.config.settings import parse_size
from kvserver.config.urls import split_url, without_user
from kvserver.protocol import ConfigError

_VALKEY = {"expiry", "cluster"}
_CERTIFICATES = {"ca", "cert", "key"}
KINDS = {  # by scheme: the kind, and its own parameters
    "file": ("file", {"size"}),
    "s3": ("s3", {"endpoint", "region", "ca", "virtual_hosted"}),
    "valkey": ("valkey", _VALKEY),
    "valkeys": ("valkey", {*_VALKEY, *_CERTIFICATES}),
    "redis": ("valkey", _VALKEY),
    "rediss": ("valkey", {*_VALKEY, *_CERTIFICATES}),
    "mooncake": ("mooncake", {"protocol", "devices", "metadata"}),
}
_COMMON = {"admit", "required", "write_limit", "read_only", "timeout"}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_DEFAULT_TIMEOUT_SECONDS = 2.0

# Of one connection: 30 tokens a second, where a token has 300 kB of KV. An engine computes faster.
LEAST_BYTES_PER_SECOND = 10_000_000


@dataclass(frozen=True)
class TierUrl:
    """A tier as the settings describe it."""

    kind: str
    name: str  # unique among the tiers of a daemon
    scheme: str
    host: str
    port: int  # 0: the scheme's own
    path: str
    username: str = field(repr=False)
    password: str = field(repr=False)
    own: dict[str, str] = field(repr=False)  # parameters of the kind; Mooncake's metadata may have a password
    admit: Literal["all", "reused"] = "all"  # which objects are written: all, or those that a second request needed
    required: bool = False  # /readyz fails while the tier is closed or unavailable
    read_only: bool = False
    write_limit: int = 0  # bytes a second; 0: none
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS  # of one put or get, without the time for its bytes

    def seconds_for(self, size: int) -> float:
        """The longest that a request of so many bytes may take: a slower store is not worth having."""
        return self.timeout_seconds + size / LEAST_BYTES_PER_SECOND

    def states(self, name: str) -> bool:
        """The truth of a parameter of the kind, false by default. ConfigError for another word."""
        try:
            return _truth(name, self.own)
        except ValueError as error:
            raise ConfigError(f"--l2 {self.shown}: {error}") from None

    @property
    def shown(self) -> str:
        """The URL without secrets and without parameters."""
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{self.host}{port}{self.path}"


def parse_tiers(urls: Sequence[str]) -> tuple[TierUrl, ...]:
    """The tiers in their order. ValueError states which URL is bad, and why."""
    tiers: list[TierUrl] = []
    for url in urls:
        kinds = [tier.kind for tier in tiers]
        try:
            tier = _parse(url, kinds)
        except ValueError as error:
            raise ValueError(f"{without_user(url, True).partition('?')[0]}: {error}") from None
        if any(other.shown == tier.shown for other in tiers):
            raise ValueError(f"{tier.shown} is there twice")
        tiers.append(tier)
    return tuple(tiers)


def _parse(url: str, kinds: list[str]) -> TierUrl:
    parts = split_url(url)
    if parts.scheme not in KINDS:
        raise ValueError(f"unknown kind of storage; write {', '.join(f'{scheme}://' for scheme in KINDS)}")
    kind, own_names = KINDS[parts.scheme]
    pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ValueError("a parameter is there twice")
    if unknown := given.keys() - own_names - _COMMON:
        known = ", ".join(sorted(own_names | _COMMON))
        raise ValueError(f"unknown parameters: {', '.join(sorted(unknown))}; known are {known}")
    if parts.fragment:
        raise ValueError(f"#{parts.fragment} has no meaning here")
    count = kinds.count(kind)
    tier = TierUrl(
        kind=kind,
        name=kind if not count else f"{kind}-{count + 1}",
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=parts.port or 0,
        path=unquote(parts.path),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        own={name: value for name, value in given.items() if name in own_names},
        admit=_admit(given.get("admit", "all")),
        required=_truth("required", given),
        read_only=_truth("read_only", given),
        write_limit=_rate(given.get("write_limit", "")),
        timeout_seconds=_seconds(given.get("timeout", "")),
    )
    _check_place(tier, parts)
    return tier


def _check_place(tier: TierUrl, parts: SplitResult) -> None:
    if tier.kind == "file":
        if parts.netloc or not tier.path.strip("/"):
            raise ValueError("write file:///absolute/folder?size=200GiB")
        if "size" not in tier.own:
            raise ValueError("a size is missing: ?size=200GiB")
        if parse_size(tier.own["size"]) < 1 << 20:
            raise ValueError("the size is at least 1MiB")
    elif not tier.host:
        raise ValueError("a bucket is missing" if tier.kind == "s3" else "a host is missing")


def _admit(text: str) -> Literal["all", "reused"]:
    if text == "all":
        return "all"
    if text == "reused":
        return "reused"
    raise ValueError(f"admit={text}: write all or reused")


def _truth(name: str, given: dict[str, str]) -> bool:
    text = given.get(name, "false")
    if text not in _TRUTH:
        raise ValueError(f"{name}={text}: write true or false")
    return _TRUTH[text]


def _rate(text: str) -> int:
    """Bytes a second of "500MB/s"; 0 for ""."""
    if not text:
        return 0
    rate = parse_size(text.removesuffix("/s"))
    if not rate:
        raise ValueError(f"write_limit={text}: read_only=true stops all writes")
    return rate


def _seconds(text: str) -> float:
    """Seconds of "2s", "500ms" or "2"."""
    if not text:
        return _DEFAULT_TIMEOUT_SECONDS
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|)", text)
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else 0.0
    if not 0.01 <= seconds <= 60:
        raise ValueError(f"timeout={text}: write 10ms to 60s")
    return seconds
