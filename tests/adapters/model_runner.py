"""The model runner's part of a step: KV of the made-up model is written, and all that a request attends to is checked, byte for byte.

Owns: the requests' tokens and blocks, and each rank's KV. Refuses to know: the scheduler, and what the connector does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from made_up_model import LAYERS, VOCAB, chain, next_token
from planning import get_kv_cache_config_from_groups
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvserver.adapters.vllm.support import ALLOCATES_IN_CONTEXT

COMPRESSED = 4  # tokens that a ring's layer compresses into one


@dataclass
class Row:
    """A request as the runner knows it."""

    tokens: list[int]
    tables: list[list[int]]  # blocks, by KV cache group
    computed: int  # tokens with KV
    numbers: list[int] = field(default_factory=list)  # KV numbers of the tokens
    drafts: list[int] = field(default_factory=list)
    state_at: int = 0  # tokens that end in the column where its last step's states begin
    accepted: int = 1  # its state is so many columns behind that one, less one
    prefilled: int = 0  # tokens that it had as it was scheduled first, or again
    verifies: bool = False  # this step has a state behind each of its tokens
    prompt_tokens: int = 0
    replay_start: int = 0  # replayed windows have KV from there on
    hit: int = 0  # tokens before it have KV, also those that are computed again for the replayed windows

    @property
    def blocks(self) -> list[int]:
        return [id for table in self.tables for id in table]

    def numbers_of(self, tokens: list[int], weights: int) -> list[int]:
        """The KV numbers of all of `tokens`, which continue what is known."""
        known = min(len(self.numbers), len(self.tokens))
        numbers = self.numbers[:known]
        for token in tokens[known:]:
            numbers.append(chain(numbers[-1] if numbers else weights, token))
        return numbers


@dataclass
class Layer:
    """Each word of a token's KV is the token's number, salted; of a state that of the last token."""

    name: str
    spec: KVCacheSpec
    kv: np.ndarray  # [block, head, token or several, word]
    salt: np.ndarray  # [head, word]

    @property
    def replayed(self) -> int:
        """Tokens before a hit's end for which the layer's KV is computed again; 0: its KV is cached."""
        return int(getattr(self.spec, "prefix_replay_tokens", 0))

    def first_read(self, token: int, replay_start: int) -> int:
        """The first token that this one attends to."""
        if self.replayed:
            return max(replay_start, token - self.spec.sliding_window + 1)
        if isinstance(self.spec, SlidingWindowSpec):
            return max(0, token - self.spec.sliding_window + 1)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return token // self.spec.attention_chunk_size * self.spec.attention_chunk_size
        return 0

    def places(self, table: list[int], first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, blocks, places in the blocks) of the KV of tokens [first, end); several may have one KV, the last one's."""
        size = self.spec.block_size
        each = size // self.kv.shape[2]
        tokens = np.arange((first + 1 + each - 1) // each * each - 1, end, each)
        return tokens, np.array(table, np.int64)[tokens // size], tokens % size // each

    def words(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, None, None] ^ self.salt


class Runner:
    """One rank: KV tensors of its layers, where vLLM has them in its memory, and a connector."""

    def __init__(
        self, connector: KVConnectorBase_V1, config: VllmConfig, caches: KVCacheConfig, rank: int, register: bool
    ) -> None:
        self.connector = connector
        self.rank = rank
        self.launch: Callable[[Callable[[], None]], None] = lambda work: work()  # on a GPU: queued
        groups = caches.kv_cache_groups
        stages, replicas = config.parallel_config.pipeline_parallel_size, config.parallel_config.tensor_parallel_size
        if stages > 1:  # the last one has one layer more than the others
            own = range(rank * LAYERS, (rank + 1) * LAYERS + (rank == stages - 1))
            groups = [KVCacheGroupSpec([f"layers.{i}" for i in own], groups[0].kv_cache_spec)]
        specs = {name: _spec_of(group, name) for group in groups for name in group.layer_names}
        # Before vLLM 0.32 registration moves the memory.
        with (connector.get_mem_pool_context() if ALLOCATES_IN_CONTEXT else None) or nullcontext():
            views = _views(config, groups, specs)
        if register:
            addresses = [view.data_ptr() for view in views.values()]
            connector.register_kv_caches(views)
            moved = [view.data_ptr() for view in views.values()] != addresses
            assert not (moved and ALLOCATES_IN_CONTEXT), "a runner has captured the addresses"
        self.layers: list[list[Layer]] = []  # by KV cache group
        for group in groups:
            self.layers.append([])
            for name in group.layer_names:
                kv, spec = views[name].numpy().view(np.uint64), specs[name]
                same = replicas > 1 and (caches.kv_tp_replicas > 1 or getattr(spec, "max_tp_shards", None) == 1)
                source = random.Random(f"{name} {0 if same else rank}")
                words = [source.getrandbits(64) for _ in range(kv.shape[1] * kv.shape[3])]
                salt = np.array(words, np.uint64).reshape(kv.shape[1], kv.shape[3])
                self.layers[-1].append(Layer(name, spec, kv, salt))

    @property
    def kv(self) -> list[np.ndarray]:
        return [layer.kv for layers in self.layers for layer in layers]

    def write_early(self, output: SchedulerOutput) -> None:
        """What vLLM's runner writes before the forward: zeroes into new blocks, and copies of what was partly hit."""
        zeroed = output.new_block_ids_to_zero or []
        copies = np.array(output.kv_cache_block_copies or [], np.int64).reshape(-1, 2)

        def write() -> None:
            for layer in (layer for layers in self.layers for layer in layers):
                if isinstance(layer.spec, AttentionSpec):
                    layer.kv[zeroed] = 0
                layer.kv[copies[:, 1]] = layer.kv[copies[:, 0]]

        if zeroed or len(copies):
            self.launch(write)

    def copy_states(self, tables: list[list[int]], source: int, target: int) -> None:
        """Copy the states from one column of the block tables to another."""
        for table, layer in self._states(tables):
            assert table[target], "the scheduler gave the null block for a state"
            layer.kv[table[target]] = layer.kv[table[source]]

    def write(
        self,
        name: str,
        tables: list[list[int]],
        first: int,
        numbers: Sequence[int],
        hit: int = 0,
        accepted: int = 1,
        each: bool = False,
    ) -> None:
        """The KV of the tokens from `first` on, of replayed layers alone before `hit`; `numbers` are those of all tokens.

        States must be right as they begin, `accepted` - 1 columns behind the last token's, and rings have the raw keys of what is
        compressed with the first token. `each`: a decode with drafts has a state behind each token, in a column of its own.
        """
        values, end = np.array(numbers, np.uint64), len(numbers)
        for table, layer in self._rings(tables):
            size = layer.kv.shape[2]
            open_group = np.arange(first // COMPRESSED * COMPRESSED, first)
            assert (layer.kv[table[0], :, open_group % size] == layer.words(values[open_group])).all(), (
                f"rank {self.rank}: request {name} compresses token {first} with raw keys that are not its own"
            )
            last = np.arange(max(first, end - size), end)
            layer.kv[table[0], :, last % size] = layer.words(values[last])
        for table, layer in self._attention(tables):
            tokens, ids, places = layer.places(table, first if layer.replayed else max(first, hit), end)
            assert 0 not in ids, "the scheduler gave the null block to write to"
            layer.kv[ids, :, places] = layer.words(values[tokens])
        for table, layer in self._states(tables):
            column = (end - 1) // layer.spec.block_size
            begun = layer.words(values[first - 1 : first])
            assert not first or (layer.kv[table[column + accepted - 1], :, 0] == begun).all(), (
                f"rank {self.rank}: request {name} goes on from a foreign state at token {first}, {layer.name}: {table}"
            )
            for place, value in enumerate(values[first if each else end - 1 :], column):
                assert table[place], "the scheduler gave the null block for a state"
                layer.kv[table[place]] = value ^ layer.salt[:, None]

    def check(
        self,
        name: str,
        tables: list[list[int]],
        computed: int,
        numbers: Sequence[int],
        replay_start: int = 0,
        each: bool = False,
    ) -> None:
        """All KV that the tokens from `computed` on attend to; and the states as they end, as write() has them."""
        values, end = np.array(numbers, np.uint64), len(numbers)
        for table, layer in self._attention(tables):
            tokens, ids, places = layer.places(table, layer.first_read(computed, replay_start), end)
            bad = (layer.kv[ids, :, places] != layer.words(values[tokens])).any(axis=(1, 2)) | (ids == 0)
            assert not bad.any(), (
                f"rank {self.rank}: request {name} attends to foreign KV of {layer.name} at tokens {tokens[bad][:5]}... "
                f"of {end}, {computed} were computed before, blocks {table}"
            )
        for table, layer in self._states(tables):
            for place, value in enumerate(values[computed if each else end - 1 :], (end - 1) // layer.spec.block_size):
                assert (layer.kv[table[place], :, 0] == value ^ layer.salt).all(), (
                    f"the state of {name} in {layer.name} was overwritten"
                )

    def _attention(self, tables: list[list[int]]) -> list[tuple[list[int], Layer]]:
        other = (MambaSpec, CircularBufferSpec)
        return [(t, layer) for t, layer in self._with_tables(tables) if not isinstance(layer.spec, other)]

    def _rings(self, tables: list[list[int]]) -> list[tuple[list[int], Layer]]:
        return [(t, layer) for t, layer in self._with_tables(tables) if isinstance(layer.spec, CircularBufferSpec)]

    def _states(self, tables: list[list[int]]) -> list[tuple[list[int], Layer]]:
        return [(t, layer) for t, layer in self._with_tables(tables) if isinstance(layer.spec, MambaSpec)]

    def _with_tables(self, tables: list[list[int]]) -> list[tuple[list[int], Layer]]:
        return [(table, layer) for table, layers in zip(tables, self.layers, strict=True) for layer in layers]

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
        self._scheduled: Container[str] = ()
        layers = [layer for layers in runners[0].layers for layer in layers]
        self._replayed = max((layer.replayed for layer in layers), default=0)
        self._state_tokens = next((layer.spec.block_size for layer in layers if isinstance(layer.spec, MambaSpec)), 0)

    def forward(self, output: SchedulerOutput, weights: int) -> ModelRunnerOutput:
        """Write the scheduled tokens' KV, check all KV that they attend to, sample."""
        self._take_changes(output)
        self._scheduled = output.num_scheduled_tokens
        inputs: dict[str, list[int]] = {}
        numbers: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            drafts = self._drafts_of(row, output.scheduled_spec_decode_tokens.get(name, []))
            known = row.tokens[row.computed : row.computed + count - len(drafts)]
            assert len(known) == count - len(drafts), f"{name}: scheduled beyond what is known"
            inputs[name] = [*row.tokens[: row.computed + len(known)], *drafts]
            numbers[name] = row.numbers_of(inputs[name], weights)
            row.verifies = count == len(drafts) + 1 and (bool(drafts) or row.computed >= row.prefilled)
        for act in (self._begin_states, self._write, self._check):
            for name in output.num_scheduled_tokens:
                act(name, self.rows[name], numbers[name])
        sampled = [
            self._sample(self.rows[name], inputs[name], numbers[name], count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        names = list(output.num_scheduled_tokens)
        for name, tokens in zip(names, sampled, strict=True):
            self._end_states(self.rows[name], len(tokens))
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    def _begin_states(self, name: str, row: Row, numbers: list[int]) -> None:
        """Copy the state that a step begins with, as vLLM's `preprocess_mamba_align_fused_kernel` and `precopy_mamba_align_fused_kernel` do.

        A step's states begin in the column of its last token, drafts included. The state of the step before is copied there: other
        requests may share the block that has it.
        """
        if not self._state_tokens:
            return
        source, target = ((tokens - 1) // self._state_tokens for tokens in (row.state_at, len(numbers)))
        if row.state_at and source != target:
            self._copy_states(row, source + row.accepted - 1, target)
            row.accepted = 1
        row.state_at = len(numbers)

    def _end_states(self, row: Row, sampled: int) -> None:
        """Copy the state of a block whose end the accepted tokens passed, as vLLM's `postprocess_mamba_fused_kernel` does."""
        row.accepted = max(1, sampled)
        if not self._state_tokens:
            return
        column, running = (row.state_at - 1) // self._state_tokens, row.computed - row.accepted + 1
        boundary = row.computed // self._state_tokens * self._state_tokens
        if boundary >= running:
            source, target = column + boundary - running, boundary // self._state_tokens - 1
            if source != target:
                self._copy_states(row, source, target)
            if column == target:
                row.accepted = 1

    def _copy_states(self, row: Row, source: int, target: int) -> None:
        for runner in self._runners:
            runner.launch(partial(runner.copy_states, deepcopy(row.tables), source, target))

    def _write(self, name: str, row: Row, numbers: list[int]) -> None:
        for runner in self._runners:
            runner.launch(
                partial(
                    runner.write, name, deepcopy(row.tables), row.computed, numbers, row.hit, row.accepted, row.verifies
                )
            )

    def _check(self, name: str, row: Row, numbers: list[int]) -> None:
        for runner in self._runners:
            runner.launch(
                partial(runner.check, name, deepcopy(row.tables), row.computed, numbers, row.replay_start, row.verifies)
            )

    @staticmethod
    def _begin(tokens: list[int], tables: Sequence[Sequence[int]], computed: int) -> Row:
        return Row(tokens, [list(table) for table in tables], computed, state_at=computed, prefilled=len(tokens))

    def _take_changes(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self.rows[new.req_id] = self._begin(tokens, new.block_ids, new.num_computed_tokens)
            self.rows[new.req_id].prompt_tokens = len(new.prompt_token_ids)
            if start := getattr(new, "replay_start", 0):
                self.rows[new.req_id].replay_start, self.rows[new.req_id].hit = start, start + self._replayed
        cached = output.scheduled_cached_reqs
        for name, computed, blocks, outputs in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.new_block_ids,
            cached.num_output_tokens,
            strict=True,
        ):
            row = self.rows[name]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                tokens = cached.all_token_ids.get(name, row.tokens)
                self.rows[name] = self._begin(list(tokens), blocks, computed)
            else:
                for table, more in zip(row.tables, blocks or [[]] * len(row.tables), strict=True):
                    table += more
                if computed < row.computed:  # vLLM took steps back
                    del row.tokens[row.prompt_tokens + outputs :], row.numbers[computed:]
                    row.computed = row.state_at = computed
                    row.accepted = 1
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
        row.numbers = numbers
        if len(inputs) < len(row.tokens):
            row.computed += count
            return []
        sampled = [next_token(numbers[len(row.tokens) - 1])]
        while (at := len(row.tokens) - 1 + len(sampled)) < len(inputs) and inputs[at] == sampled[-1]:
            sampled.append(next_token(numbers[at]))
        row.computed = len(row.tokens) + len(sampled) - 1
        row.numbers = numbers[: row.computed]
        row.tokens += sampled
        row.drafts = self._propose(row)
        return sampled

    def _propose(self, row: Row) -> list[int]:
        """Drafts for the tokens after the last one; each right with three chances in four."""
        number, found = row.numbers[-1], []
        token = row.tokens[-1]
        for _ in range(self._drafts):
            number = chain(number, token)
            token = next_token(number)
            if self._luck.random() < 0.25:
                token = 3 + (token + 1) % (VOCAB - 3)
            found.append(token)
        return found

    def take_drafts(self) -> DraftTokenIds:
        """Drafts for the next step, of the requests of the last one."""
        drafts = {name: row.drafts for name, row in self.rows.items() if row.drafts and name in self._scheduled}
        return DraftTokenIds(list(drafts), list(drafts.values()))


def _spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _views(
    config: VllmConfig, groups: list[KVCacheGroupSpec], specs: dict[str, KVCacheSpec]
) -> dict[str, torch.Tensor]:
    """Each layer's KV cache in one memory, as vLLM places it: layers of several groups may have the same bytes."""
    placed = get_kv_cache_config_from_groups(config, groups, 0)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    memory = torch.zeros(placed.kv_cache_tensors[0].size, dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for tensor in placed.kv_cache_tensors:
        made = create_kv_cache_views(memory, specs[tensor.layers[0]], placed.num_blocks, layout, tensor)
        views.update(zip(tensor.layers, made, strict=True))
    return views
