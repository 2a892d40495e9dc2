"""The checks of `kvserver doctor` for engines that keep their KV cache on GPUs, one small function per check.

Owns: what CUDA and the daemon need of driver, build, devices, namespaces and GPU memory. Refuses to know: how findings
are shown, the rest of the machine (`checks`). It makes no CUDA context.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from kvserver.cli.checks import Finding, Machine, driver_version, ok, problem, size, uses_gpus, warning
from kvserver.config import GiB, MiB, gpu_node, parse_gpus

OLDEST_DRIVER = 580  # the oldest for CUDA 13, by CUDA's release notes
# An estimate: 200 to 700 MiB were reported, by GPU and driver (pytorch issues 28113 and 107667); the daemon has one kernel.
_CONTEXT_BYTES = GiB // 2
_STAGING_BYTES = 64 * MiB  # if the native module does not state it
_VLLM_SHARE = 0.92  # the default of --gpu-memory-utilization in vLLM 0.32; 0.9 before
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO and its neighbours in linux/proc_ns.h
_INITIAL_USER_NAMESPACE = "user:[4026531837]"


@dataclass(frozen=True)
class GpuFiles:
    """A GPU as the driver shows it under /proc."""

    model: str
    uuid: str  # question marks until the GPU was first used
    bus: str
    minor: str

    def __str__(self) -> str:
        return f"{self.model} {self.uuid} at {self.bus}"


def driver(machine: Machine) -> Finding:
    """The driver, and whether this build can use it."""
    version, gpus = driver_version(machine), machine.settings.gpus
    if not version:
        if parse_gpus(gpus):
            return problem(f"no GPU driver, but --gpus is {gpus}", "install NVIDIA's driver, or --gpus none")
        return ok("no GPU driver: CPU memory only")
    if gpus == "none":
        return ok(f"{version}; not used because of --gpus none")
    if not _built_with_cuda(machine):
        grade = problem if parse_gpus(gpus) else warning
        return grade(
            f"{version}, but this build of kvserver has no CUDA: engines on a GPU run without cache",
            "install CUDA 13's nvcc and then kvserver again from its sources: pip install --force-reinstall --no-deps .",
        )
    number = re.search(r"\d+", version)
    if number and int(number[0]) < OLDEST_DRIVER:
        return problem(
            f"{version} is too old for CUDA 13: engines on a GPU run without cache",
            f"install driver {OLDEST_DRIVER} or later on the host, or --gpus none",
        )
    return ok(f"{version}, this build has CUDA")


def devices(machine: Machine) -> Finding:
    """The GPUs, and the files that CUDA opens to use them."""
    if not uses_gpus(machine):
        return ok("none are used")
    gpus = _gpus(machine)
    if not gpus:
        return warning("the driver shows no GPU here: CPU memory only", _GIVE_GPUS)
    shown = "; ".join(f"{gpu}, {_node(machine, gpu)}" for gpu in gpus)
    known = {gpu.uuid for gpu in gpus}
    missing = [uuid for uuid in parse_gpus(machine.settings.gpus) if uuid not in known]
    if missing and not any("?" in uuid for uuid in known):
        return problem(f"{missing[0]} of --gpus is not there: {shown}", "give UUIDs that `nvidia-smi -L` shows here")
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.minor}" for gpu in gpus)):
        path = machine.root / "dev" / name
        if not path.exists():
            modprobe = "; on the host: nvidia-modprobe -u -c=0" if name == "nvidia-uvm" else ""
            return problem(f"/dev/{name} is not there, CUDA does not start: {shown}", _GIVE_GPUS + modprobe)
        if not machine.access(path, os.R_OK | os.W_OK):
            return problem(
                f"/dev/{name} may not be read and written by user {machine.uid}: {shown}",
                f"add the user to the group of that file (stat -c %G /dev/{name}); docker: --group-add",
            )
    return ok(shown)


def gpu_memory(machine: Machine) -> Finding:
    """The daemon's memory on each GPU. Engines are configured with a share of the GPU's whole memory, not of its free memory."""
    if not uses_gpus(machine):
        return ok("none is used")
    needed = _CONTEXT_BYTES + int(getattr(_native(machine), "GPU_STAGING_BYTES", _STAGING_BYTES))
    text = (
        f"the daemon uses about {size(needed)} of each GPU in use, {size(_CONTEXT_BYTES)} of them for its CUDA context "
        "by estimate"
    )
    if not (totals := _memory_bytes(machine)):
        return ok(
            f"{text}; engines must leave that: (1 - --gpu-memory-utilization) of the GPU's memory, which is not known"
        )
    total = min(totals)
    left = int((1 - _VLLM_SHARE) * total)
    if left >= needed:
        return ok(f"{text}; an engine with --gpu-memory-utilization {_VLLM_SHARE} leaves {size(left)} of {size(total)}")
    fits = (total - needed) * 100 // total / 100
    return warning(
        f"{text}; an engine with --gpu-memory-utilization {_VLLM_SHARE} leaves {size(left)} of {size(total)}",
        f"vllm serve --gpu-memory-utilization {fits:g}",
    )


def namespaces(machine: Machine) -> Finding:
    """Legacy CUDA IPC refuses an exporter whose pid, as a number, is the importer's: error 201."""
    pids, users = machine.link("proc/self/ns/pid"), machine.link("proc/self/ns/user")
    if not pids:
        return ok("not known")
    text = "the machine's pid namespace" if pids == _INITIAL_PID_NAMESPACE else "a pid namespace of its own"
    if users not in ("", _INITIAL_USER_NAMESPACE):
        text += "; a user namespace of its own: engines in another one are other users, and the daemon refuses them"
    if pids == _INITIAL_PID_NAMESPACE or not uses_gpus(machine):
        return ok(f"{text}; engines on CPU need not share it, and no engine needs a common ipc namespace")
    first = " and the daemon is pid 1 of it" if "kvserver" in machine.read("proc/1/cmdline") else ""
    return warning(
        f"{text}{first}: CUDA IPC between containers may fail: error 201 if an engine's worker "
        "has the same pid as the daemon, such as 1",
        "one pid namespace for both: docker --pid=host or --pid=container:NAME; compose: pid: service:NAME; Kubernetes: "
        "shareProcessNamespace in one pod, or hostPID",
    )


_GIVE_GPUS = (
    "docker: --gpus all, with the NVIDIA container toolkit; Kubernetes: a limit of nvidia.com/gpu; or --gpus none"
)


def _gpus(machine: Machine) -> list[GpuFiles]:
    found = []
    for folder in sorted((machine.root / "proc/driver/nvidia/gpus").glob("*")):
        text = machine.read(f"proc/driver/nvidia/gpus/{folder.name}/information")
        of = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        found.append(
            GpuFiles(
                of.get("Model", "a GPU"),
                of.get("GPU UUID", "GPU-?"),
                of.get("Bus Location", folder.name),
                of.get("Device Minor", "0"),
            )
        )
    return found


def _node(machine: Machine, gpu: GpuFiles) -> str:
    node = gpu_node(gpu.bus, machine.root)
    return "next to no memory node" if node is None else f"next to memory node {node}"


def _native(machine: Machine) -> Any:
    """The native module; None if it does not load, which another check reports."""
    try:
        return machine.load("kvserver._native")
    except Exception:
        return None


def _built_with_cuda(machine: Machine) -> bool:
    return bool(getattr(_native(machine), "built_with_cuda", lambda: False)())


def _memory_bytes(machine: Machine) -> list[int]:
    """Memory of each GPU that CUDA shows; [] if that is unknown."""
    try:
        return [memory_bytes for _uuid, _name, _pci, memory_bytes in _native(machine).cuda_gpus()]
    except Exception:
        return []
