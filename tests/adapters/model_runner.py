"""The model runner's part of a step: KV of the made-up model is written, and all that a request attends to is checked, byte for byte.

Owns: the requests' tokens and blocks, and each rank's KV. Refuses to know: the scheduler, and what the connector does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from made_up_model import BLOCK, HEADS, LAYERS, MASK, VOCAB, WIDTH, chain, next_token
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput


@dataclass
class Row:
    """A request as the runner knows it."""

    tokens: list[int]
    blocks: list[int]
    computed: int  # tokens with KV
    states: list[int] = field(default_factory=list)  # KV numbers of the tokens
    drafts: list[int] = field(default_factory=list)

    def numbers(self, tokens: list[int], weights: int) -> list[int]:
        """The KV numbers of all of `tokens`, which continue what is known."""
        known = min(len(self.states), len(self.tokens))
        states = self.states[:known]
        for token in tokens[known:]:
            states.append(chain(states[-1] if states else weights, token))
        return states


class Runner:
    """One rank: KV tensors of its layers and a connector. Ranks of equal salt hold the same KV."""

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        num_blocks: int,
        rank: int,
        register: bool,
        layers: Sequence[int] = range(LAYERS),
        salt: int | None = None,
    ) -> None:
        self.connector = connector
        self.rank = rank
        self.launch: Callable[[Callable[[], None]], None] = lambda work: work()  # on a GPU: queued
        storage = torch.zeros(len(layers), num_blocks, HEADS, BLOCK, WIDTH, dtype=torch.int64)
        caches = {f"layers.{i}": layer for i, layer in zip(layers, storage.unbind(0), strict=True)}
        if register:
            connector.register_kv_caches(caches)
        self.kv = [layer.numpy().view(np.uint64) for layer in caches.values()]  # registering moves the memory
        shape = (HEADS, WIDTH)
        self.salts = [
            np.array(
                [hash((rank if salt is None else salt, i, j)) & MASK for j in range(HEADS * WIDTH)], np.uint64
            ).reshape(shape)
            for i in layers
        ]

    def slots(self, blocks: list[int], first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, last)
        return np.array(blocks, np.int64)[positions // BLOCK], positions % BLOCK

    def write(self, blocks: list[int], first: int, numbers: list[int]) -> None:
        ids, offsets = self.slots(blocks, first, first + len(numbers))
        assert 0 not in ids, "the scheduler gave the null block to write to"
        values = np.array(numbers, np.uint64)
        for kv, salt in zip(self.kv, self.salts, strict=True):
            kv[ids, :, offsets] = values[:, None, None] ^ salt

    def wrong(self, blocks: list[int], first: int, numbers: list[int]) -> list[int]:
        """Positions, from `first` on, whose KV is not what it must be. Null blocks belong to no request."""
        ids, offsets = self.slots(blocks, first, first + len(numbers))
        values = np.array(numbers, np.uint64)
        bad = np.zeros(len(numbers), bool)
        for kv, salt in zip(self.kv, self.salts, strict=True):
            bad |= (kv[ids, :, offsets] != values[:, None, None] ^ salt).any(axis=(1, 2))
        return [first + int(i) for i in np.flatnonzero(bad & (ids != 0))]

    def check(self, name: str, blocks: list[int], computed: int, numbers: list[int]) -> None:
        wrong = self.wrong(blocks, 0, numbers)
        assert not wrong, (
            f"rank {self.rank}: request {name} attends to foreign KV at tokens {wrong[:5]}... of "
            f"{len(numbers)}, {computed} were computed before, blocks {blocks}"
        )

    def connector_output(self, output: SchedulerOutput) -> KVConnectorOutput:
        """What vLLM's runner collects after the forward, in its order."""
        results = self.connector.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )


class Batch:
    """The requests as vLLM's model runner knows them, in the order of its own."""

    def __init__(self, runners: list[Runner], drafts: int) -> None:
        self.rows: dict[str, Row] = {}
        self._runners = runners
        self._drafts = drafts  # proposed for each request
        self._luck = random.Random(5)

    def forward(self, output: SchedulerOutput, weights: int) -> ModelRunnerOutput:
        """Write the scheduled tokens' KV, check all KV that they attend to, sample."""
        self._take_changes(output)
        inputs: dict[str, list[int]] = {}
        numbers: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            drafts = self._drafts_of(row, output.scheduled_spec_decode_tokens.get(name, []))
            known = row.tokens[row.computed : row.computed + count - len(drafts)]
            assert len(known) == count - len(drafts), f"{name}: scheduled beyond what is known"
            inputs[name] = [*row.tokens[: row.computed + len(known)], *drafts]
            numbers[name] = row.numbers(inputs[name], weights)
            for runner in self._runners:
                fresh = numbers[name][row.computed :]
                runner.launch(partial(runner.write, list(row.blocks), row.computed, fresh))
        sampled: list[list[int]] = []
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            for runner in self._runners:
                runner.launch(partial(runner.check, name, list(row.blocks), row.computed, numbers[name]))
            sampled.append(self._sample(row, inputs[name], numbers[name], count))
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    def _take_changes(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self.rows[new.req_id] = Row(tokens, list(new.block_ids[0]), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.rows[name]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                tokens = cached.all_token_ids.get(name, row.tokens)
                self.rows[name] = Row(list(tokens), list(blocks[0]), computed)
            else:
                row.blocks += blocks[0] if blocks is not None else []
                # Under async scheduling the scheduler counts drafts as if all were accepted.
                assert row.computed <= computed if self._drafts else row.computed == computed

    def _drafts_of(self, row: Row, scheduled: list[int]) -> list[int]:
        """Under async scheduling they are placeholders for what this runner proposed itself."""
        if -1 not in scheduled:
            return scheduled
        mine = row.drafts[: len(scheduled)]
        return mine + [3] * (len(scheduled) - len(mine))

    def _sample(self, row: Row, inputs: list[int], numbers: list[int], count: int) -> list[int]:
        """Accept drafts as far as the model agrees, add one token; nothing while the prompt is not done."""
        row.states = numbers
        if len(inputs) < len(row.tokens):
            row.computed += count
            return []
        sampled = [next_token(numbers[len(row.tokens) - 1])]
        while (at := len(row.tokens) - 1 + len(sampled)) < len(inputs) and inputs[at] == sampled[-1]:
            sampled.append(next_token(numbers[at]))
        row.computed = len(row.tokens) + len(sampled) - 1
        row.states = numbers[: row.computed]
        row.tokens += sampled
        row.drafts = self._propose(row)
        return sampled

    def _propose(self, row: Row) -> list[int]:
        """Drafts for the tokens after the last one; each right with three chances in four."""
        state, found = row.states[-1], []
        token = row.tokens[-1]
        for _ in range(self._drafts):
            state = chain(state, token)
            token = next_token(state)
            if self._luck.random() < 0.25:
                token = 3 + (token + 1) % (VOCAB - 3)
            found.append(token)
        return found

    def take_drafts(self) -> DraftTokenIds:
        """What is proposed for the next step."""
        drafts = {name: row.drafts for name, row in self.rows.items() if row.drafts}
        return DraftTokenIds(list(drafts), list(drafts.values()))
