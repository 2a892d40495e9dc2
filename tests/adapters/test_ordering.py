"""On a GPU a copy may begin only when the engine's own work on its blocks is done, which is later than its step."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import threading
import time

import pytest
from late_gpu import LateGpu
from made_up_model import prompt
from modelless import Engine
from support.daemon import wait_until

from kvserver.protocol import Retrieve, Store
from kvserver.protocol.client import Channel

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


@pytest.fixture
def sent(monkeypatch):
    """The stores and loads that left this process, as they left."""
    messages: list[Store | Retrieve] = []
    send = Channel.send

    def noted(self, request):
        if isinstance(request, Store | Retrieve):
            messages.append(request)
        return send(self, request)

    monkeypatch.setattr(Channel, "send", noted)
    return messages


def asked(daemon) -> int:
    """Stores and loads that the daemon has received."""
    return sum(i["requests"]["stores"] + i["requests"]["loads"] for i in daemon.status()["instances"])


def counted(engine: Engine, name: str) -> int:
    return engine.worker.worker.counters[name]


def begin_store(engine: Engine, name: str = "first", tokens: list[int] = TOKENS) -> None:
    """Serve a request whose store waits for the GPU. REQUIRES: the GPU is on hold."""
    answer, before = engine.add(name, tokens, count=1), len(engine.stores)
    engine.run(until=lambda: answer.finish_reason is not None and len(engine.stores) > before)
    assert engine.connector.has_pending_push_work()
    engine.finish_steps()


def begin_load(engine: Engine):
    """Submit TOKENS, which the daemon holds, until their load waits for the GPU. REQUIRES: the GPU is on hold."""
    answer = engine.add("warm", TOKENS)
    engine.run(until=lambda: bool(engine.loads) and engine.status_of("warm") == "WAITING_FOR_REMOTE_KVS")
    return answer


@pytest.fixture
def stored(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    return daemon


# ---- nothing goes before its event ------------------------------------------------------------


def test_a_store_waits_for_the_forward_that_writes_its_blocks(make_daemon, make_engine, sent):
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(daemon, gpu=gpu)
    begin_store(engine)
    wait_until(lambda: engine.step() or gpu.waited, 10)
    assert sent == []
    assert asked(daemon) == 0
    gpu.release()
    engine.run()
    assert asked(daemon) == 1
    assert make_engine(daemon).generate("warm", TOKENS).external == 4 * CHUNK


def test_a_load_waits_for_the_work_that_its_blocks_were_in(stored, make_engine, sent):
    before = asked(stored)
    sent.clear()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(stored, gpu=gpu)
    answer = begin_load(engine)
    wait_until(lambda: engine.step() or gpu.waited, 10)
    assert sent == []
    assert asked(stored) == before
    assert engine.received == []
    gpu.release()
    engine.run()
    assert answer.right
    assert engine.received == ["warm"]
    assert counted(engine, "loaded") == 1


@pytest.mark.parametrize("runner", ["gpu_model_runner.GPUModelRunner", "gpu.model_runner.GPUModelRunner"])
def test_vllm_binds_behind_what_it_writes_early_and_before_the_forward(runner):
    """The connector begins copies there. A version of vLLM with another order fails here."""
    module, name = runner.rsplit(".", 1)
    step = inspect.getsource(getattr(importlib.import_module(f"vllm.v1.worker.{module}"), name).execute_model)
    places = {
        "V1": ("self._update_states(", "preprocess_mamba(", "maybe_get_kv_connector_output(", "self._model_forward("),
        "V2": ("self.update_requests(", "preprocess_state(", "kv_connector.pre_forward(", "self.model("),
    }["V1" if module == "gpu_model_runner" else "V2"]
    found = [step.find(place) for place in places]
    assert -1 not in found, dict(zip(places, found, strict=True))
    assert found == sorted(found)


def hold_forwards(engine: Engine, gpu: LateGpu, when) -> threading.Event:
    """Let the GPU do nothing from the forward of the first step on for which `when` is true, until the event is set."""
    forward, released = engine.batch.forward, threading.Event()

    def paused(output, weights):
        if when(output):
            gpu.queue(lambda: released.wait(20))
        return forward(output, weights)

    engine.batch.forward = paused
    return released


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_store_waits_for_its_own_forward(make_daemon, make_engine, sent, asynchronous):
    """The GPU has done all that was queued before."""
    daemon, gpu = make_daemon(), LateGpu(most=10_000)
    engine = make_engine(daemon, gpu=gpu, asynchronous=asynchronous)
    answer = engine.add("first", TOKENS, count=20)
    released = hold_forwards(engine, gpu, lambda output: bool(output.scheduled_new_reqs))
    wait_until(lambda: engine.step() or engine.stores, 10)
    wait_until(lambda: engine.step() or gpu.waited, 10)
    time.sleep(0.1)
    assert sent == []
    released.set()
    engine.run()
    assert answer.right
    assert asked(daemon) > 0


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_store_waits_for_no_forward_behind_its_own(make_daemon, make_engine, asynchronous):
    daemon, gpu = make_daemon(), LateGpu(most=10_000)
    engine = make_engine(daemon, gpu=gpu, asynchronous=asynchronous)
    answer = engine.add("first", TOKENS, count=20)
    released = hold_forwards(engine, gpu, lambda output: "first" in output.scheduled_cached_reqs.req_ids)
    wait_until(lambda: engine.step() or engine.stores, 10)
    wait_until(lambda: daemon.status()["l1"]["chunks"] == 4, 10, "the store ended before the forward of the next step")
    released.set()
    engine.run()
    assert answer.right


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_load_waits_for_no_forward_of_its_own_step(stored, make_engine, asynchronous):
    gpu = LateGpu(most=10_000)
    engine = make_engine(stored, gpu=gpu, asynchronous=asynchronous)
    other = engine.add("other", prompt(7, 40), count=1000)
    engine.run(until=lambda: bool(other.tokens))
    released = hold_forwards(engine, gpu, lambda output: bool(engine.plans[-1].loads))
    answer = engine.add("warm", TOKENS)
    engine.run(until=lambda: "warm" in engine.received)
    released.set()
    engine.run()
    assert (answer.right, answer.external, other.right) == (True, 4 * CHUNK, True)


def test_unordered_store_copies_foreign_bytes_in_this_rig(make_daemon, make_engine):
    """The control: a store that begins with its step copies what the blocks contained before."""
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True, ordered=False)
    engine = make_engine(daemon, gpu=gpu)
    begin_store(engine)
    engine.run()
    gpu.release()
    with pytest.raises(AssertionError, match="attends to foreign KV"):
        make_engine(daemon).generate("warm", TOKENS)


def test_messages_leave_in_the_order_of_their_work(make_daemon, make_engine, sent):
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(
        daemon, gpu=gpu, extra={"kvserver.lookup_timeout_ms": 15000, "kvserver.store_timeout_ms": 15000}
    )
    for i in range(4):
        begin_store(engine, f"r{i}", prompt(i, 2 * CHUNK))
    assert sent == []
    gpu.release()
    engine.run()
    wait_until(lambda: len(sent) > 1, 20, "the messages of stores")
    assert [message.sequence for message in sent] == sorted(message.sequence for message in sent)


# ---- while it waits ---------------------------------------------------------------------------


def test_a_store_that_is_cancelled_for_its_blocks_is_never_sent(make_daemon, make_engine, sent):
    """23 blocks, of which the store keeps 16."""
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(daemon, gpu=gpu, num_blocks=23)
    begin_store(engine)
    (first,) = engine.stores
    other = engine.add("other", prompt(2, 4 * CHUNK + 50), count=3)
    engine.run(until=lambda: other.finish_reason is not None)
    assert counted(engine, "cancelled_stores") == 1
    gpu.release()
    engine.run()
    assert first.keys not in {message.keys for message in sent}
    assert counted(engine, "not_sent_cancelled") == 1
    assert make_engine(daemon).generate("warm", TOKENS).external == 0
    begin = prompt(9, CHUNK)
    engine.generate("next", begin)
    assert make_engine(daemon).generate("warm", begin).external > 0


def test_a_load_that_is_aborted_is_never_sent(stored, make_engine, sent):
    gpu = LateGpu(on_hold=True)
    sent.clear()
    engine = make_engine(stored, gpu=gpu, extra={"kvserver.load_timeout_ms": 60_000})
    begin_load(engine)
    engine.abort("warm")
    engine.run(10, until=lambda: engine.received == ["warm"])
    gpu.release()
    engine.run()
    assert [message for message in sent if isinstance(message, Retrieve)] == []


def test_a_store_that_waits_beyond_its_deadline_is_not_the_daemons_fault(make_daemon, make_engine, sent):
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(daemon, gpu=gpu, extra={"kvserver.store_timeout_ms": 50})
    for i in range(4):
        begin_store(engine, f"r{i}", prompt(i, 2 * CHUNK))
    engine.run()
    assert sent == []
    assert counted(engine, "timeouts") == 0, "three would open the breaker"
    gpu.finish()
    prompts = [prompt(seed, 2 * CHUNK) for seed in range(9, 29)]
    for number, begin in enumerate(prompts):  # a store has 50 ms, which a busy machine may exceed
        engine.generate(f"next {number}", begin)
        daemon.wait_for_accounting(tickets=0)
        if daemon.status()["l1"]["chunks"]:
            break
    warm = make_engine(daemon)
    assert any(warm.generate(f"warm {number}", begin).external for number, begin in enumerate(prompts))


def test_a_message_whose_deadline_passed_is_not_sent_when_its_event_fires(make_daemon, make_engine, sent):
    """Also if the engine made no step that would have cancelled it."""
    gpu = LateGpu(on_hold=True)
    engine = make_engine(make_daemon(), gpu=gpu, extra={"kvserver.store_timeout_ms": 300})
    begin_store(engine)
    handed_over = time.monotonic()
    wait_until(lambda: time.monotonic() > handed_over + 0.3, 10)
    gpu.finish()
    queue = engine.worker.worker._send_queue
    wait_until(lambda: queue._answers, what="the queue looks at it before a step cancels it")
    engine.run()
    assert sent == []
    assert counted(engine, "not_sent_late") == 1


def test_a_load_that_waits_beyond_its_deadline_is_computed(stored, make_engine, sent):
    gpu = LateGpu(on_hold=True)
    sent.clear()
    engine = make_engine(stored, gpu=gpu, extra={"kvserver.load_timeout_ms": 50})
    answer = begin_load(engine)
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert engine.received == ["warm"]
    gpu.release()
    engine.run()
    assert [message for message in sent if isinstance(message, Retrieve)] == []


@pytest.mark.parametrize("broken", ["record", "synchronize"])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_an_event_that_raises_fails_its_copy(stored, make_engine, sent, broken, kind):
    gpu = LateGpu()
    engine = make_engine(stored, gpu=gpu, may_fail=True)
    engine.generate_free("steps before")
    gpu.broken = broken
    sent.clear()
    answer = engine.generate("a", TOKENS if kind == "load" else prompt(5, 3 * CHUNK))
    assert answer.right
    assert sent == []
    where = "_begin_stores" if broken == "record" else "waiting for the engine's own work"
    assert engine.errors()[f"{where}: RuntimeError"] >= 1
    gpu.broken = ""
    engine.generate("b", prompt(6, 3 * CHUNK))
    assert sent


def test_the_daemon_restarts_while_copies_wait(stored, make_engine, sent):
    gpu = LateGpu(on_hold=True)
    sent.clear()
    engine = make_engine(stored, gpu=gpu)
    answer = begin_load(engine)
    begin_store(engine, "store", prompt(3, 2 * CHUNK))
    stored.kill()
    engine.run(until=lambda: answer.finish_reason is not None)
    assert engine.received == ["warm"]
    stored.start()
    wait_until(lambda: any(i["namespace"] for i in stored.status()["instances"]), 20, "registered again")
    gpu.finish()
    engine.run()
    assert asked(stored) == len(sent), "the new daemon received what was meant for the earlier one"
    names = (f"r{i}" for i in range(1000))
    again = prompt(4, 2 * CHUNK)
    wait_until(lambda: engine.generate(next(names), again) and stored.status()["l1"]["chunks"], 20)
    assert make_engine(stored).generate("other", again).external > 0


# ---- a GPU that hangs -------------------------------------------------------------------------


def test_an_event_that_never_fires_does_not_hold_up_shutdown(make_daemon, make_engine, sent):
    daemon = make_daemon()
    gpu = LateGpu(on_hold=True)
    engine = make_engine(daemon, gpu=gpu)
    begin_store(engine)
    wait_until(lambda: gpu.waited, 10)
    engine.worker.shutdown()
    daemon.wait_for_accounting(mappings=0)
    gpu.finish()
    assert sent == []


def test_an_event_that_never_fires_does_not_hold_up_the_end_of_the_process(tmp_path):
    program = f"""
import threading
from kvserver._native import WordPage
from kvserver.adapters.common.link import Session
from kvserver.adapters.common.send_queue import OrderedSendQueue
from kvserver.protocol.client import Channel
from kvserver.protocol import HelloReply, Store

entered = threading.Event()
class Event:
    def record(self): pass
    def synchronize(self):
        entered.set()
        threading.Event().wait()

hello = HelloReply(protocol_version=1, server_version="", boot_id="", chunk_tokens=1, fd_path="", token="")
session = Session(hello, Channel("ipc://{tmp_path}/nobody"), words=WordPage(4))
session.words.arm(0, 1)
send_queue = OrderedSendQueue(Event)
send_queue.adopt(session)
send_queue.begin_step(1)
send_queue.post(Store(boot_id="", registration=1, chunk_blocks=1, keys=b"", block_ids=b"", word=0, sequence=1, deadline_ns=0))
entered.wait()
send_queue.close()
print("closed")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr
