"""The URLs of L2's tiers."""

from __future__ import annotations

import pytest

from kvserver.config import TierUrl, parse_tiers


def parsed(url: str) -> TierUrl:
    (tier,) = parse_tiers([url])
    return tier


def test_a_folder_with_a_size_is_a_tier_of_files() -> None:
    tier = parsed("file:///var/lib/kvserver?size=200GiB")
    assert (tier.kind, tier.name, tier.path, tier.own) == ("file", "file", "/var/lib/kvserver", {"size": "200GiB"})
    assert (tier.admit, tier.required, tier.read_only, tier.write_limit) == ("all", False, False, 0)


def test_all_kinds_have_the_common_parameters() -> None:
    common = "admit=reused&required=true&read_only=1&write_limit=500MB/s&timeout=250ms"
    for url in ("file:///a?size=1GiB&", "s3://bucket/prefix?region=x&", "valkey://host:6379/0?"):
        tier = parsed(url + common)
        assert (tier.admit, tier.required, tier.read_only) == ("reused", True, True)
        assert (tier.write_limit, tier.timeout_seconds) == (500_000_000, 0.25)


def test_secrets_are_used_and_never_shown() -> None:
    tier = parsed("valkeys://me:p%40ss@host/3")
    assert (tier.username, tier.password) == ("me", "p@ss")
    assert tier.shown == "valkeys://host/3"
    assert "p@ss" not in repr(tier)
    with pytest.raises(ValueError, match=r"^valkey://host/0: ") as error:
        parsed("valkey://me:secret@host/0?bad=secret")
    assert "secret" not in str(error.value).replace("'bad'", "")


def test_tiers_keep_their_order_and_have_names_of_their_own() -> None:
    urls = ["file:///a?size=1GiB", "s3://bucket", "file:///b?size=2GiB"]
    assert [tier.name for tier in parse_tiers(urls)] == ["file", "s3", "file-2"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("200GiB", "unknown kind"),
        ("ftp://host/a", "unknown kind"),
        ("file:///a", "a size is missing"),
        ("file:///?size=1GiB", "absolute/folder"),
        ("file://a/b?size=1GiB", "absolute/folder"),
        ("file:///a?size=1", "at least 1MiB"),
        ("file:///a?size=much", "is no size"),
        ("file:///a?size=1GiB&size=2GiB", "twice"),
        ("file:///a?size=1GiB&region=x", "unknown parameters"),
        ("file:///a?size=1GiB&admit=none", "write all or reused"),
        ("file:///a?size=1GiB&required=maybe", "write true or false"),
        ("file:///a?size=1GiB&write_limit=0", "read_only"),
        ("file:///a?size=1GiB&timeout=1h", "10ms to 60s"),
        ("file:///a?size=1GiB#x", "no meaning"),
        ("s3:///prefix", "a bucket is missing"),
        ("valkey:///0", "a host is missing"),
        ("valkey://host:99999/0", "ort"),
    ],
)
def test_a_bad_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parsed(url)


def test_the_same_place_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="there twice"):
        parse_tiers(["file:///a?size=1GiB", "file:///a?size=2GiB"])
