"""The commands of `deploy/guides` do what the guides state: each page is carried out from top to bottom, by bash, beside a real daemon.

Changed are only the port of the status pages, where a free one stands in for 8080, and home, which is a folder of the test. A block that
needs what is not here is not run but read, and its test has the word in its name; those that need vLLM run in `vllm/test_vllm_guides.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.daemon import KVSERVER, Daemon
from support.guides import END, GUIDES, NEEDS, ROOT, Block, at_port, blocks_of, carried_out, environment_of
from support.ports import reserved_port

from kvserver.cache import MissReason

OWN_DAEMON = {"first-hour.md"}  # pages that start the daemon themselves


BLOCKS = [block for guide in GUIDES for block in blocks_of(guide)]
APART = [block for block in BLOCKS if block.needs]


def script_of(guide: Path, port: int) -> str:
    """All blocks that are run, in one shell. An engine that is made up takes the place of the first one that a page starts."""
    lines = [END]
    engine = 'coproc PYTHONPATH=$TESTS python -m support.guide_engine "$ENDPOINT"; read -r -u "${COPROC[0]}"'
    if guide.name not in OWN_DAEMON:
        lines.append(engine)
    for block in blocks_of(guide):
        if not block.needs:
            lines += [f"# {block}", at_port(block.commands, port)]
        elif guide.name in OWN_DAEMON and "vllm serve" in block.commands:
            lines.append(engine)
    return "\n".join(lines)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_the_commands_of_a_guide_work(guide: Path) -> None:
    reservation, port = reserved_port()
    daemon = Daemon(http_port=port, pin_share=0.5)  # for the guide of agents
    home = daemon.folder
    (home / "run/kvserver").mkdir(mode=0o700, parents=True)
    daemon.flags["endpoint"] = f"ipc://{home}/run/kvserver/kvserver.sock"
    try:
        if guide.name not in OWN_DAEMON:
            daemon.start()
        environment = environment_of(home, port) | {"ENDPOINT": daemon.endpoint}
        code, output = carried_out(script_of(guide, port), home, environment)
        assert code == 0, output
    finally:
        daemon.close()
        reservation.close()


@pytest.mark.parametrize("block", APART, ids=str)
def test_a_block_that_is_not_run_is_well_formed(block: Block) -> None:
    assert block.needs in NEEDS
    parsed = subprocess.run(["bash", "-n", "-c", block.commands], capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    for settings in re.findall(
        r"--kv-(?:transfer|events)-config '(\{.*?\}+)'(?=[\s\\])", block.commands + "\n", re.DOTALL
    ):
        assert json.loads(settings)
    help_of = {
        name: subprocess.run([KVSERVER, name, "--help"], capture_output=True, text=True).stdout
        for name in ("serve", "doctor", "status", "bench")
    }
    for name, flags in re.findall(r"^kvserver (\w+)(.*)$", block.commands, re.MULTILINE):
        assert all(flag in help_of[name] for flag in re.findall(r"--[\w-]+", flags))
    for target in re.findall(r"\bmake ((?:[\w-]+ ?)+)", block.commands):
        assert subprocess.run(["make", "-n", *target.split()], cwd=ROOT, capture_output=True).returncode == 0


def test_guides_name_metrics_and_reasons_that_there_are() -> None:
    """A pattern that nothing matches would print nothing, as one does of which nothing was counted."""
    daemon = Daemon().start()
    try:
        text = daemon.http("/metrics")[1]
    finally:
        daemon.close()
    ours = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    engines = set(re.findall(r"`(vllm:kvserver_\w+)`", (ROOT / "adapters/README.md").read_text()))
    reasons = {reason.value for reason in MissReason}
    for guide in GUIDES:
        page = guide.read_text()
        assert set(re.findall(r"\bvllm:kvserver_\w+", page)) <= engines
        assert set(re.findall(r"(?<![:\w])kvserver_\w+", page)) <= ours, guide
        assert set(re.findall(r'reason="(\w+)"', page)) <= reasons, guide
