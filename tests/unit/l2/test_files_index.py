"""The index of a file tier against a plain model, and its memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from support.file_tiers import key_of, keys_of
from support.properties import Dice, examples, walks

from kvserver._native import RecordTable

NAMESPACE, FILE = b"n" * 32, 77
Name = tuple[int, int, int]  # generation, group, number
NUMBERS = 56  # a unit begins with one of the first 40


def extents(*pairs: tuple[int, int]) -> bytes:
    return b"".join(first.to_bytes(4, "little") + count.to_bytes(4, "little") for first, count in pairs)


def parts(where: bytes, count: int) -> list[bytes]:
    """Extents of equal parts, joined where they touch."""
    pairs = memoryview(where).cast("I").tolist()
    pages = [page for first, size in zip(pairs[::2], pairs[1::2], strict=True) for page in range(first, first + size)]
    each = len(pages) // count
    found = []
    for at in range(0, len(pages), each):
        runs: list[tuple[int, int]] = []
        for page in pages[at : at + each]:
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        found.append(extents(*runs))
    return found


@dataclass(eq=False)
class Unit:
    """Names that were added together; `parent` counts while it has one."""

    names: list[Name]
    parent: Unit | None
    age: int


@dataclass
class Model:
    """Records by name, and what eviction chooses: the last record of the oldest unit that is no other unit's parent."""

    records: dict[Name, tuple[int, bytes]] = field(default_factory=dict)
    units: dict[Name, Unit] = field(default_factory=dict)
    clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, names: list[Name], parent: Name | None, meaning: int, where: bytes) -> None:
        unit = Unit(list(names), self.units.get(parent) if parent else None, next(self.clock))
        for name, part in zip(names, parts(where, len(names)), strict=True):
            self.records[name], self.units[name] = (meaning, part), unit

    def remove(self, name: Name) -> bytes:
        self.units.pop(name).names.remove(name)
        return self.records.pop(name)[1]

    def touch(self, name: Name) -> None:
        if name in self.units:
            self.units[name].age = next(self.clock)

    def victim(self) -> Name | None:
        units = set(self.units.values())
        leaves = units - {unit.parent for unit in units}
        return min(leaves, key=lambda unit: unit.age).names[-1] if leaves else None


def names_in(table: RecordTable) -> list[Name]:
    return [
        (generation, group, number)
        for generation in (1, 2)
        for group in (0, 1)
        for number in range(NUMBERS)
        if table.find(NAMESPACE, generation, group, key_of(number)) is not None
    ]


def walked(table: RecordTable, most: int) -> list[Name]:
    """By slices of so many places; a name that is there twice is so here."""
    found: list[Name] = []
    at: int | None = 0
    while at is not None:
        at, slices = table.walk(at, most)
        assert sum(len(keys) for *_, keys in slices) <= most * 32
        for namespace, generation, group, keys in slices:
            assert namespace == NAMESPACE
            found += [(generation, group, int.from_bytes(keys[i : i + 32], "big")) for i in range(0, len(keys), 32)]
    return sorted(found)


@given(walks(60))
@examples(150)
def test_random_changes_agree_with_a_plain_model_and_the_journal_replays_them(walk: list[Dice]) -> None:
    table, model, log = RecordTable(5), Model(), b""
    table.begin_log(FILE, 0)
    page = itertools.count(1)
    for dice in walk:
        name = (dice.choice((1, 2)), dice.choice((0, 1)), dice.randrange(40))
        generation, group, number = name
        match dice.choice(("add", "add", "add", "remove", "touch", "evict", "drop_space", "log")):
            case "add":
                names = [(generation, group, each) for each in range(number, number + dice.choice((1, 1, 2, 5, 16)))]
                names = list(itertools.takewhile(lambda each: each not in model.records, names))
                if not names:
                    continue
                parent = (generation, group, number - 1)
                sizes = [len(names) * dice.randint(1, 4) for _ in range(dice.choice((1, 1, 3)))]
                where = extents(*[(next(page) * 100, size) for size in sizes])
                keys = b"".join(key_of(each[2]) for each in names)
                table.add(NAMESPACE, generation, group, keys, key_of(number - 1) if number else b"", number, where)
                model.add(names, parent if number else None, number, where)
            case "remove":
                expected = model.remove(name) if name in model.records else None
                assert table.remove(NAMESPACE, generation, group, key_of(number)) == expected
            case "touch":
                numbers = [dice.randrange(NUMBERS) for _ in range(3)]
                table.touch(NAMESPACE, generation, group, b"".join(map(key_of, numbers)))
                for each in reversed(numbers):
                    model.touch((generation, group, each))
            case "evict":
                victim, evicted = model.victim(), table.evict()
                if victim is None:
                    assert evicted is None
                else:
                    assert evicted == (NAMESPACE, victim[1], key_of(victim[2]), model.remove(victim))
            case "drop_space":
                gone = [other for other in model.records if other[:2] == name[:2]]
                assert table.drop_space(NAMESPACE, generation, group) == bool(gone)
                freed = sorted(model.remove(other) for other in gone)
                swept = b""
                while not table.swept:
                    swept += table.sweep(dice.randint(1, 9))
                assert sorted(memoryview(swept).cast("Q").tolist()) == sorted(
                    memoryview(b"".join(freed)).cast("Q").tolist()
                )
            case "log":
                log += table.drain_log()
        assert len(table) == len(model.records)
        held = table.holds(NAMESPACE, generation, group, b"".join(map(key_of, range(NUMBERS))))
        assert held == sum(1 << each for each in range(NUMBERS) if (generation, group, each) in model.records)
    assert names_in(table) == sorted(model.records)
    assert walked(table, most=len(walk) % 7 + 1) == sorted(model.records)
    assert table.spaces() == [] if not model.records else len(table.spaces()) <= 4
    log += table.drain_log()
    again = RecordTable(6)
    assert again.replay(log, FILE, 0)[0] == len(log)
    again.link_orphans()
    compacted = compact(table)
    for replayed in (again, compacted):
        for name, (meaning, where) in model.records.items():
            assert replayed.find(NAMESPACE, name[0], name[1], key_of(name[2])) == (meaning, where, True)
    assert len(compacted) == len(model.records)
    assert table.live_journal_bytes >= compacted.live_journal_bytes >= table.live_journal_bytes * 0.7
    assert [table.evict() for _ in range(len(table) + 1)] == [compacted.evict() for _ in range(len(compacted) + 1)]
    assert table.live_journal_bytes == 0


def compact(table: RecordTable) -> RecordTable:
    """A table that a replay of this one's next journal has filled."""
    table.begin_next_log(FILE + 1)
    log = b""
    while not table.fill_next_log(3):
        log += table.drain_next_log()
    log += table.drain_next_log()
    table.switch_logs()
    again = RecordTable(7)
    assert again.replay(log, FILE + 1, 0)[0] == len(log)
    again.link_orphans()
    return again


def test_a_compacted_log_has_the_same_records_ages_and_parents_whatever_changes_meanwhile() -> None:
    table = RecordTable(1)
    table.begin_log(FILE, 0)
    for number in range(0, 100, 5):  # chains of ten: a unit of four and a record, twice
        after = key_of(number - 1) if number % 10 else b""
        table.add(NAMESPACE, 1, 0, keys_of(*range(number, number + 4)), after, 9, extents((number + 1, 4)))
        table.add(NAMESPACE, 1, 0, key_of(number + 4), key_of(number + 3), 9, extents((number + 5, 1)))
    table.touch(NAMESPACE, 1, 0, b"".join(map(key_of, range(30, 40))))
    table.begin_next_log(FILE + 1)
    log, turn = b"", 0
    while not table.fill_next_log(7):
        log += table.drain_next_log()
        table.remove(NAMESPACE, 1, 0, key_of(99 - turn))
        table.remove(NAMESPACE, 1, 0, key_of(turn * 5 + 9))
        table.add(NAMESPACE, 1, 0, key_of(200 + turn), b"" if turn else key_of(60), 9, extents((200 + turn, 1)))
        turn += 1
    log += table.drain_next_log()
    table.switch_logs()
    table.add(NAMESPACE, 1, 0, key_of(300), b"", 9, extents((300, 1)))
    log += table.drain_log()
    again = RecordTable(2)
    assert again.replay(log, FILE + 1, 0)[0] == len(log)
    again.link_orphans()
    order = [evicted[2] for evicted in iter(table.evict, None)]
    assert [evicted[2] for evicted in iter(again.evict, None)] == order
    assert len(order) > 60


def test_a_compacted_log_names_true_ancestors_so_all_is_evicted_after_its_replay() -> None:
    """The records behind one that left the middle of a unit descend from none that took its place."""
    table = RecordTable(1)
    table.begin_log(FILE, 0)

    def add(first: int, count: int, parent: int | None, page: int) -> None:
        behind = key_of(parent) if parent is not None else b""
        table.add(NAMESPACE, 1, 0, keys_of(*range(first, first + count)), behind, 0, extents((page, count)))

    add(9, 1, None, 1)
    add(0, 4, None, 10)
    for gone in (1, 2, 9):
        table.remove(NAMESPACE, 1, 0, key_of(gone))
    add(1, 2, 0, 20)  # in the place of 9: its entry comes before that of its parent
    table.begin_next_log(FILE + 1)
    assert not table.fill_next_log(1)
    table.remove(NAMESPACE, 1, 0, key_of(3))
    add(3, 1, 2, 30)
    while not table.fill_next_log(9):
        pass
    again = RecordTable(2)
    again.replay(table.drain_next_log(), FILE + 1, 0)
    again.link_orphans()
    evicted = [again.evict(), again.evict(), again.evict(), again.evict()]
    assert [each[2] for each in evicted if each is not None] == [key_of(number) for number in (3, 2, 1, 0)]


@pytest.mark.parametrize("damage", ["other file", "other sequence", "a bit", "the end"])
def test_replay_ends_at_the_first_entry_that_is_not_the_next_one(damage: str) -> None:
    table = RecordTable(1)
    table.begin_log(FILE, 0)
    for number in range(10):
        table.add(NAMESPACE, 1, 0, key_of(number), b"", 9, extents((number + 1, 1)))
    log = table.drain_log()
    entry = len(log) // 10
    again = RecordTable(1)
    match damage:
        case "other file":
            assert again.replay(log, FILE + 1, 0) == (0, 0)
        case "other sequence":
            assert again.replay(log, FILE, 1) == (0, 1)
            assert again.replay(log[:entry] + log[2 * entry :], FILE, 0) == (entry, 1)
        case "a bit":
            for at in range(4 * entry, 5 * entry):
                flipped = log[:at] + bytes([log[at] ^ 16]) + log[at + 1 :]
                assert RecordTable(1).replay(flipped, FILE, 0) == (4 * entry, 4)
        case "the end":
            assert again.replay(log[: 5 * entry - 1], FILE, 0) == (4 * entry, 4)
            assert again.replay(log[4 * entry :], FILE, 4) == (6 * entry, 10)
            assert len(again) == 10


def test_a_journal_cut_anywhere_has_whole_units_and_no_part_of_one() -> None:
    table = RecordTable(1)
    table.begin_log(FILE, 0)
    sizes, ends, log = (3, 1, 16, 2), [0], b""
    for unit, size in enumerate(sizes):
        first = 100 * unit
        after = key_of(first - 100) if unit else b""
        table.add(NAMESPACE, 1, 0, keys_of(*range(first, first + size)), after, 9, extents((first + 1, 2 * size)))
        log += table.drain_log()
        ends.append(len(log))
    for cut in range(len(log) + 1):
        again = RecordTable(2)
        whole = sum(end <= cut for end in ends) - 1
        assert again.replay(log[:cut], FILE, 0) == (ends[whole], whole)
        assert len(again) == sum(sizes[:whole])
    for at in range(ends[2], ends[3]):
        flipped = log[:at] + bytes([log[at] ^ 1 << at % 8]) + log[at + 1 :]
        assert RecordTable(1).replay(flipped, FILE, 0) == (ends[2], 2)


def test_a_record_of_a_unit_on_pages_of_others_is_dropped_alone() -> None:
    table = RecordTable(1)
    table.add(NAMESPACE, 1, 0, key_of(9), b"", 9, extents((12, 2)))
    table.add(NAMESPACE, 1, 0, keys_of(1, 2, 3), b"", 9, extents((10, 6)))
    assert table.check_extents(1, 100) == (1, extents((1, 9), (16, 84)))
    assert table.holds(NAMESPACE, 1, 0, keys_of(1, 2, 3)) == 0b101


def test_records_outside_the_file_or_on_pages_of_others_are_dropped_durably() -> None:
    table = RecordTable(1)
    good = [extents((1, 3)), extents((10, 1), (12, 1))]
    bad = [extents((0, 1)), extents((2, 1)), extents((20, 1), (12, 2)), extents((99, 2)), extents((30, 2), (31, 1))]
    for number, where in enumerate([*good, *bad]):
        table.add(NAMESPACE, 1, 0, key_of(number), b"", 9, where)
    table.begin_log(FILE, 0)
    dropped, free = table.check_extents(1, 100)
    assert (dropped, len(table)) == (len(bad), len(good))
    assert free == extents((4, 6), (11, 1), (13, 87))
    assert len(table.drain_log()) > 0
    assert table.check_extents(1, 100) == (0, free)


@pytest.mark.parametrize(("unit", "most"), [(1, 120), (4, 65), (16, 52)])
def test_an_object_uses_little_memory_also_where_records_were_replaced(unit: int, most: int) -> None:
    table = RecordTable(1)
    count = 96_000

    def fill() -> None:
        for number in range(0, count, unit):
            parent = key_of(number - 1) if number else b""
            keys = keys_of(*range(number, number + unit))
            table.add(NAMESPACE, 1, 0, keys, parent, 9, extents((number + 1, unit)))

    fill()
    assert table.memory_bytes / count <= most
    for _ in range(2):
        while table.evict() is not None:
            pass
        fill()
        for number in range(count):
            table.touch(NAMESPACE, 1, 0, key_of(number))
    assert table.memory_bytes / count <= most, "records that were replaced leave nothing behind"


@pytest.mark.parametrize("keys", [b"", b"k" * 31, b"k" * 33])
def test_what_is_no_key_is_refused(keys: bytes) -> None:
    table = RecordTable(1)
    with pytest.raises(ValueError, match="key"):
        table.find(NAMESPACE, 1, 0, keys)
    with pytest.raises(ValueError, match="128"):
        table.holds(b"", 1, 0, b"")
    for where in (b"", extents((1, 3))):
        with pytest.raises(ValueError, match="extents"):
            table.add(NAMESPACE, 1, 0, keys_of(1, 2), b"", 9, where)
    for count in (0, 17):
        with pytest.raises(ValueError, match="1 to 16"):
            table.add(NAMESPACE, 1, 0, keys_of(*range(count)), b"", 9, extents((1, 17)))
