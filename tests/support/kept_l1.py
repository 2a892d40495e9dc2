"""Prompts that are stored before a restart of a daemon with --l1-file and looked up after it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserver.protocol import LookupReply
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys


@dataclass
class Prompt:
    """Chunks that were stored, and their content."""

    keys: list[bytes]
    content: list[bytes]


def store_prompt(daemon: Daemon, chunks: int = 3, **options: Any) -> Prompt:
    with Worker(daemon.endpoint, **options) as worker:
        blocks = worker.blocks_for(chunks)
        prompt = Prompt(make_keys(chunks), worker.memory.blocks(blocks))
        assert worker.store(prompt.keys, blocks).stored == chunks
        return prompt


def hits(daemon: Daemon, prompt: Prompt, **options: Any) -> int:
    """The chunks that a new engine finds of the prompt. AssertionError if one has another content."""
    with Worker(daemon.endpoint, **options) as worker:
        found = worker.lookup(prompt.keys)
        blocks = worker.blocks_for(found)
        worker.memory.fill()
        if found:
            assert worker.load(prompt.keys[:found], blocks).chunks == found
        content = worker.memory.blocks(blocks)
        assert content == prompt.content[: len(content)], "a wrong byte"
        return found


def tail_blocks(daemon: Daemon, prompt: Prompt, tail: list[bytes], **options: Any) -> int:
    """Blocks of the prompt's last chunk that a new engine finds behind its chunks."""
    with Worker(daemon.endpoint, tails=True, **options) as worker:
        message = worker.lookup_message(prompt.keys, tail_keys=b"".join(tail))
        return worker.ask(message, LookupReply).tail_blocks


def restart(daemon: Daemon, **flags: Any) -> Daemon:
    """End it by SIGTERM and start it again, with these flags changed; returns when it has adopted what it keeps."""
    assert daemon.terminate() == 0, daemon.log
    return start(daemon, **flags)


def start(daemon: Daemon, **flags: Any) -> Daemon:
    daemon.flags |= flags
    (daemon.folder / "log").unlink()
    daemon.start()
    wait_until(lambda: "L1 kept" in daemon.log or "L1 begins empty" in daemon.log, 120, what="L1 is adopted")
    return daemon


def state_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


def refusal(daemon: Daemon) -> str:
    """The one line with which a daemon with these flags ends."""
    ended = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.strip().splitlines()
    return line
