"""Rooms import what lies below them only, through their faces, and nothing is imported that must not be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvserver"
ADAPTERS = ROOT / "adapters"

# A room, or a module on top of them, may import what is listed before it.
ORDER = [
    "_native",
    "protocol",
    "config",
    "cache",
    "copy",
    "l2",
    "events",
    "replay",
    "telemetry",
    "kv_events",
    "routing",
    "engines",
    "tiering",
    "service_manager",
    "restart",
    "server",
    "observability",
    "parts",
    "snapshots",
    "bench",
    "web",
    "cli",
    "daemon",
    "__main__",
]
ROOMS = [name for name in ORDER if (PACKAGE / name).is_dir()]
# Modules that other rooms import by name: what they load is for few.
STATUS = {"protocol.status", "protocol.kv_status"}  # for the daemon and its readers, never for engines
LISTENING = {"config.descriptors", "config.listen_gate"}  # for what listens
BESIDE_THE_FACE = {
    *("protocol.client", *STATUS, *LISTENING),
    *("telemetry.otlp", "telemetry.tracing", "telemetry.prometheus", "telemetry.metrics_process"),
}
NO_FACE = {"web", "cli", "bench"}  # rooms whose modules are imported by name, by few
NEVER_BY_A_FACE = {
    *("opentelemetry", "google", "grpc", "requests", "http", "socketserver"),
    *("boto3", "redis", "valkey", "glide_sync", "glide_shared", "obstore"),
}
ONLY = {  # what must work where the rest does not, or start fast
    "protocol": {"_native"},
    "config": {"_native", "protocol"},
    "cli": {"_native", "protocol", "config", "cache", "replay", "bench"},
    "bench": {"_native", "protocol", "config", "cache", "l2"},
}
ADAPTERS_MAY = {"_native", "protocol", "__version__"}
DEFERRED = {
    *(
        ("__main__", "daemon"),
        ("__main__", "cli.doctor"),
        ("__main__", "cli.replay"),
        ("cli.top", "cli.top_frame"),
        ("cli.bench", "bench.run"),
    ),  # so that `kvserver status` starts fast
    *(
        ("observability", "telemetry.otlp"),
        ("observability", "telemetry.tracing"),
    ),  # a daemon without a collector
    ("web.memcpy", "bench.timing"),  # a daemon whose page was never opened
}
MAY_PICKLE = {"routing.block_hashes": {"pickle.dumps"}}  # nothing is unpickled
BANNED = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "torch", "vllm", "numpy"}


class Import(NamedTuple):
    name: str  # dotted, with the name imported
    deferred: bool  # inside a function


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    inside = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node in inside)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node in inside)


def modules() -> list[str]:
    """By dotted name, below `kvserver.`; a face is its room's name."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.parts != ("__init__",))


MODULES = modules()


def file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def room_of(module: str) -> str:
    return module.split(".")[0]


def imported_modules(path: Path) -> Iterator[tuple[str, bool]]:
    """The kvserver modules that a file imports, as MODULES has them, and `_native`, `adapters`, `__version__`."""
    for name, deferred in imports_of(path):
        parts = name.split(".")
        if parts[0] != "kvserver" or len(parts) == 1:
            continue
        found = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
        yield next((module for module in found if module in MODULES), parts[1]), deferred


def adapter_files() -> list[Path]:
    return sorted(ADAPTERS.rglob("*.py"))


def loaded_by(module: str) -> set[str]:
    program = f"import sys, kvserver.{module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_every_module_is_in_a_room_or_on_top() -> None:
    assert {room_of(module) for module in MODULES} | {"_native"} == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    room = room_of(module)
    below = ONLY.get(room, set(ORDER[: ORDER.index(room)])) | {room, "__version__"}
    for name, _ in imported_modules(file_of(module)):
        assert room_of(name) in below, f"kvserver.{module} imports kvserver.{name}"


@pytest.mark.parametrize("module", MODULES)
def test_a_room_is_entered_by_its_face(module: str) -> None:
    for name, _ in imported_modules(file_of(module)):
        room = room_of(name)
        if room in ROOMS and room != room_of(module) and room not in NO_FACE:
            assert name == room or name in BESIDE_THE_FACE, f"kvserver.{module} imports kvserver.{name}, past the face"


@pytest.mark.parametrize("room", ROOMS)
def test_inside_a_room_there_is_no_circle(room: str) -> None:
    inside = {module for module in MODULES if room_of(module) == room and module != room}
    below = {module: {name for name, _ in imported_modules(file_of(module))} for module in inside}
    assert not [module for module in inside if room in below[module]], "a module imports its own face"
    while free := {module for module in inside if not below[module] & inside}:
        inside -= free
    assert not inside, "these import each other"


@pytest.mark.parametrize("module", MODULES)
def test_no_import_hides_inside_a_function(module: str) -> None:
    hidden = {(module, name) for name, deferred in imported_modules(file_of(module)) if deferred}
    assert hidden <= DEFERRED


def test_adapters_import_only_what_engines_may_load() -> None:
    for path in adapter_files():
        for name, _ in imported_modules(path):
            assert room_of(name) in ADAPTERS_MAY | {"adapters"}, f"{path} imports kvserver.{name}"
            assert name not in STATUS, f"{path} imports kvserver.{name}"


def test_common_part_of_adapters_imports_no_engine() -> None:
    for path in sorted((ADAPTERS / "common").glob("*.py")):
        for name, _ in imports_of(path):
            assert not name.startswith(("vllm", "kvserver.adapters.vllm")), f"{path} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_the_server_unpickles_nothing_and_imports_no_engine(module: str) -> None:
    names = {name for name, _ in imports_of(file_of(module))}
    assert not {name.split(".")[0] for name in names - MAY_PICKLE.get(module, set())} & BANNED


def test_adapters_use_no_pickle() -> None:
    for path in adapter_files():
        roots = {name.split(".")[0] for name, _ in imports_of(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


@pytest.mark.parametrize("module", ["daemon", "protocol.client", "__main__"])
def test_importing_the_server_loads_no_engine(module: str) -> None:
    loaded = loaded_by(module)
    roots = {name.split(".")[0] for name in loaded}
    assert not roots & (BANNED - {"pickle", "marshal"}), "torch, vLLM and numpy belong to engines"  # stdlib loads some
    assert not {name for name in loaded if name.startswith("kvserver.adapters")}


def test_a_daemon_loads_opentelemetry_only_for_a_collector() -> None:
    loaded = loaded_by("daemon")
    assert "kvserver.telemetry.metrics" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"opentelemetry", "google", "grpc", "requests"}


@pytest.mark.parametrize("module", ["daemon", "__main__"])
def test_rich_and_cbor2_are_not_loaded_before_their_first_use(module: str) -> None:
    assert not loaded_by(module) & {"rich", "cbor2"}


@pytest.mark.parametrize("room", sorted(set(ROOMS) - NO_FACE))
def test_a_face_loads_no_exporter_no_http_and_no_command(room: str) -> None:
    loaded = loaded_by(room)
    assert not {name.split(".")[0] for name in loaded} & NEVER_BY_A_FACE
    rooms = {room_of(name.removeprefix("kvserver.")) for name in loaded if name.startswith("kvserver.")}
    assert rooms <= set(ORDER[: ORDER.index(room) + 1])
    beside = BESIDE_THE_FACE if room in ONLY else BESIDE_THE_FACE - STATUS - LISTENING
    assert not {name.removeprefix("kvserver.") for name in loaded} & beside


def test_importing_the_client_loads_nothing_of_the_server() -> None:
    loaded = {name.removeprefix("kvserver.") for name in loaded_by("protocol.client") if name.startswith("kvserver.")}
    assert {room_of(name) for name in loaded} == {"protocol"}
    assert not loaded & STATUS


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_states_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module without a docstring"


def test_public_class_name_is_used_once() -> None:
    where: dict[str, list[str]] = {}
    for path in [*PACKAGE.rglob("*.py"), *adapter_files()]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}
