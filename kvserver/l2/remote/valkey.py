"""Client of a Valkey or Redis server: `valkey-glide-sync`.

It connects to one server, or to a proxy before several. With `?cluster=true` it connects to the nodes of a cluster, of which the
URL names one. A value is read straight into the caller's buffer. Expiry is the server's: `?expiry=7d` sends EX with every value.

Owns: the connection, the form of URLs of this kind, and the meaning of the client's errors.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from kvserver.config import TierUrl
from kvserver.l2.remote.store import (
    StoreClient,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTimeout,
)
from kvserver.l2.remote.tls import authorities_of, own_certificate_of
from kvserver.protocol import ConfigError

_PORT = 6379
_LARGEST_VALUE = "proto-max-bulk-len"
_MOST_VALUE_BYTES = 512 << 20  # that, by default
_MOST_QUESTIONS = 512
_NO_PRIMARY = "No primary node found"  # the server is a replica, from which a client that is to write does not read
_MOST_WAIT_MS = 1000  # for a replica
_ANSWERED = ("signalled by the server", "not allowed in read-only mode")  # the second one by a client of a replica
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_EXPIRY_SECONDS = 10 * 365 * 86400


class ValkeyUrl:
    """Parts of a URL of this kind. Raises ConfigError if the URL is invalid."""

    def __init__(self, url: TierUrl) -> None:
        self.host, self.port = url.host, url.port or _PORT
        self.username, self.password = url.username, url.password
        self.tls = url.scheme in ("valkeys", "rediss")
        self.authorities = authorities_of(url)
        self.own_certificate = own_certificate_of(url)
        self.cluster = url.states("cluster")
        self.timeout_ms, self.seconds_for = max(1, int(url.timeout_seconds * 1000)), url.seconds_for
        first, _, rest = url.path.strip("/").partition("/")
        self.database, self.prefix = (int(first), rest) if re.fullmatch(r"\d{1,5}", first) else (0, url.path.strip("/"))
        self.prefix = self.prefix or "kvserver"
        if self.cluster and self.database:
            raise ConfigError(f"--l2 {url.shown}: a cluster has one database: leave /{self.database} away")
        self.expiry_seconds = _expiry(url)


def _expiry(url: TierUrl) -> int:
    """0: values stay until the server evicts them."""
    text = url.own.get("expiry", "")
    match = re.fullmatch(r"(\d{1,10})([smhd]?)", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if text and not 0 < seconds <= _MOST_EXPIRY_SECONDS:
        raise ConfigError(f"--l2 {url.shown}: expiry={text}: write a time such as 12h or 7d")
    return seconds


def require_client(url: TierUrl) -> None:
    """ConfigError, with the command to type, unless the client's library is there."""
    try:
        import glide_sync
    except ImportError:
        raise ConfigError(f"--l2 {url.shown} needs a client of Valkey: pip install valkey-glide-sync") from None
    glide_sync.Logger.set_logger_config(glide_sync.LogLevel.OFF)


def connect(url: ValkeyUrl, size: int = 0) -> StoreClient:
    """StoreError if the server does not answer. `size`: bytes of the largest request."""
    return _ValkeyClient(url, size)


def _tls_failure(url: ValkeyUrl) -> StoreError | None:
    """The failure of TLS behind a failed connection, which the client states as a time-out; None if TLS works."""
    authorities = url.authorities.decode("ascii", "replace") if url.authorities else None
    try:
        context = ssl.create_default_context(cadata=authorities)
        if url.own_certificate:
            context.load_cert_chain(*url.own_certificate)
        with (
            socket.create_connection((url.host, url.port), url.timeout_ms / 1000) as plain,
            context.wrap_socket(plain, server_hostname=url.host) as secure,
        ):
            secure.sendall(b"PING\r\n")  # by TLS 1.3 only the answer states that the server wants a certificate
            secure.recv(1)
    except ssl.SSLCertVerificationError as error:
        return StoreError(f"the server's certificate is refused: {error.verify_message}")
    except ssl.SSLError as error:
        return StoreError(f"TLS with the server fails: {error.reason}")
    except OSError:
        pass  # what the client states is why
    return None


def _require_success(answers: list[Any]) -> list[Any]:
    """The answers. The first one that is a StoreError is raised."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers


class _TooLarge(StoreError):
    """A value is larger than the buffer for it."""


class _ValkeyClient:
    most_questions, asks_apart = _MOST_QUESTIONS, False

    def __init__(self, url: ValkeyUrl, size: int) -> None:
        import glide_sync

        glide: Any = glide_sync
        self._glide = glide
        self.most_value_bytes = _MOST_VALUE_BYTES
        self._is_cluster = url.cluster
        self._wait_ms = max(1, min(_MOST_WAIT_MS, url.timeout_ms // 2))
        self._expiry_seconds = url.expiry_seconds
        self._expiry = glide.ExpirySet(glide.ExpiryType.SEC, url.expiry_seconds) if url.expiry_seconds else None
        credentials = (
            glide.ServerCredentials(password=url.password, username=url.username or None) if url.password else None
        )
        common = {
            "use_tls": url.tls,
            "credentials": credentials,
            "request_timeout": max(1, int(url.seconds_for(size) * 1000)),
            "client_name": "kvserver",
        }
        limits = {
            "connection_timeout": url.timeout_ms,
            "tls_config": self._certificates(url) if url.authorities or url.own_certificate else None,
        }
        nodes = [glide.NodeAddress(url.host, url.port)]
        self._client: Any
        if url.cluster:
            advanced = glide.AdvancedGlideClusterClientConfiguration(**limits)
            cluster = glide.GlideClusterClientConfiguration(nodes, advanced_config=advanced, **common)
            self._client = self._connect(lambda: glide.GlideClusterClient.create(cluster), url)
            self._new_batch = glide.ClusterBatch
            self.most_value_bytes = self._largest_value()
            return
        common |= {"database_id": url.database, "advanced_config": glide.AdvancedGlideClientConfiguration(**limits)}
        alone = glide.GlideClientConfiguration(nodes, **common)
        try:
            self._client = self._connect(lambda: glide.GlideClient.create(alone), url)
        except StoreError as error:
            if _NO_PRIMARY not in str(error):
                raise
            replica = glide.GlideClientConfiguration(nodes, read_only=True, **common)
            self._client = self._connect(lambda: glide.GlideClient.create(replica), url)
        self._new_batch = glide.Batch
        if "cluster_enabled:1" in self._cluster_info():
            self.close()
            raise StoreError("the server is a node of a cluster: add cluster=true, or name a proxy before it")
        self.most_value_bytes = self._largest_value()

    def _certificates(self, url: ValkeyUrl) -> Any:
        """The library reads the files of the client's own certificate again, so that it may be replaced."""
        certificate, key = url.own_certificate or (None, None)
        return self._glide.TlsAdvancedConfiguration(
            root_pem_cacerts=url.authorities, client_cert_path=certificate, client_key_path=key
        )

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | StoreError | None]:
        try:
            if len(names) == 1:
                counts = [self._try(lambda: self._client.get(names[0], buffer=buffers[0]))]
            else:
                counts = self._try(lambda: self._client.mget(list(names), buffers=list(buffers)))
        except _TooLarge:
            if len(names) == 1:
                return [buffers[0][:0]]
            return [self.get([name], [buffer])[0] for name, buffer in zip(names, buffers, strict=True)]
        pairs = zip(counts, buffers, strict=True)
        return [None if count is None else buffer[: int(count)] for count, buffer in pairs]

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        batch = self._new_batch(is_atomic=False)
        for name, value in zip(names, values, strict=True):
            batch.set(name, value, expiry=self._expiry)
        return [answer if isinstance(answer, StoreError) else None for answer in self._exec(batch)]

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]:
        batch = self._new_batch(is_atomic=False)
        for name in names:
            batch.exists([name])
        return [answer if isinstance(answer, StoreError) else bool(answer) for answer in self._exec(batch)]

    def delete(self, names: Sequence[str]) -> None:
        self._try(lambda: self._client.unlink(list(names)))

    def refresh(self, names: Sequence[str]) -> None:
        batch = self._new_batch(is_atomic=False)
        for name in names:
            if self._expiry_seconds:
                batch.expire(name, self._expiry_seconds)
            else:
                batch.touch([name])
        _require_success(self._exec(batch))

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        return list(self._try(lambda: self._client.mget(list(names))))

    def create_id(self, name: str, value: bytes) -> bytes:
        condition = self._glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        previous = self._set(name, value, conditional_set=condition, return_old_value=True)
        return value if previous is None else bytes(previous)

    def write_id(self, name: str, value: bytes) -> str:
        self._set(name, value)
        return self._unacknowledged(name)

    def close(self) -> None:
        self._client.close()

    def _connect(self, create: Callable[[], Any], url: ValkeyUrl) -> Any:
        try:
            return self._try(create)
        except StoreError as error:
            raise (_tls_failure(url) if url.tls else None) or error from None

    def _unacknowledged(self, name: str) -> str:
        """True if the server has replicas, none of which has what was written last."""
        route = [self._glide.SlotKeyRoute(self._glide.SlotType.PRIMARY, name)] if self._is_cluster else []
        try:
            found: bytes = self._client.info([self._glide.InfoSection.REPLICATION], *route)
            if b"\nslave0:" not in found or self._client.wait(1, self._wait_ms, *route):
                return ""
        except self._glide.GlideError:  # the user may not ask, or there is a proxy: nothing is known
            return ""
        return "no replica has acknowledged it, and a failover now may undo it"

    def _cluster_info(self) -> str:
        """The server's report on its cluster; "" where the user may not read it."""
        try:
            found: bytes = self._client.info([self._glide.InfoSection.CLUSTER])
        except self._glide.RequestError:
            return ""
        return found.decode()

    def _largest_value(self) -> int:
        """Bytes of the largest value that the server takes; it hangs up on a larger one. The default where the user may not ask."""
        try:
            found = self._client.config_get([_LARGEST_VALUE])
        except self._glide.RequestError:
            return _MOST_VALUE_BYTES
        return int(found.get(_LARGEST_VALUE.encode(), _MOST_VALUE_BYTES))

    def _set(self, name: str, value: bytes, **options: Any) -> Any:
        batch = self._new_batch(is_atomic=False)
        batch.set(name, value, **options)
        (answer,) = _require_success(self._exec(batch))
        return answer

    def _exec(self, batch: Any) -> list[Any]:
        """The answer to each command, or why it failed. The library prints what it raises to stderr, so it raises nothing of these."""
        answers = self._try(lambda: self._client.exec(batch, raise_on_error=False)) or []
        return [self._error(answer) if isinstance(answer, self._glide.GlideError) else answer for answer in answers]

    def _try(self, call: Any) -> Any:
        """Result of the call. Raises StoreError for what the library raises. The texts of its errors have addresses, no credentials."""
        try:
            return call()
        except self._glide.GlideError as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> StoreError:
        text = str(error)
        if isinstance(error, self._glide.TimeoutError):
            return StoreTimeout(text)
        if "exceeds buffer capacity" in text:
            return _TooLarge(text)
        if "OOM" in text or "exceeds maximum allowed size" in text:
            return StoreFull(text)
        kind = StoreError
        if isinstance(error, self._glide.ClosingError):
            kind = StoreClosed
        elif any(words in text for words in _ANSWERED):
            kind = StoreRefused
        return kind(f"{type(error).__name__}: {text}")
