"""Placement of L1: its size, its pages and its memory nodes.

The operator reserves explicit huge pages. L1 allocates them when it is mapped, never when it is touched: a page missing at that
time would be a SIGBUS in the middle of a copy.

Owns: the choice, from the settings and the machine, and the memory node next to a GPU. Refuses to know: how memory is mapped
(`csrc/copy/host_region.cpp`), how much ordinary memory is free (`capacity`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvserver.config.capacity import HUGE_PAGE_BYTES, choose_l1_bytes, free_huge_bytes, huge_page_folder
from kvserver.config.settings import GiB, KiB, MiB, Settings, parse_size
from kvserver.protocol import ConfigError


@dataclass(frozen=True)
class Placement:
    """Pages and memory nodes of L1."""

    huge_page_bytes: int = 0  # size of explicit huge pages; 0: none
    transparent: bool = True  # without explicit huge pages: advise the kernel to use transparent ones
    nodes: tuple[int, ...] = ()  # to interleave over, or the one to bind to; (): the process's own policy decides
    bound: bool = False  # L1 stays on the one node

    @property
    def pages(self) -> str:
        """The kind of pages, as a value of `--l1-huge-pages`."""
        names = {size: name for name, size in HUGE_PAGE_BYTES.items()}
        return names.get(self.huge_page_bytes, "transparent" if self.transparent else "off")


def choose_l1(
    settings: Settings, root: Path = Path("/"), own_policy: bool = False, kept_bytes: int = 0
) -> tuple[int, Placement]:
    """Bytes of L1 and their placement. ConfigError states what is missing and how to provide it.

    own_policy: this process was started with a memory policy (numactl), which "auto" does not change. kept_bytes: memory that L1 has already.
    """
    nodes, bound = _choose_nodes(settings.l1_numa, root, own_policy)
    node = nodes[0] if bound else None
    if settings.l1_huge_pages in HUGE_PAGE_BYTES:
        page_bytes = HUGE_PAGE_BYTES[settings.l1_huge_pages]
        return _explicit_bytes(settings, page_bytes, node, root, kept_bytes), Placement(page_bytes, False, nodes, bound)
    explicit = settings.l1_huge_pages == "auto"
    if explicit and settings.l1_size != "auto":
        wanted = parse_size(settings.l1_size)
        if page_bytes := _fitting_page(wanted, node, root):  # then L1 needs no ordinary memory
            return wanted, Placement(page_bytes, False, nodes, bound)
    size = choose_l1_bytes(settings.l1_size, root, kept_bytes)
    if node is not None:
        _check_node(settings, node, size - kept_bytes, root)
    page_bytes = _fitting_page(size, node, root) if explicit else 0
    return size, Placement(page_bytes, settings.l1_huge_pages != "off", nodes, bound)


# ---- pages --------------------------------------------------------------------------------------


def _fitting_page(size: int, node: int | None, root: Path) -> int:
    """Bytes of the explicit huge pages that "auto" chooses; 0 if too few are free. 1 GiB only if `size` fills them."""
    for page_bytes in (GiB, 2 * MiB):
        whole = size % page_bytes == 0 or page_bytes < GiB
        if whole and _pages(size, page_bytes) * page_bytes <= free_huge_bytes(page_bytes, root, node):
            return page_bytes
    return 0


def _explicit_bytes(settings: Settings, page_bytes: int, node: int | None, root: Path, kept_bytes: int) -> int:
    """Bytes of an L1 in explicit huge pages; "auto" uses all free ones."""
    free = free_huge_bytes(page_bytes, root, node) + kept_bytes
    size = free if settings.l1_size == "auto" else parse_size(settings.l1_size)
    needed, had = _pages(max(size, 1), page_bytes), free // page_bytes
    if needed <= had:
        return size
    folder = huge_page_folder(page_bytes, root, node)
    place = "/proc/sys/vm/nr_hugepages" if page_bytes == 2 * MiB and node is None else f"{folder}/nr_hugepages"
    total = _number(folder / "nr_hugepages") + needed - had
    raise ConfigError(
        f"--l1-huge-pages {settings.l1_huge_pages}: --l1-size {settings.l1_size} needs {needed} huge pages, {had} are free "
        f"by {place} and the limits of this cgroup; reserve them: echo {total} | sudo tee {place}, "
        "or give --l1-huge-pages auto"
    )


def _pages(size: int, page_bytes: int) -> int:
    return -(-size // page_bytes)


# ---- nodes --------------------------------------------------------------------------------------


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """The nodes whose memory this process may use."""
    base = root / "sys/devices/system/node"
    nodes = {int(path.name[4:]) for path in base.glob("node[0-9]*")}
    status = re.search(r"Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status"))
    allowed = _numbers(status[1]) if status else nodes
    return sorted(nodes & allowed & (_numbers(_text(base / "has_memory")) or nodes))


def interleaved_nodes(root: Path = Path("/")) -> list[int]:
    """The memory nodes that "auto" uses: nodes with processors. Other nodes are a GPU's memory, or slow."""
    nodes = memory_nodes(root)
    near = _numbers(_text(root / "sys/devices/system/node/has_cpu"))
    return [node for node in nodes if not near or node in near]


def gpu_node(pci: str, root: Path = Path("/")) -> int | None:
    """The memory node next to a GPU at `pci`, as 0000:1A:00.0; None if the kernel does not state it."""
    text = _text(root / f"sys/bus/pci/devices/{pci.lower()}/numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1: no node is next to it


def node_cpus(node: int, root: Path = Path("/")) -> set[int]:
    """The processors of a memory node."""
    return _numbers(_text(root / f"sys/devices/system/node/node{node}/cpulist"))


def gpu_cpus(uuid: str, root: Path = Path("/")) -> set[int]:
    """The processors next to a GPU; empty if the kernel does not state its node."""
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        if re.search(rf"GPU UUID:\s*{re.escape(uuid)}\s", _text(path) + "\n"):
            node = gpu_node(path.parent.name, root)
            return node_cpus(node, root) if node is not None else set()
    return set()


def _choose_nodes(setting: str, root: Path, own_policy: bool) -> tuple[tuple[int, ...], bool]:
    if setting.startswith("bind:"):
        node, nodes = int(setting.removeprefix("bind:")), memory_nodes(root)
        if node not in nodes:
            raise ConfigError(f"--l1-numa {setting}: this process may use memory of the nodes {nodes} only")
        return (node,), True
    nodes = interleaved_nodes(root) if setting == "auto" and not own_policy else []
    return (tuple(nodes) if len(nodes) > 1 else ()), False


def _check_node(settings: Settings, node: int, size: int, root: Path) -> None:
    """ConfigError if L1 does not fit on the node: the kernel would kill the process later, not refuse L1 now."""
    text = _text(root / f"sys/devices/system/node/node{node}/meminfo")
    kinds = dict(re.findall(r"Node \d+ (\S+):\s+(\d+) kB", text))
    if not kinds:
        return
    free = sum(int(kinds.get(kind, 0)) for kind in ("MemFree", "Active(file)", "Inactive(file)")) * KiB
    if size > free:
        raise ConfigError(
            f"--l1-numa {settings.l1_numa}: --l1-size {settings.l1_size} is {size} bytes, node {node} has {free} left; "
            "lower --l1-size or give --l1-numa auto"
        )


def _numbers(text: str) -> set[int]:
    """The numbers in a list such as "0-1,3"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0
