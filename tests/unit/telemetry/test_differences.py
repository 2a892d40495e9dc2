"""Which fields differ between two namespaces, as far as they are remembered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.registration import identity, registration

from kvserver.cache import fingerprint, with_variant
from kvserver.events import NamespaceFormed
from kvserver.protocol import Counted, Plane
from kvserver.telemetry.differences import MOST_BYTES, MOST_FIELDS, Differences

SPEC = registration(model_name="m", planes=[Plane(0, 0, 512, 512)], layout="NHD")


def registered(differences: Differences, instance_id: str = "e", **changes: Any) -> bytes:
    spec = msgspec.structs.replace(SPEC, instance_id=instance_id, **changes)
    namespace = fingerprint([spec])
    differences.formed(NamespaceFormed(0, instance_id, "m", namespace, (spec,)))
    return namespace


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"counted": identity(dtype="float16")}, ["dtype"]),
        ({"counted": identity()[1:]}, ["model"]),
        ({"block_tokens": 32, "chunk_blocks": 2}, ["groups"]),
        ({"chunk_blocks": 8}, ["chunk_tokens"]),
        ({"replicated": True}, ["groups"]),
        ({"layout": "HND"}, ["layout"]),
        ({"planes": [Plane(0, 0, 256, 256)]}, ["planes"]),
        ({"planes": [Plane(0, 0, 512, 512, group=0), Plane(0, 0, 512, 512, group=1)]}, ["groups", "planes"]),
        ({"private": "no weights"}, ["private"]),
        ({"private": "no weights", "chunk_blocks": 8}, ["chunk_tokens", "private"]),
    ],
)
def test_each_part_of_the_fingerprint_is_named_and_nothing_else(changes: dict[str, Any], names: list[str]) -> None:
    differences = Differences()
    here, there = registered(differences), registered(differences, "other", **changes)
    assert here != there
    found = differences.between(here, there)
    assert [field["name"] for field in found["fields"]] == names
    assert (found["known"], found["instances"]) == (True, ["other"])
    back = differences.between(there, here)
    assert [(f["there"], f["here"]) for f in back["fields"]] == [(f["here"], f["there"]) for f in found["fields"]]


def test_private_incarnations_differ_in_being_private() -> None:
    differences = Differences()
    here = registered(differences, private="no weights", incarnation="one")
    there = registered(differences, private="no weights", incarnation="two")
    assert differences.between(here, there)["fields"] == [
        {"name": "private", "here": "no weights", "there": "no weights"}
    ]


def test_values_are_shown_where_the_engine_gave_them_and_are_short() -> None:
    differences = Differences()
    fields = {"shown": ("a", "b"), "long": ("a" * 101, "b" * 101)}
    sides = [
        registered(
            differences, counted=(*(Counted(n, both[i], both[i]) for n, both in fields.items()), Counted("path", path))
        )
        for i, path in enumerate(("/a", "/b"))
    ]
    found = {field["name"]: field for field in differences.between(*sides)["fields"]}
    assert (found["shown"]["here"], found["shown"]["there"]) == ("a", "b")
    for name in ("path", "long"):
        assert found[name]["here"].startswith("#")
        assert found[name]["here"] != found[name]["there"]
        assert "/a" not in str(found[name])
        assert len(found[name]["here"]) == 13


def test_variants_of_one_registration_and_of_two_are_named() -> None:
    differences = Differences()
    here, there = registered(differences), registered(differences, counted=identity(dtype="float16"))

    def names(a: bytes, b: bytes) -> list[str]:
        return [field["name"] for field in differences.between(a, b)["fields"]]

    assert names(with_variant(here, "0a/x"), with_variant(here, "0a/y")) == ["LoRA"]
    assert names(with_variant(here, "0a/x"), with_variant(here, "0b/x")) == ["weights epoch"]
    assert names(with_variant(here, "0a"), with_variant(there, "0a/x")) == ["dtype", "LoRA"]


def test_namespace_that_was_never_registered_is_not_known() -> None:
    differences = Differences()
    here = registered(differences)
    found = differences.between(here, bytes(32))
    assert (found["known"], found["fields"], found["instances"]) == (False, [], [])


def test_a_peer_cannot_fill_the_memory_and_a_comparison_names_no_more_than_its_bound() -> None:
    differences = Differences()
    made: list[bytes] = []
    for number in range(300):
        fields = tuple(Counted(f"{name:0400}", f"{number}-{name}", "v" * 100) for name in range(200))
        made.append(registered(differences, f"{number:0400}", counted=fields))
        assert differences.bytes <= MOST_BYTES
    assert 0 < len(differences) < 300
    found = differences.between(*made[-2:])
    assert (len(found["fields"]), found["more_fields"]) == (MOST_FIELDS, 200 - MOST_FIELDS)


def test_the_engines_of_one_namespace_are_named_the_last_first() -> None:
    differences = Differences()
    here = registered(differences)
    for number in range(9):
        there = registered(differences, f"engine-{number}", layout="HND")
    assert differences.between(here, there)["instances"] == [f"engine-{number}" for number in (8, 7, 6, 5)]
