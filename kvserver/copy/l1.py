"""L1's memory, mapped where and with the pages that the settings choose.

Owns: the reaction to a kernel that refuses the mapping. Refuses to know: what is chosen (`config.placement`), what the memory
contains.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from kvserver._native import HostRegion, process_numa_policy
from kvserver.config import Placement, Settings, choose_l1
from kvserver.protocol import ConfigError

log = logging.getLogger(__name__)


def chosen_l1(settings: Settings, kept_bytes: int = 0) -> tuple[int, Placement]:
    """choose_l1() for this process. A NUMA policy that cannot be read counts as none."""
    own_policy = process_numa_policy()[0] not in ("default", "unknown")
    return choose_l1(settings, own_policy=own_policy, kept_bytes=kept_bytes)


def map_l1(settings: Settings, size: int, wanted: Placement, fd: int = -1) -> tuple[HostRegion, Placement]:
    """L1 and its real placement. `fd`: of the file that is its memory. ConfigError or RuntimeError if it cannot be mapped."""
    try:
        region = HostRegion(size, wanted.huge_page_bytes, wanted.transparent, list(wanted.nodes), wanted.bound, fd)
    except RuntimeError as error:
        if not wanted.huge_page_bytes or fd >= 0:
            raise
        if settings.l1_huge_pages != "auto":
            raise ConfigError(
                f"--l1-huge-pages {settings.l1_huge_pages}: {error}; are enough reserved in /proc/sys/vm/nr_hugepages, and "
                "free for this cgroup?"
            ) from None
        # Another process allocated the huge pages meanwhile.
        log.warning("L1 is in ordinary memory, without huge pages: %s", error)
        ordinary = msgspec.structs.replace(settings, l1_huge_pages="transparent")
        return map_l1(ordinary, *chosen_l1(ordinary))
    if region.numa_error:
        log.warning(
            "--l1-numa %s: %s; the kernel chooses the nodes of L1 (in a container: --cap-add SYS_NICE)",
            settings.l1_numa, region.numa_error,
        )  # fmt: skip
        return region, replace(wanted, nodes=(), bound=False)
    return region, wanted
