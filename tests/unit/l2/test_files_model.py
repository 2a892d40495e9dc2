"""Random walks of the file tier beside a plain dict: what it returns is what was put last, or a miss."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from support.file_tiers import FileRig, key_of, keys_of, name_of
from support.properties import Dice, examples, walks

from kvserver.l2 import ObjectName, TierOutcome

NAMESPACES = (b"n" * 32, b"n" * 64, b"o" * 32)


@given(walks(40))
@examples(25)
def test_walks_agree_with_a_plain_model(walk: list[Dice]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rig = FileRig(Path(folder) / "tier", "1MiB").opened().watched()
        try:
            model: dict[ObjectName, tuple[int, int]] = {}  # bytes and version
            evicted = False
            for step, dice in enumerate(walk):
                name = name_of(dice.randrange(6), dice.choice(NAMESPACES), dice.randrange(2))
                match dice.choice(("put", "put", "put", "get", "drop", "clear", "reopen")):
                    case "put":
                        size = 8 + step * 512 + dice.randrange(512)  # of each put another one
                        first = int.from_bytes(name.key, "big")
                        names = [name._replace(key=key_of(first + each)) for each in range(dice.choice((1, 2, 4)))]
                        begun = []
                        for each, after in zip(names, [b"", *names], strict=False):
                            model.pop(each, None)
                            begun.append(rig.begin_put(each, size, parent=after and after.key, version=step))
                        for each, (ticket, memory) in zip(names, begun, strict=True):
                            if rig.end(ticket).outcome is TierOutcome.DONE:
                                model[each] = (size, step)
                            rig.l1.free(memory)
                    case "get" if name in model:
                        size, version = model[name]
                        if rig.get(name, size, version=version) is not TierOutcome.DONE:
                            assert evicted, "nothing else may lose it"
                            del model[name]
                    case "drop":
                        number = int.from_bytes(name.key, "big")
                        rig.tier.drop(name.namespace, name.group, keys_of(number))
                        model.pop(name, None)
                    case "clear":
                        assert rig.clear(name.namespace) is TierOutcome.DONE
                        model = {
                            each: kept for each, kept in model.items() if not each.namespace.startswith(name.namespace)
                        }
                    case "reopen":
                        rig.written().close()
                        rig = FileRig(Path(folder) / "tier", "1MiB", l1=rig.l1).opened().watched()
                evicted |= rig.tier.status().evictions > 0
                held = {
                    name_of(number, namespace, group)
                    for namespace in NAMESPACES
                    for group in (0, 1)
                    for number in rig.holds(*range(9), namespace=namespace, group=group)
                }
                assert rig.walked() == rig.reported == held
                assert held <= model.keys(), "it was dropped or cleared"
                assert rig.tier.status().used_bytes <= 1 << 20
                assert rig.tier.status().corrupt == 0
        finally:
            rig.close()
