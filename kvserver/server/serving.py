"""The operator's switch: whether lookups find chunks, and whether stores are accepted.

L1 keeps its chunks in every mode, and copies that have begun end as usual. Only the loop's thread changes the mode.

Owns: the mode and its consequences. Refuses to know: requests, and how an operator changes the mode.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvserver.config import SERVING_MODES

log = logging.getLogger(__name__)


@dataclass
class Serving:
    mode: str = "on"  # of SERVING_MODES
    switched: bool = False  # since the daemon's start: the settings no longer have the mode

    @property
    def why_nothing_is_found(self) -> str:
        """Reason why no lookup finds anything; "" if lookups find chunks."""
        return f"serving is {self.mode} (POST /config/serving)" if self.mode == "off" else ""

    @property
    def takes_stores(self) -> bool:
        return self.mode == "on"

    def switch(self, mode: str) -> str:
        """Set the mode, from the next message on; returns the mode before. REQUIRES: it is one of SERVING_MODES."""
        assert mode in SERVING_MODES
        before, self.mode, self.switched = self.mode, mode, True
        log.warning("serving was switched from %s to %s", before, mode)
        return before
