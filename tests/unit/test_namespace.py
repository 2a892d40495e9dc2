"""Who may share KV with whom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.worker import identity

from kvserver.errors import ErrorCode, KVServerError
from kvserver.namespace import check_agreement, epoch_of, fingerprint, with_variant
from kvserver.planes import Plane
from kvserver.protocol import ModelIdentity, RegisterWorker, SharedFd

REGISTRATION = RegisterWorker(
    instance_id="i",
    incarnation="n",
    model_name="m",
    rank=0,
    world_size=1,
    attachment=1,
    memory=[SharedFd(index=0, size_bytes=1 << 20)],
    words=16,
    planes=[Plane(0, 0, 64, 64), Plane(0, 4096, 32, 16)],
    num_blocks=8,
    block_tokens=16,
    chunk_blocks=4,
    identity=identity(),
)

SHAPES_THE_SLOT: dict[str, Any] = {
    "planes": {
        "another run": [Plane(0, 0, 64, 60), Plane(0, 4096, 32, 16)],
        "another order": [Plane(0, 4096, 32, 16), Plane(0, 0, 64, 64)],
        "one plane fewer": [Plane(0, 0, 64, 64)],
        "the same bytes in three": [Plane(0, 0, 64, 32), Plane(0, 32, 64, 32), Plane(0, 4096, 32, 16)],
    },
    "block_tokens": {"other blocks": 32},
    "chunk_blocks": {"other chunks": 8},
    "layout": {"other layout": "head-major"},
    "replicated": {"one slot for all ranks": True},
}
LEAVES_THE_SLOT: dict[str, Any] = {
    "instance_id": "j",
    "incarnation": "o",
    "model_name": "alias",
    "attachment": 2,
    "memory": [SharedFd(index=0, size_bytes=1 << 21), SharedFd(index=1, size_bytes=1)],
    "words": 32,
    "num_blocks": 9,
}


def changed(**changes: Any) -> RegisterWorker:
    return msgspec.structs.replace(REGISTRATION, **changes)


def world(size: int, **changes: Any) -> list[RegisterWorker]:
    return [changed(rank=rank, world_size=size, **changes) for rank in range(size)]


def test_the_same_registration_has_the_same_namespace() -> None:
    assert fingerprint([REGISTRATION]) == fingerprint([changed()])
    assert len(fingerprint([REGISTRATION])) == 32


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(ModelIdentity)])
def test_every_part_of_the_identity_separates(field: str) -> None:
    other = fingerprint([changed(identity=identity(**{field: "something else"}))])
    assert other != fingerprint([REGISTRATION])


def test_a_text_counts_for_its_own_field_only() -> None:
    names = [field.name for field in msgspec.structs.fields(ModelIdentity)]
    blank = dict.fromkeys(names, "")
    prints = {fingerprint([changed(identity=ModelIdentity(**{**blank, name: "x"}))]) for name in names}
    assert len(prints) == len(names)


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=name) for field, cases in SHAPES_THE_SLOT.items() for name, value in cases.items()],
)
def test_whatever_shapes_a_slot_separates(field: str, value: Any) -> None:
    assert fingerprint([changed(**{field: value})]) != fingerprint([REGISTRATION])


@pytest.mark.parametrize(("field", "value"), LEAVES_THE_SLOT.items())
def test_names_and_addresses_do_not_separate(field: str, value: Any) -> None:
    assert fingerprint([changed(**{field: value})]) == fingerprint([REGISTRATION])


def test_where_the_planes_lie_does_not_separate() -> None:
    moved = [Plane(1, 512, 4096, 64), Plane(2, 0, 999, 16)]
    assert fingerprint([changed(planes=moved)]) == fingerprint([REGISTRATION])


def test_every_field_of_a_registration_is_known_to_these_tests() -> None:
    """A new field must be put into one of the tables above."""
    known = {*SHAPES_THE_SLOT, *LEAVES_THE_SLOT, "identity", "rank", "world_size"}
    assert {field.name for field in msgspec.structs.fields(RegisterWorker)} == known


def test_world_sizes_separate() -> None:
    assert len({fingerprint(world(size)) for size in (1, 2, 4)}) == 3


def test_the_geometry_of_every_rank_counts() -> None:
    ranks = world(2)
    ranks[1] = msgspec.structs.replace(ranks[1], planes=[Plane(0, 0, 64, 64), Plane(0, 4096, 32, 8)])
    assert fingerprint(ranks) != fingerprint(world(2))


def test_a_variant_separates_and_no_variant_does_not() -> None:
    base, other = fingerprint([REGISTRATION]), fingerprint([changed(block_tokens=32)])
    assert with_variant(base, "") == base
    variants = {with_variant(base, "a"), with_variant(base, "b"), with_variant(other, "a"), base, other}
    assert len(variants) == 5
    assert with_variant(base, "a") == with_variant(base, "a")


def test_a_lora_is_a_namespace_below_that_of_its_epoch() -> None:
    base = fingerprint([REGISTRATION])
    epoch, lora, other = (with_variant(base, variant) for variant in ("e", "e/lora", "e/other"))
    assert lora.startswith(epoch)
    assert len({epoch, lora, other, with_variant(base, "f/lora")}) == 4
    assert {epoch_of(namespace) for namespace in (epoch, lora, other)} == {epoch}
    assert epoch_of(base) == base


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", "x"),
        ("world_size", 3),
        ("num_blocks", 9),
        ("block_tokens", 32),
        ("chunk_blocks", 8),
        ("replicated", True),
    ],
)
def test_ranks_that_differ_are_told_where(field: str, value: Any) -> None:
    with pytest.raises(KVServerError, match=f"rank 1 says {field}={value!r}") as caught:
        check_agreement(REGISTRATION, changed(rank=1, **{field: value}))
    assert caught.value.code is ErrorCode.RANKS_DISAGREE


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(ModelIdentity)])
def test_ranks_of_two_models_are_told_where(field: str) -> None:
    with pytest.raises(KVServerError, match=rf"identity\.{field}='z'"):
        check_agreement(REGISTRATION, changed(rank=1, identity=identity(**{field: "z"})))


def test_ranks_may_differ_in_their_planes() -> None:
    check_agreement(REGISTRATION, changed(rank=1, planes=[Plane(0, 0, 8, 8)], words=99))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("layout", "head-major", "layout='head-major'"),
        ("planes", [Plane(0, 0, 8, 8)], r"runs=\[8\]"),
        ("planes", [Plane(0, 0, 128, 64), Plane(0, 64, 32, 16, 1)], r"groups=\[0, 1\]"),
    ],
)
def test_ranks_that_hold_the_same_bytes_must_arrange_them_alike(field: str, value: Any, said: str) -> None:
    with pytest.raises(KVServerError, match=f"rank 1 says {said}"):
        check_agreement(changed(replicated=True), changed(rank=1, replicated=True, **{field: value}))
    moved = [Plane(0, 640, 128, 64), Plane(0, 0, 32, 16)]
    check_agreement(changed(replicated=True), changed(rank=1, replicated=True, planes=moved))
