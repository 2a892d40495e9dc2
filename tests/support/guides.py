"""The guides of `deploy/guides` as tests carry them out: each page from top to bottom, by bash.

What a block needs that is not on every machine is written before it, as `<!-- needs: WORD -->`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

from .daemon import KVSERVER

ROOT = Path(__file__).parent.parent.parent
GUIDES = sorted((ROOT / "deploy/guides").glob("*.md"))
FENCE = re.compile(r"(?:<!-- needs: (?P<needs>\w+) -->\n *)?```sh\n(?P<commands>.*?)\n *```", re.DOTALL)
NEEDS = {
    "gpu": "A GPU and its driver.",
    "vllm": "An engine with a model: tests/vllm/test_vllm_guides.py starts one.",
    "sglang": "An engine with a model: tests/sglang/test_sglang_examples.py parses its flags.",
    "router": "A router of others: test_routers.py starts it, in the long set.",
    "bench": "Minutes of real engines: its page states what it printed.",
    "docker": "A container engine: test_operator_deploy.py takes the steps of the Dockerfile.",
    "kubernetes": "A cluster: test_runbooks.py compares them with the pods that deploy/kubernetes makes.",
    "build": "Minutes of a compiler: test_packages.py makes and installs the packages.",
}
END = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"


@dataclass
class Block:
    guide: Path
    number: int
    needs: str
    commands: str

    def __str__(self) -> str:
        return f"{self.guide.stem}-{self.number}" + (f"-needs-{self.needs}" if self.needs else "")


def blocks_of(guide: Path) -> list[Block]:
    found = FENCE.finditer(guide.read_text())
    return [
        Block(guide, number, match["needs"] or "", textwrap.dedent(match["commands"]))
        for number, match in enumerate(found, 1)
    ]


def at_port(commands: str, port: int, instead: int = 8080) -> str:
    return re.sub(rf"\b(localhost|127\.0\.0\.1):{instead}\b", rf"\1:{port}", commands)


def environment_of(home: Path, port: int) -> dict[str, str]:
    """Home is a folder of the test; the status pages are at this port."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVSERVER_")},
        "PATH": f"{Path(KVSERVER).parent}:{os.environ['PATH']}",
        "TESTS": str(ROOT / "tests"),
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "KVSERVER_HTTP_PORT": str(port),
    }


def carried_out(script: str, folder: Path, environment: dict[str, str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and output. Whatever it started has ended."""
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            ["bash", "-eux", "-o", "pipefail", "-c", script],
            cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()
