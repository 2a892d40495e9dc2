"""SGLang's real tree over pools of each kind, without a model: what a request loads is what was computed for its keys, in all pools.

Pools of states and of DSA compute on GPUs only, so this is how they are tested here.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from support.daemon import Daemon, wait_until
from support.properties import examples
from trees import PAGE, WINDOW, Tree, hashes

from kvserver.adapters.sglang import KVServerLinker

NEEDED = -(-WINDOW // PAGE)  # pages of a window
KINDS = ["mha", "mla", "dsa", "windows", "states", "mla-states", "eagle"]


class Recording(KVServerLinker):  # type: ignore[misc, valid-type]
    """A linker that notes the keys of each pool's stores."""

    stored: dict[str, set[str]]

    def _store(self, transfers: list[Any], session_id: str) -> bool:
        begun = bool(super()._store(transfers, session_id))
        for transfer in transfers if begun else []:
            self.__dict__.setdefault("stored", {}).setdefault(transfer.name.value, set()).update(transfer.keys)
        return begun


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    started = Daemon(l1_size="1GiB")
    started.start()
    yield started
    started.close()


@pytest.fixture(scope="module")
def arguments(model: Path) -> ServerArgs:
    return trees.prepare(model)


Make = Callable[..., list[Tree]]


@pytest.fixture
def make(daemon: Daemon, arguments: ServerArgs) -> Iterator[Make]:
    """`make(kind, count)`: engines that have registered."""
    made: list[Tree] = []

    def start(kind: str, count: int = 2, linker: type = Recording) -> list[Tree]:
        made.extend(Tree(kind, daemon.endpoint, arguments, linker) for _ in range(count))
        wait_until(
            lambda: sum(bool(each["namespace"]) for each in daemon.status()["instances"]) == len(made), 30, "registered"
        )
        for tree in made[-count:]:
            tree.wait_for_daemon(daemon)
        return made[-count:]

    yield start
    for tree in made:
        tree.close()
    wait_until(lambda: not daemon.status()["instances"], 30, "no engine is left")


def text(pages: int, seed: object) -> list[int]:
    source = random.Random(repr(seed))
    return [source.randrange(1000) for _ in range(pages * PAGE)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_loads_what_the_first_computed_byte_for_byte_from_all_pools(kind: str, make: Make) -> None:
    first, second = make(kind)
    prompt = text(8, kind)
    length = len(first.keys(prompt)) * PAGE  # with a draft the key of the last page needs one token more
    first.compute(prompt)
    assert second.load_all(prompt) == (length, [])
    longer = prompt + text(4, "more")
    assert second.load_all(longer) == (length, [])
    assert all(not tree.linker.faults.counts for tree in (first, second))


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_of_each_pool_is_seen_if_it_is_left_out(kind: str, make: Make) -> None:
    """The negative control: bytes that a load does not bring are noticed, in every tensor."""
    first, second = make(kind)
    prompt = text(5, (kind, "left out"))
    first.compute(prompt)
    for pool in second.pools.values():
        for name, tensor in pool.tensors.items():
            load = second.linker.load

            def load_all_but_one(rid: str, transfers: list[Any], tensor: Any = tensor, load: Any = load) -> bool:
                before = tensor.clone()
                loaded = bool(load(rid, transfers))
                tensor.copy_(before * 0)
                return loaded

            second.linker.load = load_all_but_one
            loaded, wrong = second.load_all(prompt)
            second.linker.load = load
            assert loaded == len(first.keys(prompt)) * PAGE
            assert {which for which, _ in wrong} == {name}


def test_a_request_may_continue_only_where_the_window_of_an_earlier_one_was_kept(make: Make) -> None:
    first, second = make("windows")
    prompt = text(8, "kept")
    first.compute(prompt, passed=8 - NEEDED)
    assert second.load_all(prompt[: 7 * PAGE]) == (0, [])
    assert second.load_all(prompt + text(1, "more")) == (len(prompt), [])


def test_a_request_may_continue_only_where_the_state_of_an_earlier_one_was_kept(make: Make) -> None:
    first, second = make("states")
    prompt = text(8, "states")
    first.compute(prompt[: 3 * PAGE])
    first.compute(prompt)
    assert second.load_all(prompt[: 2 * PAGE]) == (0, [])
    assert second.load_all(prompt[: 7 * PAGE]) == (3 * PAGE, [])
    assert second.load_all(prompt + text(1, "more")) == (len(prompt), [])


def test_a_request_whose_engine_has_a_part_of_the_window_itself_loads_the_rest(make: Make) -> None:
    first, second = make("windows")
    prompt = text(8, "part")
    first.compute(prompt)
    second.compute(prompt[: 7 * PAGE])
    assert second.load_all(prompt) == (PAGE, [])


def test_a_page_is_not_found_where_the_token_behind_it_differs_if_a_draft_was_computed_with_it(make: Make) -> None:
    first, second = make("eagle")
    prompt = text(4, "draft")
    first.compute([*prompt, 1])
    assert second.load_all([*prompt, 1]) == (4 * PAGE, [])
    assert second.load_all([*prompt, 2]) == (3 * PAGE, [])


@pytest.mark.parametrize("kind", ["mha", "eagle", "states"])
def test_routers_find_pages_by_tokens_with_a_draft_and_beside_states(
    kind: str, make: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a draft SGLang's tree hashes each token with the next one, but not beside states."""
    if kind == "states":
        monkeypatch.setattr(trees, "params_of", functools.partial(trees.params_of, is_eagle=True))
    (engine,) = make(kind, 1)
    tokens = [*text(4, (kind, "tokens")), 1]
    engine.compute(tokens)
    model = daemon.status()["instances"][0]["model_name"]
    found = wait_until(lambda: daemon.match(model=model, tokens=tokens), what="the engine is described")
    assert [one["blocks"] for one in found.values()] == [4]
    wait_until(
        lambda: [one["l1"] for one in daemon.match(model=model, tokens=tokens).values()] == [4], what="the pages"
    )


def test_kv_of_one_lora_is_not_found_with_another_or_without_one(make: Make, daemon: Daemon) -> None:
    """SGLang gives each LoRA an id, and a request's id goes into its keys."""
    first, second = make("mha")
    prompt = text(4, "lora")
    ids = [LoRARef.deterministic_id(name, "/loras") for name in ("one", "two")]
    extras = [Req("r", "", prompt, SamplingParams(), lora_id=each).extra_key for each in (*ids, None)]
    assert len(set(extras)) == 3
    first.compute(prompt, extra=extras[0])
    assert second.load_all(prompt, extras[1]) == (0, [])
    assert second.load_all(prompt, extras[2]) == (0, [])
    assert second.load_all(prompt, extras[0]) == (len(prompt), [])
    stored = hashes(prompt, extras[0])
    wait_until(lambda: [one["l1"] for one in daemon.match(block_hashes=stored).values()] == [4, 4], what="the pages")
    for extra, pages in zip(extras, (4, 0, 0), strict=True):
        found = daemon.match(block_hashes=hashes(prompt, extra)).values()
        assert [one["l1"] for one in found] == [pages, pages], "routers find them by hashes"


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_lookup_of_several_ranks_answers_all_lengths_that_can_be_loaded(kind: str, make: Make) -> None:
    """SGLang intersects them. Of one rank the longest is enough."""
    first, second = make(kind)
    prompt = text(9, ("lengths", kind))
    for pages in (2, 5, 9):
        first.compute(prompt[: pages * PAGE], passed=max(0, pages - NEEDED))
    transfers = [
        component.build_external_linker_transfer("lookup", None, hashes(prompt))
        for component in second.tree.components.values()
    ]
    wait_until(lambda: second.linker.lookup("r", transfers) == [9], 5, "an answer")
    second.linker._ranks.size = 2
    found = second.linker.lookup("r", transfers)
    assert found == expected_lengths(first, hashes(prompt))
    assert len(found) in range(2, 9), "some lengths, and not all"


def refusals_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "runs without cache" in record.getMessage()]


def test_a_part_of_the_tree_that_is_not_known_is_refused_with_one_warning_that_names_it(
    daemon: Daemon, arguments: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    components = {ComponentType.FULL, ComponentType.C128, ComponentType.AUXILIARY_SWA}
    extra = {"kvserver.endpoint": daemon.endpoint}
    with caplog.at_level(logging.WARNING, "kvserver"):
        linker = KVServerLinker(arguments, trees.params_of("mha"), components=components, extra_config=extra)
    assert refusals_of(caplog) == [
        "kvserver: this engine runs without cache: a cache with AUXILIARY_SWA and C128; FULL, SWA, MAMBA are served"
    ]
    assert linker.lookup("r", []) == []
    linker.close()


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_an_engine_with_a_pool_that_is_not_served_starts_and_runs_without_cache(
    kind: str, daemon: Daemon, arguments: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(params: Any) -> None:
        if kind == "windows":
            params.token_to_kv_pool_allocator.get_kvcache().swa_kv_pool.k_scale_buffer = [1]
        else:
            params.req_to_token_pool.mamba_pool.enable_linear_replayssm = True

    with caplog.at_level(logging.WARNING, "kvserver"):
        tree = Tree(kind, daemon.endpoint, arguments, before=spoil)
    (refusal,) = refusals_of(caplog)
    named = "a KV cache pool of kind MHATokenToKVPool" if kind == "windows" else "a pool of states with a log"
    assert named in refusal
    prompt = text(4, "refused")
    tree.compute(prompt)
    assert tree.load_all(prompt + text(2, "more")) == (0, [])
    tree.close()


def expected_lengths(stored_by: Tree, keys: list[str]) -> list[int]:
    """The lengths at which each pool has what a hit needs, by what was stored."""
    stored = stored_by.linker.stored
    found = []
    for end in range(1, len(keys) + 1):
        if not set(keys[:end]) <= stored["kv"]:
            break
        windows = "swa" not in stored_by.pools or set(keys[max(0, end - NEEDED) : end]) <= stored.get("swa", set())
        states = "mamba" not in stored_by.pools or keys[end - 1] in stored.get("mamba", set())
        if windows and states:
            found.append(end)
    return found


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=4),  # (pages, which)
        st.integers(0, 12),  # pages that the window has passed
        st.integers(0, 3),  # pages of each pool that are evicted then
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_random_requests_load_the_longest_prefix_that_all_pools_have_and_its_bytes(kind: str, make: Make) -> None:
    first, second = make(kind)
    totals = {"loaded": 0, "examples": 0}

    @examples(25)
    @given(PROMPTS)
    def check(prompts: list[tuple[list[tuple[int, int]], int, int]]) -> None:
        totals["examples"] += 1
        second.flush()
        first.flush()
        texts = []
        for parts, passed, evicted in prompts:
            prompt: list[int] = []
            for pages, which in parts:
                prompt += text(pages, (totals["examples"], len(prompt), pages, which))
            first.compute(prompt, passed=min(passed, len(prompt) // PAGE - 1))
            first.tree.evict(EvictParams(0, evicted * PAGE if kind == "windows" else 0, evicted % 2))
            texts.append(prompt)
        for prompt in texts:
            expected = max(expected_lengths(first, hashes(prompt)), default=0)
            loaded, wrong = second.load_all(prompt + text(1, "end"))
            assert wrong == []
            assert loaded == expected * PAGE
            totals["loaded"] += loaded

    check()
    assert totals["loaded"] > 100 * PAGE
