"""A peer that sent Hello may query an engine's registration: whether all its ranks are registered, and why not."""

from __future__ import annotations

from collections.abc import Callable

from support.daemon import Daemon
from support.registration import identity
from support.worker import Worker

from kvserver.protocol import REGISTERED
from kvserver.protocol.client import Client, RequestFailed

Make = Callable[..., Worker]


def registration(daemon: Daemon, instance_id: str, incarnation: str) -> tuple[str, str]:
    with Client(daemon.endpoint) as client:
        reply = client.hello("test", instance_id, incarnation)
        return reply.standing, reply.standing_text


def refused(worker: Worker, **changes: object) -> str:
    """The code of a registration that is not taken."""
    try:
        worker.register(**changes)
    except RequestFailed as error:
        return str(error.code)
    raise AssertionError("it was registered")


def test_until_all_ranks_are_there_the_reply_states_how_many_are(
    make_daemon: Callable[..., Daemon], make_worker: Make
) -> None:
    daemon = make_daemon()
    ranks = [
        make_worker(daemon, instance_id="e", incarnation="1", rank=rank, world_size=2, connect_now=False)
        for rank in range(2)
    ]
    assert registration(daemon, "", "") == ("", ""), "no engine was named"
    assert registration(daemon, "e", "1")[0] == "unknown_instance"
    ranks[0].attach()
    ranks[0].register()
    code, text = registration(daemon, "e", "1")
    assert (code, text) == ("not_ready", "1 of 2 ranks of 'e' are registered")
    ranks[1].attach()
    ranks[1].register()
    assert registration(daemon, "e", "1") == (REGISTERED, "")
    assert registration(daemon, "e", "2")[0] == "duplicate_instance"


def test_a_refusal_is_reported_until_the_engine_is_registered(
    make_daemon: Callable[..., Daemon], make_worker: Make
) -> None:
    daemon = make_daemon()
    first, second = (
        make_worker(daemon, instance_id="e", incarnation="1", rank=rank, world_size=2, connect_now=False)
        for rank in range(2)
    )
    first.attach()
    first.register()
    second.attach()
    assert refused(second, counted=identity(dtype="float32")) == "ranks_disagree"
    code, text = registration(daemon, "e", "1")
    assert code == "ranks_disagree"
    assert "dtype" in text
    second.register()
    assert registration(daemon, "e", "1") == (REGISTERED, "")
    second.close()
    assert registration(daemon, "e", "1")[0] == "not_ready", "the refusal is forgotten"


def test_refusals_of_any_number_of_engines_are_not_all_remembered(
    make_daemon: Callable[..., Daemon], make_worker: Make
) -> None:
    worker = make_worker(make_daemon(), connect_now=False)
    worker.attach()
    for number in range(300):
        assert refused(worker, instance_id=f"e{number}", rank=1, world_size=1) == "unknown_rank"
    with Client(worker.client.endpoint) as client:
        found = [client.hello("test", f"e{number}", worker.incarnation).standing for number in range(300)]
    assert found[-1] == "unknown_rank"
    assert found[0] == "unknown_instance"
    assert 200 <= found.count("unknown_rank") < 300
