"""Checks of `kvserver doctor` on a machine, one small function per check.

Owns: problems of memory, limits and the environment, and the command or flag that fixes each. Refuses to know: how findings are
shown. A check takes a `Machine`, changes nothing and returns a `Finding`.
"""

from __future__ import annotations

import enum
import importlib
import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvserver.config import (
    FDSTORE,
    HUGE_PAGE_BYTES,
    GiB,
    MiB,
    Placement,
    Settings,
    available_memory,
    bytes_beside_l1,
    choose_l1,
    field_types,
    huge_pages_at,
    interleaved_nodes,
    l1_state_path,
    memory_limit,
    misspelt_variables,
    parse_size,
    variable,
)
from kvserver.protocol import ConfigError
from kvserver.protocol.status import DaemonStatus

SERVING_STATES = ("ready", "read_only")  # of a tier of L2 that runs
_DESCRIPTORS_PER_WORKER = 256
_DEFAULT_KV_BYTES = 4 * GiB  # assumed size of an engine's KV cache if it is unknown


class Level(str, enum.Enum):
    OK = "ok"
    WARNING = "warning"  # works, but less well or for fewer engines
    PROBLEM = "problem"  # the daemon would not start, or an engine would run without cache


@dataclass(frozen=True)
class Finding:
    level: Level
    text: str
    fix: str = ""  # a command or flag; given unless `level` is OK


@dataclass
class Machine:
    """Source of everything that checks read. Tests give fake folders and values."""

    settings: Settings
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: str = ""  # the interpreter of vLLM's environment; "" if not given
    uid: int = field(default_factory=os.getuid)
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    access: Callable[[Path, int], bool] = os.access
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    load: Callable[[str], object] = importlib.import_module
    running: DaemonStatus | None = None  # of the daemon at the endpoint, once the check `daemon` had its answer

    def read(self, path: str) -> str:
        """A file's text, "" if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def link(self, path: str) -> str:
        """Target of a link, "" if it cannot be read."""
        try:
            return os.readlink(self.root / path)
        except OSError:
            return ""


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def warning(text: str, fix: str) -> Finding:
    return Finding(Level.WARNING, text, fix)


def problem(text: str, fix: str) -> Finding:
    return Finding(Level.PROBLEM, text, fix)


def size(count: float) -> str:
    return f"{count / GiB:.1f} GiB" if count >= GiB else f"{count / MiB:.0f} MiB"


# ---- memory -------------------------------------------------------------------------------------


def shared_memory(machine: Machine) -> Finding:
    """An engine on CPU puts its KV cache into /dev/shm. A write past its end kills the writing process."""
    path = machine.root / "dev/shm"
    try:
        room = machine.statvfs(path)
    except OSError as error:
        return problem(f"{path}: {error.strerror}", "mount -t tmpfs -o size=50% tmpfs /dev/shm")
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    given = machine.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    needed = int(given) * GiB if given.isdecimal() and int(given) else _DEFAULT_KV_BYTES
    what = f"a KV cache of {size(needed)}" + (f" (VLLM_CPU_KVCACHE_SPACE={given})" if given else "")
    gigabytes = needed // GiB + 1
    if total < needed:
        grade = warning if uses_gpus(machine) else problem  # engines on GPUs put no KV cache there
        return grade(
            f"/dev/shm has {size(total)}, {what} does not fit: an engine on CPU would run without cache",
            f"mount -o remount,size={gigabytes}G /dev/shm; docker: --shm-size {gigabytes}g or --ipc=host; "
            "Kubernetes: an emptyDir of medium Memory",
        )
    if free < needed:
        return warning(
            f"/dev/shm has {size(free)} of {size(total)} free, one more engine with {what} does not fit",
            f"mount -o remount,size={(total + needed) // GiB + 1}G /dev/shm, or set VLLM_CPU_KVCACHE_SPACE lower",
        )
    return ok(f"/dev/shm has {size(free)} free, enough for {what}")


def l1_memory(machine: Machine) -> Finding:
    free, bound = available_memory(machine.root)
    try:
        wanted, placement = _chosen_l1(machine)
    except ConfigError as error:
        fits = max(64, free // 2 // MiB)
        explicit = machine.settings.l1_huge_pages in HUGE_PAGE_BYTES
        flags = "--l1-huge-pages auto" if explicit else f"--l1-size {fits}MiB"
        return problem(str(error), f"kvserver serve {flags}")
    text = f"--l1-size {machine.settings.l1_size} is {size(wanted)}"
    if placement.huge_page_bytes:
        return ok(f"{text} in huge pages of {placement.pages} that are reserved")
    pages = "small pages" if placement.pages == "off" else "transparent huge pages"
    return ok(f"{text} of {size(free)} left by {bound}, in {pages}")


def l1_file(machine: Machine) -> Finding:
    """Name the memory that stays after a stop."""
    path = machine.settings.l1_file
    if not path:
        return ok("there is no --l1-file, so L1 ends with the daemon")
    if path == FDSTORE:
        return ok(
            "the service manager has L1's memory if the unit keeps it (FileDescriptorStoreMax=2): a restart keeps it, a stop frees it"
        )
    if not (kept := _kept_bytes(machine)):
        return ok(f"{path} has no memory yet; it keeps that of L1 after a stop")
    try:
        state = l1_state_path(path, machine.settings.endpoint)
    except ConfigError as error:
        return problem(str(error), "--endpoint ipc:///run/kvserver/kvserver.sock")
    what = "the chunks that a daemon left in it" if state.exists() else "no chunks of an ended daemon"
    return ok(f"{path} has {size(kept)} of memory, also after a stop, and {what}; rm {path} {state} frees it")


def _chosen_l1(machine: Machine) -> tuple[int, Placement]:
    settings = machine.settings
    if huge_pages := huge_pages_at(settings.l1_file) if settings.l1_file else "":
        settings = msgspec.structs.replace(settings, l1_huge_pages=huge_pages)
    return choose_l1(settings, machine.root, kept_bytes=_kept_bytes(machine))


def _kept_bytes(machine: Machine) -> int:
    """Memory that L1's file has already."""
    try:
        return os.stat(machine.settings.l1_file).st_blocks * 512 if machine.settings.l1_file else 0
    except OSError:
        return 0


def memory_beside_l1(machine: Machine) -> Finding:
    """Check whether a container's limit is enough for L1 and the daemon's other memory: a daemon that grows past it is killed."""
    try:
        l1_bytes, placement = _chosen_l1(machine)
    except ConfigError as error:  # of a running daemon, whose L1 is what is missing
        if machine.settings.l1_size == "auto":
            return ok(f"not known: {error}")
        l1_bytes, placement = parse_size(machine.settings.l1_size), Placement()
    beside = bytes_beside_l1(machine.settings, l1_bytes, uses_gpus(machine))
    in_limit = 0 if placement.huge_page_bytes else l1_bytes  # explicit huge pages have a limit of their own
    needed = -(-(in_limit + beside) // MiB)
    text = f"{needed} MiB are needed: L1 {'in huge pages' if not in_limit else size(in_limit)} and {size(beside)} beside it"
    if (found := memory_limit(machine.root)) is None:
        return ok(f"{text}; there is no limit but the machine's memory")
    limit, name = found
    if limit >= needed * MiB:
        return ok(f"{text}, of {size(limit)} in {name}")
    return warning(
        f"{text}; {name} is {size(limit)}, and a daemon that grows past it is killed",
        f"Kubernetes: memory {needed}Mi as request and limit; docker: --memory {needed}m; systemd: MemoryMax={needed}M; or a lower --l1-size",
    )


def locked_memory(machine: Machine) -> Finding:
    """CUDA's manual names no limit of cudaHostRegister, and os_lock_user_pages() of NVIDIA's open kernel modules
    checks none; NCCL's manual still advises to raise it in containers."""
    soft, _ = machine.rlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    text = f"at most {size(soft)} may be locked"
    if not uses_gpus(machine) or machine.settings.pin == "off":
        return ok(f"{text}; only pinning for GPUs might need more")
    try:
        wanted, _ = choose_l1(machine.settings, machine.root)
    except ConfigError:
        return ok(f"{text}; L1 itself cannot be allocated")
    if wanted <= soft:
        return ok(f"{text}, L1 is {size(wanted)}")
    return ok(
        f"{text}, L1 is {size(wanted)}: NVIDIA's driver is not known to check this limit; if the log reports that L1 could not "
        "be pinned, raise it first: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
    )


def huge_pages(machine: Machine) -> Finding:
    folder = "sys/kernel/mm/transparent_hugepage/"
    chosen = {name: _bracketed(machine.read(folder + name)) for name in ("enabled", "shmem_enabled")}
    explicit = re.search(r"HugePages_Total:\s*(\d+)", machine.read("proc/meminfo"))
    tmpfs = re.search(r"^\S+ /dev/shm \S+ \S*huge=(\w+)", machine.read("proc/mounts"), re.MULTILINE)
    text = (
        f"transparent ones: {chosen['enabled'] or 'none'} for anonymous memory, {chosen['shmem_enabled'] or 'none'} "
        f"for shared memory, {tmpfs[1] if tmpfs else 'never'} on /dev/shm; explicit ones: {explicit[1] if explicit else 0}"
    )
    if machine.settings.l1_huge_pages in (*HUGE_PAGE_BYTES, "off"):
        return ok(f"{text}; L1 follows --l1-huge-pages {machine.settings.l1_huge_pages}")
    if chosen["enabled"] in ("", "never"):
        return warning(f"{text}; L1 uses small pages", f"echo madvise | sudo tee /{folder}enabled")
    return ok(text)


def numa(machine: Machine) -> Finding:
    setting = machine.settings.l1_numa
    nodes = sorted(path.name for path in (machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1:
        return ok("one memory node")
    allowed = re.search(r"Mems_allowed_list:\s*(\S+)", machine.read("proc/self/status"))
    if allowed and allowed[1].isdecimal():
        return ok(f"{len(nodes)} memory nodes, this process is bound to node {allowed[1]}")
    where = ", ".join(str(node) for node in interleaved_nodes(machine.root))
    lies = {"auto": f"L1 is interleaved over {where}", "off": "the kernel chooses the nodes of L1"}
    text = f"{len(nodes)} memory nodes, {lies.get(setting, f'L1 stays on node {setting[5:]}')}"
    if setting.startswith("bind:"):
        return ok(text)
    return warning(
        f"{text}; copies across nodes are slower",
        "start the daemon and its engines on one node each: numactl --cpunodebind=0 --membind=0 kvserver serve",
    )


def _bracketed(text: str) -> str:
    """The bracketed word in "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


# ---- the process and its machine ----------------------------------------------------------------


def open_files(machine: Machine) -> Finding:
    _, hard = machine.rlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("unlimited")
    workers = hard // _DESCRIPTORS_PER_WORKER
    text = f"at most {hard} files may be open, enough for {workers} workers (ranks)"
    fix = "ulimit -Hn 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536:65536"
    return problem(text, fix) if workers < 2 else warning(text, fix) if workers < 16 else ok(text)


def container(machine: Machine) -> Finding:
    """Hints only: no container is a problem by itself."""
    kinds = {".dockerenv": "docker", "run/.containerenv": "podman", "var/run/secrets/kubernetes.io": "Kubernetes"}
    kind = next((name for path, name in kinds.items() if (machine.root / path).exists()), "")
    if not kind:
        return ok("not in a known kind of container")
    return ok(
        f"in a container ({kind}): engines of other containers need the folder of --endpoint as a shared volume and the "
        "same user id, and engines on CPU need space of their own in /dev/shm"
    )


def environment(machine: Machine) -> Finding:
    """Names a variable that is probably a misspelt setting: the daemon ignores it, with a warning."""
    for name, meant in misspelt_variables(machine.environ).items():
        return warning(f"{name} is no setting and has no effect", f"write {meant}")
    used = sorted({variable(name) for name in field_types()} & set(machine.environ))
    return ok(f"set by {', '.join(used)}" if used else "no KVSERVER_* variables")


# ---- shared by checks ---------------------------------------------------------------------------


def driver_version(machine: Machine) -> str:
    """The driver's name with its version; "" if there is no GPU driver."""
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", machine.read("proc/driver/nvidia/version"))
    if version:
        return f"NVIDIA driver {version[1]}"
    return "a GPU driver" if any((machine.root / path).exists() for path in ("dev/nvidiactl", "dev/dxg")) else ""


def uses_gpus(machine: Machine) -> bool:
    """True if engines on GPUs can register."""
    return machine.settings.gpus != "none" and bool(driver_version(machine))
