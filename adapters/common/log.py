"""The logger of all that runs inside an engine.

Engines show what is logged below their own logger, and some show nothing else. So an engine's adapter states where messages go.
"""

from __future__ import annotations

import logging

log = logging.getLogger("kvserver")


def log_below(name: str) -> None:
    """Pass messages on to this logger of the engine, whose level counts."""
    log.parent = logging.getLogger(name)
