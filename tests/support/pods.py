"""The daemon's container of an overlay, run without a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from support.containers import OVERLAYS, built, container, refusals
from support.daemon import KVSERVER, fetch, wait_until
from support.ports import reserved_port

TOKEN = "0123456789abcdef" * 4


class Pod:
    """The daemon's container, run as it is written but for its port, which this machine chooses, and less L1."""

    def __init__(self, name: str, contained: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvk-"))
        self.container = container(built(OVERLAYS / name), "kvserver")
        self.folders = {volume: self.folder / volume for volume in self.container.mounts}
        for folder in self.folders.values():
            folder.mkdir()
        self.folders["socket"].chmod(0o777)  # as the kubelet makes an emptyDir
        self._write_token()
        self.reservation, self.port = reserved_port()
        self.environment = self.container.environment | {
            "KVSERVER_HTTP_PORT": str(self.port),
            "KVSERVER_L1_SIZE": "64MiB",
        }
        path = f"{Path(KVSERVER).parent}:/usr/bin:/bin"
        self.filter = refusals() if contained else -1
        if contained:
            words = self.container.command(self.folders, self.environment | {"PATH": path}, self.filter)
            environment = {"PATH": path}
        else:
            environment = {name: self.mapped(value) for name, value in self.environment.items()} | {"PATH": path}
            words = [self.mapped(word) for word in self.container.words(environment)]
        kept = () if self.filter < 0 else (self.filter,)
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(words, env=environment, cwd="/", pass_fds=kept, stdout=log, stderr=log)

    def _write_token(self) -> None:
        """As the kubelet does: root's file, for the group, behind two links."""
        volume = self.folders["http-token"]
        (volume / "..2026").mkdir()
        (volume / "..2026/http-token").write_text(TOKEN)
        (secret,) = (v["secret"] for v in self.container.pod["volumes"] if v["name"] == "http-token")
        (volume / "..2026/http-token").chmod(secret["defaultMode"])
        (volume / "..data").symlink_to("..2026")
        (volume / "http-token").symlink_to("..data/http-token")

    def mapped(self, text: str) -> str:
        """With the folder of each volume in place of its mount."""
        for name, mount in self.container.mounts.items():
            text = text.replace(mount["mountPath"], str(self.folders[name]))
        return text

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def probe(self, name: str) -> bool:
        """One try of a probe."""
        probe = self.container.spec[name]["httpGet"]
        assert self.container.port(probe["port"]) == int(self.container.environment["KVSERVER_HTTP_PORT"])
        try:
            return fetch(f"http://127.0.0.1:{self.port}{probe['path']}")[0] < 400
        except OSError:
            return False

    def wait_for(self, name: str) -> None:
        """As long as the kubelet tries."""
        probe = self.container.spec[name]
        seconds = probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe.get("failureThreshold", 3)
        wait_until(lambda: self.probe(name) or self.process.poll() is not None, seconds, name)
        assert self.process.poll() is None, self.log

    def end(self) -> float:
        """Seconds from SIGTERM to the end."""
        began = time.monotonic()
        descendants = self.process.pid if not self.contained else self._inner()
        os.kill(descendants, signal.SIGTERM)
        assert self.process.wait(30) == 0, self.log
        return time.monotonic() - began

    @property
    def contained(self) -> bool:
        return Path(str(self.process.args[0])).name == "bwrap"  # type: ignore[index]

    def _inner(self) -> int:
        """The daemon's process: bwrap's only child has its own only child."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid

    def close(self) -> None:
        if self.filter >= 0:
            os.close(self.filter)
        self.process.kill()
        self.process.wait()
        self.reservation.close()
        shutil.rmtree(self.folder)
