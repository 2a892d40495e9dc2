"""`kvserver doctor`: runs every check, shows one line each, exits with 1 if there is a problem.

Owns: the order, the output and the exit code. Refuses to know: the checks themselves (`checks` and its kin).
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvserver import __version__
from kvserver.cli import bundle, checks, checks_daemon, checks_engine, checks_gpu, checks_service, checks_storage
from kvserver.cli.checks import Finding, Level, Machine, ok, problem, warning
from kvserver.cli.terminal import show
from kvserver.config import Settings, flag, read_configuration
from kvserver.protocol import ConfigError

_OF_THE_DAEMON = ("endpoint", "http_host", "http_port", "http_token_file")
Check = Callable[[Machine], Finding]

CHECKS: dict[str, Check] = {
    "shared memory": checks.shared_memory,
    "L1 memory": checks.l1_memory,
    "L1 file": checks.l1_file,
    "memory limit": checks.memory_beside_l1,
    "locked memory": checks.locked_memory,
    "huge pages": checks.huge_pages,
    "NUMA": checks.numa,
    "open files": checks.open_files,
    "container": checks.container,
    "GPU driver": checks_gpu.driver,
    "GPUs": checks_gpu.devices,
    "GPU memory": checks_gpu.gpu_memory,
    "namespaces": checks_gpu.namespaces,
    "environment": checks.environment,
    "native module": checks_service.native_module,
    "endpoint": checks_service.endpoint_folder,
    "daemon": checks_daemon.daemon,
    "engines": checks_daemon.engines,
    "HTTP port": checks_daemon.http_port,
    "storage": checks_storage.storage,
    "vLLM": checks_service.vllm,
}


def main(arguments: argparse.Namespace) -> int:
    """Prints each line at once: the last checks need seconds. ConfigError if a bundle cannot be written."""
    if arguments.bundle:
        return _bundle(arguments)
    found: list[tuple[str, Finding]] = []
    for name, finding in findings(arguments):
        found.append((name, finding))
        if not arguments.json:
            show(line(name, finding))
    if arguments.json:
        rows = [{"check": n, "level": f.level.value, "text": f.text, "fix": f.fix} for n, f in found]
        print(json.dumps(rows, indent=2))
    else:
        show(summary([finding.level for _, finding in found]))
    return int(any(finding.level is Level.PROBLEM for _, finding in found))


def _bundle(arguments: argparse.Namespace) -> int:
    """Whatever is wrong is in the file."""
    if arguments.engine:
        raise ConfigError("--bundle is of the daemon of this machine: give it without --engine")
    found = [{"check": n, "level": f.level.value, "text": f.text, "fix": f.fix} for n, f in findings(arguments)]
    manifest = bundle.write(
        _settings(arguments), _given(arguments), found, arguments.bundle, arguments.log, arguments.overwrite
    )
    if arguments.json:
        print(json.dumps(manifest, indent=2))
    else:
        lines = [f"{name:<14} {outcome}" for name, outcome in manifest["parts"].items()]
        show("\n".join([*lines, f"{manifest['bundle']}: {manifest['bytes']:,} bytes. Look at it before you send it."]))
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    """The settings; where they are invalid, flags that name the daemon are used still."""
    given = vars(arguments)
    for known in (given, {name: given[name] for name in _OF_THE_DAEMON if name in given}):
        with contextlib.suppress(ConfigError):
            return read_configuration(known, None if known is given else {}).settings
    return read_configuration({}, {}).settings


def _given(arguments: argparse.Namespace) -> list[str]:
    """Texts of the command line and the settings' file, also where they are no valid settings."""
    found = [one for value in vars(arguments).values() for one in (value if isinstance(value, list) else [value])]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found.extend(Path(arguments.config).read_text().splitlines() if arguments.config else [])
    return [one for one in found if isinstance(one, str)]


def findings(arguments: argparse.Namespace) -> Iterator[tuple[str, Finding]]:
    """The findings of the given engines; else of the settings, then of every check, with the defaults if the settings are invalid."""
    if arguments.engine:
        for url in arguments.engine:
            yield from checks_engine.engine_findings(url, _settings(arguments).endpoint)
        return
    try:
        given = read_configuration(vars(arguments))
    except ConfigError as error:
        given = read_configuration({}, {})
        yield "settings", problem(str(error), "change that value; the checks below use the defaults")
    else:
        yield "settings", ok(", ".join(f"{flag(k)} from {v}" for k, v in given.sources.items()) or "all default")
    yield from run_checks(Machine(given.settings, python=arguments.python))


def run_checks(machine: Machine, table: Mapping[str, Check] = CHECKS) -> Iterator[tuple[str, Finding]]:
    for name, check in table.items():
        try:
            yield name, check(machine)
        except Exception as error:  # an unusual machine must not hide the findings of other checks
            yield (
                name,
                warning(f"could not be checked: {type(error).__name__}: {error}", f"kvserver {__version__}: report it"),
            )


def line(name: str, finding: Finding) -> str:
    fix = f" -> {finding.fix}" if finding.fix else ""
    return f"{finding.level.value:<8} {name:<14} {finding.text}{fix}".replace("\n", " ")


def summary(levels: list[Level]) -> str:
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    return f"kvserver {__version__}: {problems} problems, {warnings} warnings, {levels.count(Level.OK)} ok"
