"""Imports go down only, and nothing is imported that must not be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvserver"
ADAPTERS = ROOT / "adapters"

# Each module may import what stands before it, `_native` and the package itself.
ORDER = [
    "protocol.errors",
    "protocol.endpoint",
    "protocol.measurements",
    "config.settings",
    "config.http_token",
    "config.sources",
    "config.logs",
    "config.capacity",
    "config.placement",
    "protocol.planes",
    "protocol.fields",
    "protocol.routing",
    "protocol.messages",
    "telemetry.families",
    "events.types",
    "kv_events.types",
    "kv_events.ledger",
    "kv_events.descriptions",
    "telemetry.prometheus",
    "telemetry.rpc_counts",
    "telemetry.request_blocks",
    "telemetry.block_lifecycle",
    "cache.namespace",
    "routing.engine_wire",
    "routing.engine_stream",
    "routing.engine_follower",
    "routing.engines",
    "routing.prefix_index",
    "routing.block_hashes",
    "kv_events.wire",
    "kv_events.held",
    "kv_events.stream",
    "kv_events.channel",
    "kv_events.publisher",
    "kv_events.snapshot",
    "cache.pages",
    "cache.index",
    "cache.eviction",
    "cache.misses",
    "cache.cache",
    "copy.devices",
    "copy.tickets",
    "server.lifeline",
    "server.engine_stats",
    "telemetry.benefit",
    "server.instances",
    "telemetry.chunk_lifecycle",
    "kv_events.hub",
    "kv_events.lines",
    "kv_events.feed",
    "kv_events.observers",
    "server.resync",
    "server.transfers",
    "server.workers",
    "server.reports",
    "server.status",
    "telemetry.metrics_process",
    "telemetry.metrics_daemon",
    "telemetry.metrics_instances",
    "telemetry.metrics_benefit",
    "telemetry.metrics",
    "telemetry.otlp",
    "telemetry.differences",
    "telemetry.explain_facts",
    "telemetry.explain",
    "telemetry.tracing",
    "server.watchers",
    "server.handlers",
    "server.loop",
    "routing.match",
    "telemetry.explain_text",
    "web.explain_page",
    "web.snapshot_page",
    "web.access",
    "web.connections",
    "web.pages",
    "daemon",
    "protocol.client",
    "cli.checks",
    "cli.checks_gpu",
    "cli.checks_service",
    "cli.checks_engine",
    "cli.doctor",
    "cli.http_client",
    "cli.status",
    "cli.explain",
    "__main__",
]
FREE = {"_native", "__init__"}
ONLY = {  # modules that run inside engines, or must stay small
    "protocol.client": {
        "protocol.errors",
        "protocol.planes",
        "protocol.fields",
        "protocol.routing",
        "protocol.messages",
    },
    "cli.http_client": {"config.http_token"},
    "cli.status": {"cli.http_client"},
    "cli.explain": {"cli.http_client"},
    "cli.checks": {
        "protocol.errors",
        "config.settings",
        "config.sources",
        "config.capacity",
        "config.placement",
    },  # all work where the native module does not
    "cli.checks_gpu": {"config.settings", "config.placement", "cli.checks"},
    "cli.checks_service": {
        "config.settings",
        "config.http_token",
        "protocol.messages",
        "protocol.client",
        "cli.checks",
    },
    "cli.checks_engine": {"cli.checks"},
}
ADAPTERS_MAY = {
    "protocol.errors",
    "protocol.endpoint",
    "protocol.planes",
    "protocol.fields",
    "protocol.routing",
    "protocol.messages",
    "protocol.client",
} | FREE
DEFERRED = {
    *(("__main__", "daemon"), ("__main__", "cli.doctor")),  # so that `kvserver status` starts fast
    *(
        ("server.watchers", "telemetry.otlp"),
        ("server.watchers", "telemetry.tracing"),
    ),  # so that a daemon without a collector is small
}
BANNED = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "torch", "vllm", "numpy"}

Import = tuple[str, bool]  # dotted name, inside a function


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    deferred = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in deferred
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in deferred


def modules_of_package(path: Path) -> Iterator[Import]:
    """The kvserver modules that a file imports, by bare name."""
    for name, inside in imports_of(path):
        parts = name.split(".")
        if parts[0] != "kvserver":
            continue
        if ".".join(parts[1:3]) in ORDER:
            yield ".".join(parts[1:3]), inside
            continue
        known = len(parts) > 1 and (parts[1] in ORDER or parts[1] in FREE or parts[1] == "adapters")
        yield (parts[1] if known else "__init__"), inside


def package_modules() -> list[str]:
    """By dotted name, below `kvserver.`"""
    paths = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths)


def file_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def adapter_files() -> list[Path]:
    return sorted(ADAPTERS.rglob("*.py"))


def test_every_module_has_its_place_in_the_order() -> None:
    assert package_modules() == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down_only(module: str) -> None:
    below = ONLY.get(module, set(ORDER[: ORDER.index(module)])) | FREE
    for name, _ in modules_of_package(file_of(module)):
        assert name in below, f"kvserver.{module} imports {name}"


@pytest.mark.parametrize("module", ORDER)
def test_no_import_hides_inside_a_function(module: str) -> None:
    hidden = {(module, name) for name, inside in modules_of_package(file_of(module)) if inside}
    assert hidden <= DEFERRED


def test_adapters_import_only_what_engines_may_load() -> None:
    for path in adapter_files():
        for name, _ in modules_of_package(path):
            assert name in ADAPTERS_MAY or name == "adapters", f"{path} imports kvserver.{name}"


@pytest.mark.parametrize("module", ORDER)
def test_the_server_imports_no_pickle_and_no_engine(module: str) -> None:
    roots = {name.split(".")[0] for name, _ in imports_of(file_of(module))}
    assert not roots & BANNED


def test_adapters_use_no_pickle() -> None:
    for path in adapter_files():
        roots = {name.split(".")[0] for name, _ in imports_of(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


@pytest.mark.parametrize("module", ["daemon", "protocol.client", "__main__"])
def test_importing_the_server_loads_no_engine(module: str) -> None:
    program = f"import sys, kvserver.{module}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    roots = {name.split(".")[0] for name in loaded.stdout.split()}
    assert not roots & (BANNED - {"pickle", "marshal"}), "torch, vLLM and numpy belong to engines"  # stdlib loads some
    assert not {name for name in loaded.stdout.split() if name.startswith("kvserver.adapters")}


def test_a_daemon_loads_opentelemetry_only_for_a_collector() -> None:
    program = "import sys, kvserver.daemon; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "kvserver.telemetry.metrics" in loaded.stdout.split()
    assert not {name.split(".")[0] for name in loaded.stdout.split()} & {"opentelemetry", "google", "grpc", "requests"}


def test_importing_the_client_loads_nothing_of_the_server() -> None:
    program = "import sys, kvserver.protocol.client; print(*sorted(m for m in sys.modules if m.startswith('kvserver')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(loaded.stdout.split()) <= {"kvserver"} | {
        f"kvserver.{name}" for name in ONLY["protocol.client"] | {"protocol.client"}
    }


@pytest.mark.parametrize("path", [PACKAGE / "__init__.py", *(file_of(name) for name in ORDER)], ids=str)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module without a docstring"
