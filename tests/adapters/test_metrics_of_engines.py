"""What alerts and the dashboard ask of an engine's own metrics is there from the start, also without a daemon."""

from __future__ import annotations

import gc

from front_end import FrontEnd, exposition, watches
from prometheus_client.parser import text_string_to_metric_families
from support.daemon import wait_until
from support.metrics_doc import engine_series


def test_every_documented_series_is_there_with_its_labels(make_engine):
    front = FrontEnd(make_engine("ipc:///nobody/there", register=False))
    found: dict[str, set[frozenset[str]]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(frozenset(sample.labels))
    front.close()
    gc.collect()
    wait_until(lambda: not watches(), 5, "the threads ended")
    for name, labels in engine_series().items():
        assert found.get(name) == {frozenset(labels)}, name
