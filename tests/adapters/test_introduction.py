"""What a daemon receives of an engine for routers, and when."""

from __future__ import annotations

import pytest
import vllm
from made_up_model import BLOCK, prompt
from modelless import configure
from support.daemon import wait_until
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core import kv_cache_utils

from kvserver.adapters.common import introduction
from kvserver.adapters.vllm.facts import engine_facts
from kvserver.protocol import DescribeScheduler, Durability, Error, ErrorCode, KVGroup, RegisterWorker, Store

CHUNK = 64


def descriptions(tap) -> list[DescribeScheduler]:
    return tap.of(DescribeScheduler)


def with_events(**options):
    def adjust(config, caches):
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, **options)

    return adjust


# ---- when -------------------------------------------------------------------------------------


def test_an_engine_describes_itself_in_its_first_step(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint, engine_id="one", served_model_name="tiny")
    engine.generate("r", prompt(1, 2 * CHUNK))
    sent = wait_until(lambda: descriptions(tap))[0]
    (store,) = tap.of(Store)
    assert sent.durability == store.durability
    (worker,) = tap.of(RegisterWorker)
    assert (sent.instance_id, sent.incarnation, sent.model_name) == ("one", worker.incarnation, worker.model_name)
    assert (worker.engine, worker.engine_version) == ("vllm", vllm.__version__)
    assert sent.variant == store.variant
    assert sent.hash_algorithm == "sha256"
    assert sent.hash_start == kv_cache_utils.NONE_HASH
    assert sent.hash_block_tokens == BLOCK
    assert sent.groups == (KVGroup("full_attention"),)
    assert (sent.events_endpoint, sent.events_replay_endpoint, sent.events_topic) == ("", "", "")


def test_engine_describes_itself_again_after_its_weights_changed(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    engine.generate("old", prompt(1, 2 * CHUNK))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate("new", prompt(1, 2 * CHUNK))
    wait_until(lambda: len(descriptions(tap)) > 1)
    assert descriptions(tap)[-1].variant == tap.of(Store)[-1].variant != descriptions(tap)[0].variant


@pytest.mark.parametrize("code", [ErrorCode.NOT_READY, ErrorCode.UNKNOWN_INSTANCE])
def test_engine_describes_itself_again_after_a_refusal(make_daemon, make_tap, make_engine, code):
    tap = make_tap(make_daemon())
    refusal = Error(code=code.value, message="of the test")

    def refuse_the_first(message):
        return refusal if isinstance(message, DescribeScheduler) and len(descriptions(tap)) == 1 else None

    tap.instead = refuse_the_first
    engine = make_engine(tap.endpoint)
    wait_until(lambda: engine.generate_free("r") and len(descriptions(tap)) == 2, 20)


def test_engine_describes_itself_again_from_time_to_time(make_daemon, make_tap, make_engine, monkeypatch):
    """The daemon forgets it with its workers, which may register anew while the scheduler is not notified."""
    monkeypatch.setattr(introduction, "_AGAIN_SECONDS", 0.01)
    tap = make_tap(make_daemon())
    engine = make_engine(tap.endpoint)
    wait_until(lambda: engine.generate_free("r") and len(descriptions(tap)) > 2, 20)
    assert all(sent == descriptions(tap)[0] for sent in descriptions(tap))


def test_engine_describes_itself_to_each_daemon(make_daemon, make_tap, make_engine):
    daemon = make_daemon()
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    engine.generate("r", prompt(1, CHUNK))
    daemon.kill()
    daemon.start()
    wait_until(lambda: engine.generate_free("r") and len(descriptions(tap)) > 1, 20)


# ---- what -------------------------------------------------------------------------------------


def described(folder, **options):
    config, caches = configure(folder, "ipc:///nowhere", **options)
    return engine_facts(config, caches).describe("variant", "", Durability.MACHINE)


@pytest.mark.parametrize(("value", "form"), [("1", "int"), ("0", "bytes")])
def test_the_form_of_hashes_is_that_of_the_engines_own_events(model_folder, monkeypatch, value, form):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", value)
    assert described(model_folder).hash_form == form


def test_a_window_is_described(model_folder):
    assert described(model_folder, window=40).groups == (KVGroup("sliding_window", 40),)


@pytest.mark.parametrize(
    ("endpoint", "replay", "expected"),
    [
        ("tcp://*:5557", None, ("tcp://127.0.0.1:5557", "")),
        ("tcp://*:5557", "tcp://*:5558", ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")),
        ("tcp://[::]:5557", "tcp://127.0.0.1:5558", ("tcp://[::1]:5557", "tcp://127.0.0.1:5558")),
        ("ipc:///tmp/events", "ipc:///tmp/replay", ("ipc:///tmp/events", "ipc:///tmp/replay")),
        ("tcp://10.0.0.7:5557", "tcp://*:5558", ("", "")),  # vLLM connects to it
        ("tcp://*:0", None, ("", "")),  # any port
        ("inproc://events", None, ("", "")),
    ],
)
def test_description_states_where_to_connect_for_the_engines_own_events(model_folder, endpoint, replay, expected):
    adjust = with_events(publisher="zmq", endpoint=endpoint, replay_endpoint=replay, topic="kv")
    sent = described(model_folder, adjust=adjust)
    assert (sent.events_endpoint, sent.events_replay_endpoint) == expected
    assert sent.events_topic == ("kv" if expected[0] else "")


def test_each_data_parallel_rank_has_ports_of_its_own(model_folder):
    def adjust(config, caches):
        with_events(publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="tcp://*:6000")(config, caches)
        config.parallel_config.data_parallel_index = 2

    sent = described(model_folder, adjust=adjust)
    assert sent.events_endpoint == "tcp://127.0.0.1:5559"
    assert sent.events_replay_endpoint == "tcp://127.0.0.1:6002"


def test_an_engine_that_publishes_nothing_has_no_events(model_folder):
    assert described(model_folder, adjust=with_events(publisher="null")).events_endpoint == ""
