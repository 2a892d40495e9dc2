"""The random walk once more, shorter, against a real daemon: real copies, sockets, deaths and kills."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.daemon import GPUS, Daemon, wait_until
from support.engine_process import EngineProcess
from support.memory import awkward
from support.registration import identity
from support.worker import Operation, Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Clear, Cleared, Error, ErrorCode, Stored
from kvserver.protocol.client import RequestFailed

CHAIN = 12
CHAINS = 3
STEPS = 1500
Content = tuple[bytes, ...]  # the blocks of one chunk


def chain(number: int) -> list[bytes]:
    return make_keys(CHAIN, seed=f"chain {number}")


class Engine:
    """The workers of one instance, and the blocks they may use."""

    def __init__(self, endpoint: str, name: str, world: int, model: str, gpu: str) -> None:
        self.name, self.world, self.model, self.gpu = name, world, model, gpu
        self.endpoint = endpoint
        self.incarnations = 0
        self.workers: list[Worker] = []
        self.start()

    def start(self) -> None:
        """A new incarnation; the daemon may still be busy with the end of the last one."""
        self.incarnations += 1
        self.workers = [wait_until(lambda rank=rank: self._connect(rank), what=self.name) for rank in range(self.world)]

    def _connect(self, rank: int) -> Worker | None:
        try:
            return Worker(
                self.endpoint,
                instance_id=self.name,
                incarnation=f"incarnation-{self.incarnations}",
                rank=rank,
                world_size=self.world,
                identity=identity(model=self.model),
                geometry=awkward(),
                gpu=self.gpu,
            )
        except RequestFailed as failure:
            if failure.code != ErrorCode.DUPLICATE_INSTANCE.value:
                raise
            return None

    def die(self) -> None:
        for worker in self.workers:
            worker.close()


class Walk:
    """What was stored whole, by (model, key, rank): usually one content, more only where replies leave it open."""

    def __init__(self, daemon: Daemon, seed: int, gpus: Sequence[str]) -> None:
        """`gpus`: where each of the engines runs; "" is the CPU."""
        self.daemon = daemon
        self.rng = random.Random(seed)
        self.seed = seed
        self.whole: dict[tuple[str, bytes, int], set[Content]] = {}
        self.engines = [
            Engine(daemon.endpoint, "one", 1, "test-model@0123", gpus[0]),
            Engine(daemon.endpoint, "other", 1, "test-model@0123", gpus[1]),  # shares with the first
            Engine(daemon.endpoint, "pair", 2, "another-model", gpus[2]),
        ]
        self.victim: EngineProcess | None = None
        self.victims = 0
        self.counts = dict.fromkeys(("stored", "loaded", "hits", "cancelled", "killed", "deaths", "clears"), 0)

    # ---- what may be found --------------------------------------------------------------------

    def note(self, engine: Engine, rank: int, keys: list[bytes], blocks: list[bytes], certain: bool) -> None:
        size = len(blocks) // len(keys)
        for i, key in enumerate(keys):
            content = tuple(blocks[i * size : (i + 1) * size])
            name = (engine.model, key, rank)
            self.whole[name] = {content} if certain else self.whole.get(name, set()) | {content}

    def pick(self) -> tuple[Engine, list[bytes]]:
        keys = chain(self.rng.randrange(CHAINS))[: self.rng.randint(1, CHAIN)]
        return self.rng.choice(self.engines), keys

    def request_id(self) -> str:
        return f"r{self.rng.randrange(3)}"

    # ---- actions ------------------------------------------------------------------------------

    def store(self, cancel: bool = False) -> None:
        """What a lookup did not find, from all ranks; perhaps cancelled by one of them in the middle."""
        engine, keys = self.pick()
        keys = keys[engine.workers[0].lookup(keys, self.request_id()) :][:4]
        if not keys:
            return
        coward = self.rng.randrange(engine.world) if cancel else None
        running = []
        for rank, worker in enumerate(engine.workers):
            blocks = self.rng.sample(range(1, worker.geometry.num_blocks), len(keys) * worker.chunk_blocks)
            written = [self.rng.randbytes(worker.geometry.block_bytes) for _ in blocks]
            for block, content in zip(blocks, written, strict=True):
                worker.memory.write(block, content)
            running.append((rank, worker, worker.begin_store(keys, blocks), blocks, written))
        for rank, worker, operation, blocks, written in running:
            if rank == coward and self.give_up(operation):
                for block in blocks:  # at once, while the copy perhaps still reads them
                    worker.memory.write(block, self.rng.randbytes(worker.geometry.block_bytes))
                reply = operation.reply()
                assert isinstance(reply, (Error, Stored))
                assert isinstance(reply, Error) or reply.stored == 0
                continue
            reply = operation.reply()
            assert isinstance(reply, Stored), reply
            assert reply.stored + reply.skipped + reply.starved == len(keys)
            self.counts["stored"] += reply.stored
            if reply.stored:
                self.note(engine, rank, keys, written, certain=reply.stored == len(keys))

    def give_up(self, operation: Operation) -> bool:
        for _ in range(self.rng.randint(0, 50)):
            _ = operation.state
        given_up = operation.move(State.PENDING, State.CANCELLED) or operation.move(State.RUNNING, State.CANCELLED)
        self.counts["cancelled"] += given_up
        return given_up

    def load(self) -> None:
        engine, keys = self.pick()
        hits = engine.workers[0].lookup(keys, self.request_id())
        self.counts["hits"] += hits
        for key in keys[:hits]:
            for rank in range(engine.world):
                assert (engine.model, key, rank) in self.whole, "found, but never stored whole"
        if hits == 0:
            return
        for rank, worker in enumerate(engine.workers):
            self.load_on(engine, rank, worker, keys[:hits][:4])

    def load_on(self, engine: Engine, rank: int, worker: Worker, keys: list[bytes]) -> None:
        skip = self.rng.choice([0, self.rng.randrange(worker.chunk_blocks)])
        count = len(keys) * worker.chunk_blocks - skip
        blocks = self.rng.sample(range(1, worker.geometry.num_blocks), count)
        before = worker.memory.image()
        reply = worker.begin_load(keys, blocks, skip).reply()
        if isinstance(reply, Error):
            assert reply.code == ErrorCode.NOT_FOUND.value
            assert worker.memory.image() == before
            return
        self.counts["loaded"] += 1
        loaded = worker.memory.blocks(blocks)
        padded = [b""] * skip + loaded
        for i, key in enumerate(keys):
            got = padded[i * worker.chunk_blocks : (i + 1) * worker.chunk_blocks]
            fits = [
                content
                for content in self.whole[engine.model, key, rank]
                if all(not mine or mine == theirs for mine, theirs in zip(got, content, strict=True))
            ]
            assert fits, f"seed {self.seed}: a load brought bytes that were never stored whole under this key"
        now = worker.memory.image()
        for block, content in zip(blocks, loaded, strict=True):
            assert worker.memory.read(block) == content
        restored = [bytearray(image) for image in now]
        for plane in worker.geometry.planes:
            for block in blocks:
                at = plane.offset + block * plane.stride_bytes
                restored[plane.memory][at : at + plane.run_bytes] = before[plane.memory][at : at + plane.run_bytes]
        assert [bytes(image) for image in restored] == before, "a load wrote outside its blocks"

    def end_request(self) -> None:
        engine = self.rng.choice(self.engines)
        for _ in range(3):
            engine.workers[0].end_request(self.request_id())

    def clear(self) -> None:
        worker = self.rng.choice(self.engines).workers[0]
        worker.ask(Clear(), Cleared)
        self.counts["clears"] += 1
        self.whole.clear()
        if self.victim is not None:
            self.kill()

    def die(self) -> None:
        engine = self.rng.choice(self.engines)
        for worker in engine.workers:  # in the middle of something
            blocks = worker.blocks_for(3)
            worker.begin_store(chain(0)[:3], blocks)
            self.note_uncertain(engine, worker.rank, chain(0)[:3], worker.memory.blocks(blocks))
        engine.die()
        self.counts["deaths"] += 1
        engine.start()

    def note_uncertain(self, engine: Engine, rank: int, keys: list[bytes], blocks: list[bytes]) -> None:
        """It may have been stored whole before its engine died; a mixture may not."""
        self.note(engine, rank, keys, blocks, certain=False)

    def spawn(self) -> None:
        """A process of the first model begins a store."""
        if self.victim is not None:
            return
        self.victims += 1
        engine, first = self.engines[0], self.rng.randrange(CHAIN - 3)
        self.victim = EngineProcess(self.daemon.endpoint, instance_id=f"victim-{self.victims}", gpu=engine.gpu)
        blocks = [bytes.fromhex(block) for block in self.victim.ask("read", 1, 3)]
        self.victim.ask("begin_store", "chain 0", 1, 3, first)
        self.note_uncertain(engine, 0, chain(0)[first : first + 3], blocks)

    def kill(self) -> None:
        if self.victim is not None:
            self.victim.close()
            self.victim = None
            self.counts["killed"] += 1

    def cancelled_store(self) -> None:
        self.store(cancel=True)

    def run(self, steps: int) -> None:
        actions = {
            self.store: 30,
            self.cancelled_store: 10,
            self.load: 50,
            self.end_request: 8,
            self.clear: 1,
            self.die: 1,
            self.spawn: 1,
            self.kill: 2,
        }
        for action in self.rng.choices(list(actions), list(actions.values()), k=steps):
            action()

    def close(self) -> None:
        self.kill()
        for engine in self.engines:
            engine.die()


@pytest.mark.parametrize("gpus", [("", "", ""), (GPUS[0], "", GPUS[1])], ids=["on the CPU", "on GPUs too"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_random_walk_with_a_real_daemon_agrees_with_a_plain_dict(seed: int, gpus: tuple[str, ...]) -> None:
    daemon = Daemon(l1_size="1MiB", copy_delay_us=50, lease_seconds=2, simulated_gpus=2)
    try:
        walk = Walk(daemon.start(), seed, gpus)
        try:
            walk.run(STEPS)
        except BaseException:
            print(f"\nseed {seed}: {walk.counts}\n{daemon.log[-3000:]}")
            raise
        finally:
            walk.close()
        assert min(walk.counts.values()) > 3, walk.counts
        daemon.wait_for_clean_accounting()
        assert daemon.status()["l1"]["evictions"] > 20
        assert {gpu["device"] for gpu in daemon.status()["gpus"] if gpu["load"]["staged_bytes"]} == {*gpus} - {""}
        assert daemon.http("/cache/clear", "POST")[0] == 200
        daemon.wait_for_accounting(used_pages=0)
        assert daemon.mapped_memfds() == []
        assert daemon.open_memfds() == 0
        assert "Traceback" not in daemon.log
        daemon.check_gpus()
    finally:
        daemon.close()
