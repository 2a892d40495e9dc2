"""Check of `kvserver doctor` on the storage behind L1: every tier of `--l2`, and those of the running daemon.

It reads only. It loads the packages that tiers need only when there is a tier.

Owns: whether a folder can be used and has the space, and whether a server answers. Refuses to know: what a tier keeps there.
"""

from __future__ import annotations

import shlex
import stat
from os import W_OK, X_OK
from pathlib import Path
from typing import Any

from kvserver.cli.checks import SERVING_STATES, Finding, Level, Machine, ok, problem, size, warning
from kvserver.config import TierUrl, parse_size, parse_tiers
from kvserver.protocol import ConfigError
from kvserver.protocol.status import TierStatus

_OF_MEMORY = ("tmpfs", "ramfs")
_OF_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs")
_LEVELS = list(Level)


def storage(machine: Machine) -> Finding:
    """The tiers in one line, as bad as the worst of them."""
    tiers = parse_tiers(machine.settings.l2)
    found = {
        f"{tier.shown}: ": _folder(machine, tier) if tier.kind == "file" else _server(machine, tier) for tier in tiers
    }
    if machine.running is not None:
        found |= {f"the daemon's {tier.url}: ": _running(tier) for tier in machine.running.l2}
        if tiers and {tier.shown for tier in tiers} != {tier.url for tier in machine.running.l2}:
            found["the daemon that runs "] = warning(
                "has other tiers than these flags", "give its own --l2 here, or restart it with these flags"
            )
    if not found:
        return ok("none: KV is in memory only (--l2)")
    worst = max((finding.level for finding in found.values()), key=_LEVELS.index)
    texts = "; ".join(head + finding.text for head, finding in found.items())
    return Finding(worst, texts, "; ".join(finding.fix for finding in found.values() if finding.fix))


def _running(tier: TierStatus) -> Finding:
    """The state of a tier in the daemon, which alone knows whether its reads and writes work."""
    if tier.state in SERVING_STATES:
        return ok(tier.state.replace("_", " "))
    grade = problem if tier.required and tier.state != "opening" else warning
    return grade(
        f"{tier.state}: {tier.failure or 'no reason is known'}", "kvserver status; the daemon tries again by itself"
    )


def _folder(machine: Machine, tier: TierUrl) -> Finding:
    path, quoted = Path(tier.path), shlex.quote(tier.path)
    made = f"sudo install -d -m 700 -o {machine.uid} {quoted}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        if tier.read_only:
            return problem("the folder is not there, and would be read only", "leave read_only away")
        if not path.parent.is_dir() or not machine.access(path.parent, W_OK | X_OK):
            return problem(f"it is not there, and {path.parent} is no folder in which it can be made", made)
        return _space(machine, tier, path.parent, 0)
    except OSError as error:
        return problem(error.strerror or str(error), made)
    if not stat.S_ISDIR(found.st_mode):
        return problem("it is no folder", "give the folder itself, not a link or a file")
    if found.st_uid != machine.uid:
        return problem(f"it belongs to uid {found.st_uid}, and this is uid {machine.uid}", made)
    if found.st_mode & 0o022:
        return problem("other users may write to it", f"chmod 700 {quoted}")
    data = path / "data"
    had = 512 * data.stat().st_blocks if data.exists() else 0
    if not machine.access(path, W_OK | X_OK) and not tier.read_only:
        text, fix = "it is not writable", f"chmod 700 {quoted}, or mount it for writing, or add read_only=true"
        return warning(f"{text}, so nothing is written", fix) if had else problem(text, fix)
    if tier.read_only:
        return ok("read only") if had else problem("it is read only, and has no records", "leave read_only away")
    return _space(machine, tier, path, had)


def _space(machine: Machine, tier: TierUrl, folder: Path, had: int) -> Finding:
    """Check the space of a folder that can be written to. `had`: bytes that the tier has there already."""
    wanted, room = parse_size(tier.own["size"]), machine.statvfs(folder)
    free = room.f_bavail * room.f_frsize + had
    if free < wanted:
        return problem(f"{size(free)} of {size(wanted)} can be had", f"give ?size={free * 9 // 10 >> 20}MiB or less")
    kind = _kind_of_mount(machine, folder)
    text = f"{size(wanted)} of {size(free)} free, on {kind}"
    if kind in _OF_MEMORY:
        return warning(f"{text}, which is memory", "give a folder on a disk, or a larger --l1-size in its place")
    if kind in _OF_NETWORKS:
        return warning(f"{text}, which is no local disk", "give a folder on a local disk; machines share S3 or Valkey")
    return ok(text)


def _kind_of_mount(machine: Machine, folder: Path) -> str:
    """The file system's kind; "a disk" if it is unknown."""
    resolved, kind, longest = folder.resolve(), "a disk", -1
    for line in machine.read("proc/mounts").splitlines():
        _, mount, name, *_ = [*line.split(), "", "", ""]
        if resolved.is_relative_to(mount.replace("\\040", " ") or "/nowhere") and len(mount) >= longest:
            kind, longest = name, len(mount)
    return kind


def _server(machine: Machine, tier: TierUrl) -> Finding:
    l2: Any = machine.load("kvserver.l2")
    try:
        why = l2.why_not_served(tier)
    except ConfigError as error:
        return problem(
            str(error).removeprefix(f"--l2 {tier.shown}").lstrip(": "), "change that, or leave the tier away"
        )
    if not why:
        return ok("answers")
    grade = problem if tier.required else warning  # the daemon starts, and tries again by itself
    return grade(
        f"does not serve: {why}", "check address, credentials and that it runs: nothing of it is used until then"
    )
