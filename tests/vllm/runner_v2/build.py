"""`python tests/vllm/runner_v2/build.py FOLDER`: Triton without its backends, and this package as its only one and as vLLM's plugin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
ENTRY_POINTS = """\
[triton.backends]
cpu = runner_v2
[vllm.general_plugins]
runner_v2 = runner_v2.plugin:install
"""


def build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-compile"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), "-c", str(CONSTRAINTS), "triton"], check=True)
    for backend in ("nvidia", "amd"):  # half a gigabyte; each would look for its GPU
        shutil.rmtree(folder / "triton" / "backends" / backend)
    (metadata,) = folder.glob("triton-*.dist-info")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / HERE.name).symlink_to(HERE.resolve())
    (folder / ".built").touch()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
