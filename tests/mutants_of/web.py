"""Mutants of `kvserver/web`."""

from __future__ import annotations

from support.mutation import Mutant

HISTORY = "kvserver/web/history.py"
HISTORY_TESTS = ("unit/web/test_history.py",)
PAGE_TESTS = ("daemon/test_page_data.py",)

MUTANTS = (
    # ---- access.py ----------------------------------------------------------------------------------
    Mutant(
        "the history is a part of the shell, which needs no token",
        "kvserver/web/access.py", "is_shell", 'path == "/"', 'path in ("/", "/history")', PAGE_TESTS,
    ),
    Mutant(
        "another site's page gets the shell of a daemon that needs a token",
        "kvserver/web/access.py", "Access.refusal", "if foreign := _foreign_origin(method, host, headers)",
        "if not is_shell(method, path) and (foreign := _foreign_origin(method, host, headers))", PAGE_TESTS,
    ),
    # ---- pages.py -----------------------------------------------------------------------------------
    Mutant(
        "HEAD sends a body, which the next answer on the connection begins with",
        "kvserver/web/pages.py", "_Handler._send", 'if self.command != "HEAD":', "if True:", ("daemon/test_scrapes.py",),
    ),
    Mutant(
        "the end of a scrape waits for the client's acknowledgement",
        "kvserver/web/pages.py", "_Handler", "disable_nagle_algorithm = True", "disable_nagle_algorithm = False",
        ("issues/test_a_scrape_on_a_kept_connection_waited_40_ms.py",),
    ),
    # ---- history.py ---------------------------------------------------------------------------------
    Mutant(
        "a sample is begun each time that it might be due",
        HISTORY, "History.tick", "now >= self._due", "True", HISTORY_TESTS,
    ),
    Mutant(
        "a number that is no longer kept begins with the wrong sample",
        HISTORY, "History.since", "islice(self._rows, first - (self._taken - len(self._rows)), None)", "self._rows",
        HISTORY_TESTS,
    ),
)  # fmt: skip
