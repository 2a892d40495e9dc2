"""A peer that registers under ever new names: /metrics stays within bounds, and so does /status."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from support.daemon import Daemon, wait_until
from support.memory import awkward
from support.raw import REQUEST_ID, RawPeer
from support.registration import identity
from support.worker import Worker, make_keys

from kvserver.protocol import MOST_DEPARTED, encode
from kvserver.protocol.measurements import MOST_MODELS, OTHER

AT_ONCE = 50
SMALL = awkward(num_blocks=8)


def come_and_go(daemon: Daemon, first: int, count: int) -> None:
    """Engines that register, store a chunk and hang up, each with names, a model and a reason of its own."""
    for number in range(first, first + count):
        model = {"model_name": f"model-{number}", "identity": identity(model=str(number))}
        with Worker(daemon.endpoint, SMALL, instance_id=f"hostile-{number}", connect_now=False, **model) as worker:
            worker.attach()
            worker.register(private=f"{number} " * 1000)
            worker.store(make_keys(1), worker.blocks_for(1))
            worker.unregister()


def be_refused(daemon: Daemon, template: Worker, count: int) -> None:
    """Registrations without a connection, and messages of no known type, under ever new names."""
    with RawPeer(daemon.endpoint) as peer:
        for batch in range(0, count, AT_ONCE):
            for number in range(batch, batch + AT_ONCE):
                names = {"instance_id": f"refused-{number}", "model_name": f"model-{number}", "private": str(number)}
                peer.send(REQUEST_ID, encode(template.registration(attachment=10**9 + number, **names)))
            for _ in range(AT_ONCE):
                assert peer.receive()[1].code == "unknown_attachment"
            assert peer.error_of({"type": f"Type{batch}"}).code == "bad_message"


def shown(daemon: Daemon) -> tuple[int, dict[str, set[str]]]:
    """How many series there are, and the values of each label."""
    samples, values = daemon.samples(), defaultdict(set)
    for sample in samples:
        for label, value in sample.labels.items():
            values[label].add(value)
    return len(samples), values


@pytest.mark.parametrize("refusals", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_series_stay_bounded_under_ever_new_names(make_daemon: Callable[..., Daemon], refusals: int) -> None:
    daemon = make_daemon(metrics_sample_rate=1)
    with Worker(daemon.endpoint, SMALL) as template:
        before = daemon.metric("kvserver_refused_registrations_total", reason="unknown_attachment")
        be_refused(daemon, template, refusals)
        after = daemon.metric("kvserver_refused_registrations_total", reason="unknown_attachment")
        assert after == before + refusals
        few, values = shown(daemon)
        assert values["instance_id"] == {template.instance_id}
        assert not any(value.startswith("Type") for value in values["type"])

        come_and_go(daemon, 0, MOST_MODELS + 2)
        wait_until(lambda: len(shown(daemon)[1]["instance_id"] - {""}) == MOST_DEPARTED + 1)
        many, values = shown(daemon)
        come_and_go(daemon, MOST_MODELS + 2, MOST_DEPARTED)
        wait_until(lambda: shown(daemon)[0] <= many + 20, what="more names make no more series")
        assert OTHER in values["model_name"]
        assert len(values["model_name"]) <= MOST_MODELS + MOST_DEPARTED + 2
        assert few < many
        assert len(daemon.status()["departed"]) == MOST_DEPARTED
        assert daemon.metric("kvserver_instances_connected_total") == MOST_MODELS + MOST_DEPARTED + 3
        assert daemon.metric("kvserver_l1_model_chunks") == daemon.metric("kvserver_l1_chunks")
