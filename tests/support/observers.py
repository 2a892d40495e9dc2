"""Observers of KV events that are installed as other packages are: a module and a dist-info folder on the path."""

from __future__ import annotations

from pathlib import Path

from kvserver.kv_events.types import GROUP

PROGRAM = '''
"""What a test wants of an observer, by the name of its factory."""
import json, os, threading

MADE = {}

class Keeps:
    """Writes the events it receives to a file, if there is one."""
    def __init__(self, name):
        self.name, self.events, self.closed, self.gate = name, [], threading.Event(), threading.Event()
        self.threads = set()
        MADE[name] = self
    def observe(self, event):
        self.threads.add(threading.current_thread())
        self.events.append(event)
        if "KEEPS_FILE" in os.environ:
            with open(os.environ["KEEPS_FILE"], "a") as file:
                file.write(type(event).__name__ + chr(10))
    def status(self):
        return {"kept": len(self.events)}
    def close(self):
        self.threads.add(threading.current_thread())
        self.closed.set()

class Raises(Keeps):
    def observe(self, event):
        super().observe(event)
        raise ValueError("cannot take " + type(event).__name__)

class Exits(Keeps):
    def observe(self, event):
        raise SystemExit(3)

class Stalls(Keeps):
    def observe(self, event):
        super().observe(event)
        self.gate.wait(60)

class StatusStalls(Keeps):
    def status(self):
        self.gate.wait(60)
        return {}

class Strange(Keeps):
    def status(self):
        return {"name": "me", "what": object()}

class Listed(Keeps):
    def status(self):
        return [1, 2]

class CloseRaises(Keeps):
    def close(self):
        super().close()
        raise OSError("disk full")

def keeps(context): return Keeps("keeps")
def other_keeps(context): return Keeps("other_keeps")
def raises(context): return Raises("raises")
def exits(context): return Exits("exits")
def stalls(context): return Stalls("stalls")
def status_stalls(context): return StatusStalls("status_stalls")
def strange(context): return Strange("strange")
def listed(context): return Listed("listed")
def close_raises(context): return CloseRaises("close_raises")
def declines(context): return None
def breaks(context): raise RuntimeError("no such host")
'''


def install(folder: Path, *factories: str, module: str = "observers_of_a_test") -> None:
    """Entry points of these names, each for the factory `name` of the module. `name=other` names another factory."""
    (folder / f"{module}.py").write_text(PROGRAM)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = (factory.partition("=") for factory in factories)
    points = [f"{name} = {module}:{other or name}" for name, _, other in lines]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points, ""]))
