"""A machine of its own whose PID 1 is a real systemd, with no unit but those of the test.

Namespaces keep it apart: of processes, mounts, network and control groups. /etc, /opt and /var are the machine's below a layer that ends
with it; /dev, /run and /tmp are new, /sys and /proc/sys cannot be written to. In place of `pip install`, /opt/kvserver is a venv that finds
the packages of the tests' own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from support.daemon import KVSERVER, wait_until

SYSTEMD = Path("/lib/systemd/systemd")
PACKAGES = sysconfig.get_path("purelib")
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_TARGETS = ("sysinit", "basic", "network", "multi-user", "shutdown")
_SHUT_OUT = ("/home/", "/root/", "/run/", "/tmp/", "/var/tmp/")  # by ProtectHome, PrivateTmp, or this machine
_UNSHARE = ["unshare", "-C", "-m", "-n", "-p", "-f", "--kill-child", "--mount-proc", "--propagation", "private"]
_HOST = f"""
set -e
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /sys
mount -t tmpfs -o mode=755 tmpfs /dev
for node in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    set -- $node
    mknod -m 666 /dev/$1 c $2 $3
done
ln -s pts/ptmx /dev/ptmx
mkdir -m 1777 /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
for folder in etc opt var; do
    mkdir -p /run/layers/$folder/new /run/layers/$folder/work
    mount -t overlay -o "lowerdir=/$folder,upperdir=/run/layers/$folder/new,workdir=/run/layers/$folder/work" overlay /$folder
done
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
for target in {" ".join(_TARGETS)}; do ln -s /lib/systemd/system/$target.target /etc/systemd/system; done
mkdir -p /opt/python /opt/kvserver/bin /opt/kvserver/lib/{_PYTHON}/site-packages
mount --bind {sys.base_prefix} /opt/python
mount -t tmpfs -o mode=1777 tmpfs /tmp
echo /opt/python/lib >/etc/ld.so.conf.d/python.conf && ldconfig
cd /opt/kvserver
echo "home = /opt/python/bin" >pyvenv.cfg
ln -s /opt/python/bin/{_PYTHON} bin/python
echo "import site; site.addsitedir('{PACKAGES}')" >lib/{_PYTHON}/site-packages/packages.pth
sed '1s|.*|#!/opt/kvserver/bin/python|' {KVSERVER} >bin/kvserver
chmod 755 bin/kvserver
exec env -i "PATH=$PATH" container=other SYSTEMD_UNIT_PATH=/etc/systemd/system \
    {SYSTEMD} --system --unit=multi-user.target --log-target=console --show-status=no
"""


def missing() -> str:
    """Why there can be no such machine here; "" if there can."""
    if os.getuid() != 0:
        return "only root can start it"
    if not SYSTEMD.exists() or shutil.which("systemctl") is None:
        return "it is not installed"
    if _own_group() is None:
        return "no control group can be made"
    if shut_out := [path for path in (PACKAGES, str(Path(__file__))) if path.startswith(_SHUT_OUT)]:
        return f"the unit shuts out {shut_out[0]}"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, timeout=20)
    return tried.stderr.strip()


def _own_group() -> Path | None:
    """The folder of this process's control group (version 2)."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"), None)
    name = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "")
    if root is None or not os.access(folder := root / name.lstrip("/"), os.W_OK):
        return None
    return folder


class Machine:
    """REQUIRES: `missing()` is "", and close()."""

    def __init__(self) -> None:
        """AssertionError, with the log of its start, if systemd does not start."""
        group = _own_group()
        assert group is not None
        self._group = group / f"kvserver-test-{os.getpid()}"
        self._group.mkdir()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, until close()
        enter = f'echo $$ >"{self._group}/cgroup.procs" && exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", enter, "sh", "setpriv", "--pdeathsig", "KILL", *_UNSHARE, "sh", "-c", _HOST],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        try:
            wait_until(self._runs, 20, "systemd has started")
        except AssertionError as error:
            log = self.log
            self.close()
            raise AssertionError(f"{error}\n{log}") from None

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _runs(self) -> bool:
        assert self._process.poll() is None, "it has ended"
        return self._init() > 0 and "running" in self.run("systemctl is-system-running", check=False)

    def _init(self) -> int:
        """The id of its PID 1 outside; 0: none yet."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def run(self, script: str, check: bool = True) -> str:
        """What this script of root's prints there, errors among it. AssertionError if it fails."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._init()), "-C", "-m", "-n", "-p", "bash", "-ec", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def close(self) -> None:
        self._process.kill()  # and with it PID 1, and all that it started
        self._process.wait()
        self._log.close()
        wait_until(lambda: not self._remove_groups(), 10, "its processes have ended")

    def _remove_groups(self) -> bool:
        """True while one is left."""
        for folder, _, _ in os.walk(self._group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return self._group.exists()
