"""`POST /config/serving?value=on|stores-off|off`: the operator's switch, until the daemon ends.

    {"serving": "off", "before": "on"}

A missing or unknown value is a 400, {"error": "bad_parameter", "message": text}.

Owns: the parameter and the form. Refuses to know: sockets, what a mode means (`server.serving`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import parse_qsl

from kvserver.config import SERVING_MODES
from kvserver.server import Serving


def answer(serving: Serving, ask: Callable[[Callable[[], str]], str], query: str) -> tuple[int, str]:
    """HTTP code and JSON. `ask` runs a function in the loop."""
    match parse_qsl(query, keep_blank_values=True):
        case [("value", mode)] if mode in SERVING_MODES:
            return 200, json.dumps({"serving": mode, "before": ask(lambda: serving.switch(mode))}) + "\n"
    return 400, json.dumps(
        {"error": "bad_parameter", "message": f"give ?value= one of {', '.join(SERVING_MODES)}"}
    ) + "\n"
