"""Mutants of `kvserver/cli`."""

from __future__ import annotations

from support.mutation import Mutant

CHECKS = "kvserver/cli/checks.py"
CLEAR_TESTS = ("daemon/test_operator_clear.py",)

MUTANTS = (
    # ---- bundle.py ----------------------------------------------------------------------------------
    Mutant(
        "a bundle shows secrets that the daemon's environment names",
        "kvserver/cli/bundle.py", "_redactor", "secrets_of(os.environ) | secrets_of(environ)", "set[str]()",
        ("daemon/test_operator_bundle.py",),
    ),
    Mutant(
        "a log is cut within a line",
        "kvserver/cli/bundle.py", "_tail", "if end > _LOG_BYTES:", "if False:", ("daemon/test_operator_bundle.py",),
    ),
    Mutant(
        "a bundle has the journal of another process",
        "kvserver/cli/bundle.py", "_log", 'f"_PID={pid}"', 'f"_PID={pid + 1}"', ("daemon/test_operator_bundle.py",),
    ),
    # ---- checks.py ----------------------------------------------------------------------------------
    Mutant(
        "a limit that is too low for what is beside L1 is none",
        CHECKS, "memory_beside_l1", "if limit >= needed * MiB:", "if limit >= l1_bytes:", ("unit/cli/test_checks.py",),
    ),
    # ---- clear.py -----------------------------------------------------------------------------------
    Mutant(
        "a clear without a terminal asks no one and clears",
        "kvserver/cli/clear.py", "_not_agreed", "if not sys.stdin.isatty():",
        "return None\n    if not sys.stdin.isatty():", CLEAR_TESTS,
    ),
    # ---- redaction.py -------------------------------------------------------------------------------
    Mutant(
        "a bundle shows token ids of the log",
        "kvserver/cli/redaction.py", "Redactor.text", "*(_OF_LOGS if log else ())", "*()",
        ("unit/cli/test_redaction.py",),
    ),
    Mutant(
        "a bundle shows passwords of URLs",
        "kvserver/cli/redaction.py", "", '(?<!ipc:)//"', '(?<!ipc:)//x@"', ("unit/cli/test_redaction.py",),
    ),
    # ---- terminal.py --------------------------------------------------------------------------------
    Mutant(
        "names that clients chose move the cursor",
        "kvserver/cli/terminal.py", "plain", "one if one.isprintable() else", "one if True else",
        ("unit/cli/test_terminal.py",),
    ),
    # ---- top_scroll.py ------------------------------------------------------------------------------
    Mutant(
        "what the screen has no line for is never shown",
        "kvserver/cli/top_scroll.py", "Scroll.shown", "first = 1 + self._hidden", "first = 1",
        ("daemon/test_operator_top.py",),
    ),
    Mutant(
        "a screen is scrolled beyond the end of its text",
        "kvserver/cli/top_scroll.py", "Scroll.shown", "min(self._hidden, len(lines) - 1 - self._page)", "self._hidden",
        ("daemon/test_operator_top.py",),
    ),
    # ---- top_view.py --------------------------------------------------------------------------------
    Mutant(
        "rates are of two incarnations of the daemon",
        "kvserver/cli/top_view.py", "rates", "now.boot_id != before.boot_id or ", "", ("unit/cli/test_top.py",),
    ),
)  # fmt: skip
