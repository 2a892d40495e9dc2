"""`POST | GET /cache/prefetches` and `DELETE /cache/prefetches/ID`: prompts that L1 gets from L2 before a request needs them.

The bodies, the codes and the answers are those of `/cache/pins`, but for `ttl_seconds`, which may be left out.

Owns: the path and the time. Refuses to know: all else of the form (`pins_page`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvserver.routing import MatchPages
from kvserver.server import PinReport, PrefetchReports
from kvserver.web import pins_page

PREFIX = "/cache/prefetches/"
MOST_SECONDS = 600


class _Prefetch(pins_page.TimedQuery, kw_only=True):
    ttl_seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)] = 60.0


_decoder: msgspec.json.Decoder[pins_page.TimedQuery] = msgspec.json.Decoder(_Prefetch)


def create(
    prefetches: PrefetchReports, match: MatchPages, ask: Callable[[Callable[[], PinReport]], PinReport], body: bytes,
    content_type: str,
) -> tuple[int, bytes]:  # fmt: skip
    """HTTP code and JSON. `ask` runs a function in the loop."""
    return pins_page.create(prefetches, match, ask, body, content_type, _decoder)
