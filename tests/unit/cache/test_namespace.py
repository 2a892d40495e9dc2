"""Which engines may share KV."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.registration import identity, registration

from kvserver.cache import check_agreement, epoch_of, fingerprint, private_reason, with_variant
from kvserver.protocol import Counted, ErrorCode, KVServerError, ObjectGroup, Plane, RegisterWorker, SharedFd

REGISTRATION = registration(planes=[Plane(0, 0, 64, 64), Plane(0, 4096, 32, 16)])

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
    "groups": {
        "a window": (ObjectGroup("window", (0,), 16, tokens=20),),
        "a longer window": (ObjectGroup("window", (0,), 16, tokens=30),),
        "one slot for all ranks": (ObjectGroup("full", (0,), 16, replicated=True),),
    },
}
LEAVES_THE_SLOT: dict[str, Any] = {
    "instance_id": "j",
    "incarnation": "o",
    "model_name": "alias",
    "attachment": 2,
    "memory": [SharedFd(index=0, size_bytes=1 << 21), SharedFd(index=1, size_bytes=1)],
    "words": 32,
    "num_blocks": 9,
    "group_blocks": (9,),
    "has_computed": True,
    "tails": True,
    "machine_only": "samples of its files name them",
    "engine": "sglang",
    "engine_version": "0.5.23",
    "unreported": ("requests",),
    "kv_role": "kv_producer",
}


def changed(**changes: Any) -> RegisterWorker:
    return msgspec.structs.replace(REGISTRATION, **changes)


def world(size: int, **changes: Any) -> list[RegisterWorker]:
    return [changed(rank=rank, world_size=size, **changes) for rank in range(size)]


def test_the_same_registration_has_the_same_namespace() -> None:
    assert fingerprint([REGISTRATION]) == fingerprint([changed()])
    assert len(fingerprint([REGISTRATION])) == 32


@pytest.mark.parametrize("name", [field.name for field in REGISTRATION.counted])
def test_every_counted_field_separates(name: str) -> None:
    assert fingerprint([changed(counted=identity(**{name: "something else"}))]) != fingerprint([REGISTRATION])


def test_a_field_more_or_less_separates() -> None:
    prints = {fingerprint([changed(counted=c)]) for c in (identity(), identity(new="x"), identity()[1:])}
    assert len(prints) == 3


def test_neither_the_order_of_fields_nor_what_is_shown_of_them_separates() -> None:
    shown_otherwise = tuple(msgspec.structs.replace(field, value="") for field in reversed(identity()))
    assert fingerprint([changed(counted=shown_otherwise)]) == fingerprint([REGISTRATION])


def test_a_digest_counts_for_its_own_field_only() -> None:
    names = [field.name for field in REGISTRATION.counted]
    prints = {fingerprint([changed(counted=identity(**dict.fromkeys(names, "")))])}
    prints |= {fingerprint([changed(counted=identity(**{**dict.fromkeys(names, ""), name: "x"}))]) for name in names}
    assert len(prints) == len(names) + 1


# ---- private instances ------------------------------------------------------------------------


def test_a_private_instance_shares_with_no_other_incarnation() -> None:
    private = changed(private="no weight files")
    others = [REGISTRATION, *(msgspec.structs.replace(private, **{f: "x"}) for f in ("instance_id", "incarnation"))]
    assert fingerprint([private]) == fingerprint([msgspec.structs.replace(private, private="a reason in other words")])
    assert len({fingerprint([spec]) for spec in (private, *others)}) == 4


def test_one_private_rank_makes_the_instance_private() -> None:
    ranks = world(2)
    ranks[1] = msgspec.structs.replace(ranks[1], private="its files cannot be read")
    check_agreement(*ranks)
    assert private_reason(ranks) == "its files cannot be read"
    assert private_reason(world(2)) == ""
    again = [msgspec.structs.replace(rank, incarnation="o") for rank in ranks]
    assert len({fingerprint(ranks), fingerprint(again), fingerprint(world(2))}) == 3


def test_a_registration_that_names_nothing_is_refused() -> None:
    with pytest.raises(KVServerError, match=r"\$\.counted"):
        fingerprint([changed(counted=())])


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=name) for field, cases in SHAPES_THE_SLOT.items() for name, value in cases.items()],
)
def test_field_that_shapes_a_slot_separates_namespaces(field: str, value: Any) -> None:
    assert fingerprint([changed(**{field: value})]) != fingerprint([REGISTRATION])


@pytest.mark.parametrize(("field", "value"), LEAVES_THE_SLOT.items())
def test_names_and_addresses_do_not_separate(field: str, value: Any) -> None:
    assert fingerprint([changed(**{field: value})]) == fingerprint([REGISTRATION])


def test_where_the_planes_lie_does_not_separate() -> None:
    moved = [Plane(1, 512, 4096, 64), Plane(2, 0, 999, 16)]
    assert fingerprint([changed(planes=moved)]) == fingerprint([REGISTRATION])


def test_every_field_of_a_registration_is_known_to_these_tests() -> None:
    """A new field must be put into one of the tables above."""
    known = {*SHAPES_THE_SLOT, *LEAVES_THE_SLOT, "counted", "private", "rank", "world_size"}
    assert {field.name for field in msgspec.structs.fields(RegisterWorker)} == known


def test_world_sizes_separate() -> None:
    assert len({fingerprint(world(size)) for size in (1, 2, 4)}) == 3


def test_the_geometry_of_every_rank_counts() -> None:
    ranks = world(2)
    ranks[1] = msgspec.structs.replace(ranks[1], planes=[Plane(0, 0, 64, 64), Plane(0, 4096, 32, 8)])
    assert fingerprint(ranks) != fingerprint(world(2))


def test_a_variant_separates_and_no_variant_does_not() -> None:
    base, other = fingerprint([REGISTRATION]), fingerprint([changed(chunk_blocks=8)])
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
    ],
)
def test_the_error_names_the_field_in_which_ranks_differ(field: str, value: Any) -> None:
    with pytest.raises(KVServerError, match=f"rank 1 states {field}={value!r}") as caught:
        check_agreement(REGISTRATION, changed(rank=1, **{field: value}))
    assert caught.value.code is ErrorCode.RANKS_DISAGREE


def test_ranks_must_agree_on_the_object_groups() -> None:
    for changes in ({"replicated": True}, {"groups": (ObjectGroup("window", (0,), 16, tokens=20),)}):
        with pytest.raises(KVServerError, match="rank 1 states object_groups=") as caught:
            check_agreement(REGISTRATION, changed(rank=1, **changes))
        assert caught.value.code is ErrorCode.RANKS_DISAGREE


def test_an_engine_of_the_protocol_before_shares_with_one_that_states_its_one_group() -> None:
    stated = changed(groups=(ObjectGroup("full", (0,), REGISTRATION.block_tokens),))
    assert fingerprint([stated]) == fingerprint([REGISTRATION])


@pytest.mark.parametrize("name", [field.name for field in REGISTRATION.counted])
def test_the_error_names_the_part_of_the_identity_in_which_ranks_differ(name: str) -> None:
    with pytest.raises(KVServerError, match=rf"rank 1 states {name}='z'"):
        check_agreement(REGISTRATION, changed(rank=1, counted=identity(**{name: "z"})))


def test_the_error_shows_digests_of_a_field_whose_value_is_not_shown() -> None:
    secret, other = (changed(rank=rank, counted=(Counted("uri", digest),)) for rank, digest in ((0, "12"), (1, "34")))
    with pytest.raises(KVServerError, match="rank 1 states uri='34', rank 0 states '12'"):
        check_agreement(secret, other)


def test_ranks_may_show_an_equal_field_differently() -> None:
    check_agreement(changed(counted=(Counted("uri", "12", "x"),)), changed(rank=1, counted=(Counted("uri", "12"),)))


def test_ranks_may_differ_in_their_planes() -> None:
    check_agreement(REGISTRATION, changed(rank=1, planes=[Plane(0, 0, 8, 8)], words=99))


@pytest.mark.parametrize(
    ("field", "value", "stated"),
    [
        ("layout", "head-major", "layout='head-major'"),
        ("planes", [Plane(0, 0, 8, 8)], r"runs=\[8\]"),
        ("planes", [Plane(0, 0, 128, 64), Plane(0, 64, 32, 16, 1)], "object_groups="),
    ],
)
def test_ranks_that_hold_the_same_bytes_must_arrange_them_alike(field: str, value: Any, stated: str) -> None:
    with pytest.raises(KVServerError, match=f"rank 1 states {stated}"):
        check_agreement(changed(replicated=True), changed(rank=1, replicated=True, **{field: value}))
    moved = [Plane(0, 640, 128, 64), Plane(0, 0, 32, 16)]
    check_agreement(changed(replicated=True), changed(rank=1, replicated=True, planes=moved))
