"""The reasons for which a test may be skipped, and the pytest plugin that finds skips for any other.

A run ends with a list of those. Where CI or KVSERVER_STRICT_SKIPS is set, they fail it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

# A reason, as a regular expression for all of it -> why the tests may do without.
ALLOWED = {
    r"no GPU: .*": "Few machines have one. The simulated GPU runs the same tests, and KVSERVER_REQUIRE_GPU=1 forbids this skip.",
    r"a simulated GPU has no memory of its own": "Its memory is the host's: what a driver frees at a death is only seen on a GPU.",
    r"a GPU's memory cannot be truncated": "One table of tests covers all devices; the row is the CPU's.",
    r"the owner of GPU memory cannot take it back: .*": "The module runs over the CPU, too, where this happens.",
    r"no huge pages: .*": "Only root mounts and reserves them, for the whole machine, while it has whole ones.",
    r"this container forbids mbind": "A container's seccomp filter may; another test covers that a refused policy is reported.",
    r"no routers: .*": "`make test-long` installs them; a test of the long set that is named by hand may be without.",
    r"this kernel has no PR_SET_MDWE": "Linux has it since 6.3.",
    r"no Chromium: .*": "make unpacks Debian's; other systems need chromium and chromedriver on PATH. KVSERVER_REQUIRE_BROWSER=1, as in CI, forbids this skip.",
    r"no promtool: .*": "make check, which CI runs first, fails without one.",
    r"there is no systemd-analyze": "Containers have no systemd.",
    r"no systemd of its own: .*": "It takes root, systemd, namespaces and a control group; test_service_manager.py has the messages without it.",
    r"Bubblewrap may not make containers here: .*": "It needs namespaces; the same test runs the same command without them.",
    r"root may write everywhere": "It takes a user without privileges.",
    r"only root can (become another user|give a folder away)": "It takes root, as which CI's containers run.",
    r"an expected failure: issue \d+: .*": "It is strict, so it fails once it passes, and it names the issue that ends it.",
    r"(only \d+ descriptors for each process|no more than \d+ descriptors are allowed here)": "A hard limit of the machine.",
}  # fmt: skip


def strict() -> bool:
    return bool(os.environ.get("CI") or os.environ.get("KVSERVER_STRICT_SKIPS"))


def allowed(reason: str) -> bool:
    return any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in ALLOWED)


class _Skips:
    def __init__(self) -> None:
        self.others: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped:
            return
        if hasattr(report, "wasxfail"):  # "skipped", too, without the tuple (file, line, "Skipped: reason")
            reason = f"an expected failure: {report.wasxfail}"
        else:
            reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "unknown"
        if not allowed(reason):
            self.others.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        if self.others and strict() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.others:
            terminalreporter.section("skips that are not on the list of tests/support/skips.py", red=strict())
            terminalreporter.write_line("\n".join(self.others))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Skips())
