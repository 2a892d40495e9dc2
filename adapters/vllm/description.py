"""The description of the engine for routers: model, form of its block hashes, its own KV events.

Owns: the reading of vLLM's configuration, and when DescribeScheduler is due. Refuses to know: how it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvserver.adapters.common.link import Session
from kvserver.adapters.vllm.support import hash_block_tokens
from vllm.distributed import kv_events
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvserver.protocol import DescribeScheduler, Error, ErrorCode, HashForm, KVGroup

_AGAIN_SECONDS = (
    5.0  # the daemon forgets an instance that registers again, as after sleep; a repeated description costs nothing
)
_REFUSED_SECONDS = 0.5
_UNKNOWN = {ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.NOT_READY.value}


class Introduction:
    """again() for each session, and when the result of `describe` has changed."""

    def __init__(self, describe: Callable[[], DescribeScheduler]) -> None:
        self._describe = describe
        self._number: int | None = None  # of the last one
        self._due = 0.0

    def again(self) -> None:
        self._due = 0.0

    def send(self, session: Session) -> None:
        """Send the description if it is due. If it cannot be sent, it is due again in the next pass."""
        now = time.monotonic()
        if now < self._due:
            return
        self._number = session.channel.send(self._describe())
        if self._number is not None:
            self._due = now + _AGAIN_SECONDS

    def refused(self, number: int, error: Error) -> None:
        """Any message was refused: a daemon that does not know the instance has no description of it either."""
        if number == self._number or error.code in _UNKNOWN:
            self._due = min(self._due, time.monotonic() + _REFUSED_SECONDS)


class Engine:
    """The engine as its configuration describes it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._caches_config = kv_cache_config
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.groups = tuple(KVGroup(_kind(spec), _window(spec)) for spec in specs)

    @property
    def publishes(self) -> bool:
        """Whether it has KV events of its own."""
        return bool(getattr(getattr(self._config, "kv_events_config", None), "enable_kv_cache_events", False))

    def describe(self) -> dict[str, Any]:
        """Fields of DescribeScheduler.

        REQUIRES: called in the scheduler's process after the engine core was built, where vLLM sets the start of hashes.
        """
        start = getattr(kv_cache_utils, "NONE_HASH", b"")
        endpoint, replay_endpoint, topic = _events_of(self._config) if self.publishes else ("", "", "")
        return {
            "hash_form": hash_form(),
            "hash_algorithm": str(self._config.cache_config.prefix_caching_hash_algo),
            "hash_start": start if isinstance(start, bytes) else b"",
            "hash_block_tokens": hash_block_tokens(self._config, self._caches_config),
            "groups": self.groups,
            "events_endpoint": endpoint,
            "events_replay_endpoint": replay_endpoint,
            "events_topic": topic,
        }


def hash_form() -> HashForm:
    """The form in which the engine's KV events name blocks, also where they are off."""
    convert = getattr(kv_cache_utils, "maybe_convert_block_hash", bytes)
    return "int" if isinstance(convert(bytes(32)), int) else "bytes"


def _kind(spec: Any) -> str:
    """The kind as in vLLM's events; empty where this vLLM has no name for it."""
    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    return str(kind(spec).value) if kind is not None else ""


def _window(spec: Any) -> int | None:
    window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    found: int | None = window(spec) if window is not None else getattr(spec, "sliding_window", None)
    return found


def _events_of(vllm_config: Any) -> tuple[str, str, str]:
    """Where processes of this machine can subscribe to the engine's own KV events, and request missed ones; their topic.

    vLLM listens at an address with a wildcard only; from another it connects to a subscriber. With port 0, only vLLM's
    publisher knows the port. In both cases no other process can subscribe.
    """
    config = vllm_config.kv_events_config
    if config.publisher != "zmq":
        return "", "", ""
    parallel = vllm_config.parallel_config
    rank = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    offset = kv_events.ZmqEventPublisher.offset_endpoint_port
    endpoint = offset(config.endpoint, rank) or ""
    replay_endpoint = offset(config.replay_endpoint, rank) or ""
    if not ("*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")) or endpoint.endswith(":0"):
        return "", "", ""
    return local(endpoint), "" if replay_endpoint.endswith(":0") else local(replay_endpoint), config.topic


def local(endpoint: str) -> str:
    """How to connect from this machine to what listens at the address."""
    for wildcard, address in (("//*:", "//127.0.0.1:"), ("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        endpoint = endpoint.replace(wildcard, address)
    return endpoint
