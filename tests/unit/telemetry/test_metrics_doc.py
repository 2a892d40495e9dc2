"""METRICS.md states what a real daemon exports: no family more, none less, with these types and labels."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.daemon import Daemon
from support.metrics_doc import PAGE, documented, miss_reasons, values
from support.worker import Worker

from kvserver.cache import MissReason
from kvserver.events import types as events
from kvserver.kv_events import types
from kvserver.telemetry import rpc_counts

DOCUMENTED = documented()


@pytest.fixture(scope="module")
def text() -> str:
    """/metrics after an engine has stored, looked up and loaded."""
    daemon = Daemon(metrics_sample_rate=1).start()
    try:
        with Worker(daemon.endpoint) as worker:
            worker.round_trip()
            code, body = daemon.http("/metrics")
    finally:
        daemon.close()
    assert code == 200
    return body


def test_every_family_of_a_daemon_is_documented_and_every_documented_one_is_there(text: str) -> None:
    exported = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {family.name: family.type for family in DOCUMENTED.values()} == exported


def test_every_family_is_there_before_the_first_connection(make_daemon: Callable[..., Daemon]) -> None:
    text = make_daemon().http("/metrics")[1]
    assert set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) == DOCUMENTED.keys()


def test_every_series_has_the_labels_that_are_documented(text: str) -> None:
    seen = 0
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(DOCUMENTED[name].labels), sample
            seen += 1
    assert seen


def test_every_definition_has_a_unit_and_a_text() -> None:
    assert len(DOCUMENTED) > 40
    assert [family.name for family in DOCUMENTED.values() if not family.unit or not family.definition] == []


def test_names_end_in_what_they_count() -> None:
    for family in DOCUMENTED.values():
        assert family.name.endswith("_total") == (family.type == "counter"), family.name
        for unit in ("seconds", "bytes"):
            if family.unit == unit:
                assert re.search(f"_{unit}(_gained|_lost)?$", family.name.removesuffix("_total")), family.name


def test_every_row_of_a_table_of_families_was_read() -> None:
    rows = re.findall(
        r"^\| `((?:kvserver|process)_\w+)` \| (?:counter|gauge|histogram) ", PAGE.read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(DOCUMENTED)


def test_every_reason_of_a_missed_token_is_explained() -> None:
    assert miss_reasons() == {reason.value for reason in MissReason}


def test_every_type_of_a_label_is_explained() -> None:
    assert set(values("type | the request")) == set(rpc_counts.TYPES)
    assert set(values("type | the event")) == set(events.NAMES.values())
    assert set(values("type | the KV event")) == {kind.__struct_config__.tag for kind in get_args(types.KVEvent)}


UNCLEAR = re.compile(r"^(Those|These|Their|They|The same|That|This|It|Its|Likewise|Also)\b")
WORDS_TO_AVOID = runpy.run_path(str(Path(__file__).parents[3] / ".ci" / "prose.py"))["words_to_avoid"]


def test_every_help_text_means_something_alone(text: str) -> None:
    """Prometheus shows a text without the rows around it. None of its words is one to avoid."""
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    assert helps.keys() == DOCUMENTED.keys()
    for name, help in helps.items():
        assert help.endswith("."), name
        assert help[0].isupper() or help[0].isdigit(), name
        assert len(help.split()) >= 5, f"{name}: {help!r} is no sentence"
        assert not UNCLEAR.search(help), f"{name}: {help!r}: {UNCLEAR.search(help)}"
        assert list(WORDS_TO_AVOID(1, help)) == [], f"{name}: {help!r}"
