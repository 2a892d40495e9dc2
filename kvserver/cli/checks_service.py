"""The checks of `kvserver doctor` on the installation and vLLM, one small function per check.

Owns: whether they exist and fit each other. Refuses to know: the machine (`checks`), the daemon that runs (`checks_daemon`). It
must work if the rest does not, so it imports nothing else of the daemon, and imports vLLM only in a separate process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvserver import __version__
from kvserver.cli.checks import Finding, Machine, ok, problem, warning

OLDEST_VLLM = (0, 27, 1)
_IMPORT_SECONDS = 180.0

# ---- the installation ---------------------------------------------------------------------------------


def native_module(machine: Machine) -> Finding:
    try:
        machine.load("kvserver._native")
    except Exception as error:
        return problem(
            f"the native module does not load: {error}",
            f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps . (in kvserver's sources)",
        )
    return ok("the native module loads")


def endpoint_folder(machine: Machine) -> Finding:
    url = machine.settings.endpoint
    if not url.startswith("ipc://"):
        return ok(f"{url} needs no folder")
    folder = Path(url.removeprefix("ipc://")).parent
    if len(url.removeprefix("ipc://").encode()) > 97:
        return problem(f"{url} is too long for a Unix socket", "kvserver serve --endpoint ipc:///tmp/kv/kv.sock")
    try:
        found = folder.stat()
    except FileNotFoundError:
        parent = next(path for path in folder.parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok(f"{folder} is not there yet; the daemon makes it")
        return problem(
            f"{folder} is not there and {parent} is not writable",
            f"sudo install -d -m 700 -o {machine.uid} {shlex.quote(str(folder))}, or give --endpoint",
        )
    except OSError as error:
        return problem(f"{folder}: {error.strerror}", "kvserver serve --endpoint ipc:///a/folder/of/yours/kv.sock")
    quoted = shlex.quote(str(folder))
    if not stat.S_ISDIR(found.st_mode):
        return problem(f"{folder} is no folder", "kvserver serve --endpoint ipc:///a/folder/of/yours/kv.sock")
    if found.st_uid not in (machine.uid, 0):
        return problem(
            f"{folder} belongs to user {found.st_uid}, which could answer in place of the daemon",
            f"sudo chown {machine.uid} {quoted}, or give --endpoint",
        )
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        return problem(f"{folder} is writable for every user", f"chmod 700 {quoted}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return problem(f"{folder} is not writable", f"sudo chown {machine.uid} {quoted}, or give --endpoint")
    return ok(f"{folder} is yours")


# ---- vLLM ---------------------------------------------------------------------------------------

# Runs in vLLM's environment. The last line is JSON; imports of engines may print lines before.
_PROBE = """
import json
found = {}
try:
    import vllm
    found["vllm"] = vllm.__version__
except ImportError as error:
    found["vllm_error"] = str(error)
try:
    import kvserver
    found["kvserver"] = kvserver.__version__
    if "vllm" in found:
        from kvserver.adapters.vllm import KVServerConnector
except Exception as error:
    found["kvserver_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def vllm(machine: Machine) -> Finding:
    python = os.path.abspath(machine.python) if os.sep in machine.python else machine.python or sys.executable
    pip = f"{shlex.quote(python)} -m pip install"
    try:
        found = _probe(python)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return problem(f"{python} does not run: {error}", "give --python PATH, the interpreter that runs vLLM")
    if "vllm" not in found:
        if "No module named 'vllm'" not in found["vllm_error"]:
            return problem(f"vLLM does not import in {python}: {found['vllm_error']}", f"{pip} --upgrade vllm")
        if machine.python:
            return problem(f"there is no vLLM in {python}", "give --python PATH, the interpreter that runs vLLM")
        return warning(
            f"there is no vLLM beside this command ({python})", "kvserver doctor --python PATH/TO/VLLM/python"
        )
    version = str(found["vllm"])
    if (0, 2) <= _release(version) < OLDEST_VLLM:  # builds from source may call themselves 0.1
        return problem(
            f"vLLM {version} is too old for the connector", f"{pip} 'vllm>={'.'.join(map(str, OLDEST_VLLM))}'"
        )
    if "kvserver" not in found:
        return problem(f"vLLM {version}: kvserver is not in its environment", f"{pip} . (in kvserver's sources)")
    if "kvserver_error" in found:
        return problem(
            f"vLLM {version}: the connector does not import: {found['kvserver_error']}", f"{pip} --upgrade ."
        )
    if found["kvserver"] != __version__:
        return warning(
            f"vLLM {version} has the connector of kvserver {found['kvserver']}, this is {__version__}",
            f"{pip} --upgrade . (in kvserver's sources)",
        )
    return ok(f"vLLM {version} in {python}, and it imports the connector")


def _probe(python: str) -> dict[str, Any]:
    """Runs in the root folder, so that no sources in the present folder are imported for an installed package."""
    ended = subprocess.run(
        [python, "-c", _PROBE], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=True, cwd="/"
    )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)
