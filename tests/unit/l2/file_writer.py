"""A process that writes, drops and clears in a folder until it is killed: `file_writer.py FOLDER SEED SIZE`.

It prints a line before each clear begins, and one when it has ended as done.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.file_tiers import NAMESPACE, FileRig, SmallL1, key_of, keys_of, name_of

from kvserver.l2 import TierOutcome

NUMBERS = 60


def sizes_of(number: int) -> tuple[int, ...]:
    """Neighbours have the same, so that they share units."""
    chain = number // 5
    return tuple(random.Random(chain).choices((8, 4096, 9000, 20_000), k=1 + chain % 3))


def main(folder: str, seed: int, size: str) -> None:
    dice = random.Random(seed)
    rig = FileRig(Path(folder), size, l1=SmallL1(2048)).opened()
    assert rig.tier.state == "ready", rig.tier.failure
    version = seed * 1_000_000
    print("ready", flush=True)
    while True:
        version += 1
        begun = []
        numbers = [
            first + place for first in dice.sample(range(0, NUMBERS, 5), 3) for place in range(dice.randint(1, 5))
        ]
        for number in numbers:
            rig.tier.drop(NAMESPACE, 0, keys_of(number))
            parent = key_of(number - 1) if number % 5 else b""
            begun.append((*rig.begin_put(name_of(number), *sizes_of(number), parent=parent, version=version), number))
        if dice.random() < 0.1:
            print("clearing", version, flush=True)
            ticket = rig.tier.clear(NAMESPACE)
            if rig.end(ticket).outcome is TierOutcome.DONE:
                print("cleared", version, flush=True)
        for ticket, memory, _ in begun:
            rig.end(ticket)
            rig.l1.free(memory)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
