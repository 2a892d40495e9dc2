"""The client of a bucket of S3, or of a store that speaks its protocol: `obstore`.

Owns: the form of URLs of this kind, and which of the client's errors means what. Credentials are those of the environment
(AWS_ACCESS_KEY_ID, ..., web identity, the machine's role); a URL has none.

A value that is read lies in the client's own memory until the caller lets go of it. Expiry is the bucket's: a lifecycle rule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from kvserver.config import TierUrl
from kvserver.l2.remote.store import StoreClient, StoreError, StoreFull, StoreTimeout, WrongSize
from kvserver.protocol import ConfigError

T = TypeVar("T")

_MOST_VALUE_BYTES = 5 << 30  # of one PUT
_MOST_QUESTIONS = 16  # requests at once
_MOST_RETRIES = 2  # of one request, inside its time-out: S3 answers 503 where it wants less of them
_NO_SPACE = ("EntityTooLarge", "QuotaExceeded", "StorageFull", "507 Insufficient Storage")
_MOST_TEXT = 300


class S3Url:
    """What a URL of this kind names. ConfigError if that is nothing."""

    def __init__(self, url: TierUrl) -> None:
        self.bucket = url.host
        self.prefix = url.path.strip("/") or "kvserver"
        self.endpoint, self.region = url.own.get("endpoint", ""), url.own.get("region", "")
        self.timeout = timedelta(seconds=url.timeout_seconds)
        if url.username or url.password or url.port:
            raise ConfigError(f"--l2 {url.shown}: write s3://bucket/prefix; credentials come from the environment")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--l2 {url.shown}: endpoint={self.endpoint}: write http://host:port or https://host:port"
            )


def require_client(url: TierUrl) -> None:
    """ConfigError, with the command to type, unless the client's library is there."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"--l2 {url.shown} needs a client of S3, and Python 3.11 or later: pip install 'kvserver[s3]', or pip install obstore"
        ) from None


def connect(url: S3Url) -> StoreClient:
    """Nothing is sent yet."""
    return _S3Client(url)


class _S3Client:
    most_value_bytes = _MOST_VALUE_BYTES
    most_questions = _MOST_QUESTIONS

    def __init__(self, url: S3Url) -> None:
        import asyncio

        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError
        from obstore.store import S3Store

        self._obstore, self._gather = obstore, asyncio.gather
        self._exists_already, self._not_supported = AlreadyExistsError, NotSupportedError
        self._loop = asyncio.new_event_loop()
        self._store = self._try(
            lambda: S3Store(
                url.bucket,
                # A record has a checksum of its own; reading all of it once more for the signature doubles a put's work.
                config={
                    "unsigned_payload": True,
                    **({"endpoint": url.endpoint} if url.endpoint else {}),
                    **({"region": url.region} if url.region else {}),
                },
                client_options={
                    "allow_http": url.endpoint.startswith("http://"),
                    "timeout": url.timeout,
                    "connect_timeout": url.timeout,
                },
                retry_config={"max_retries": _MOST_RETRIES, "retry_timeout": url.timeout},
            )
        )

    def get(self, name: str, buffer: memoryview) -> memoryview | None:
        def get() -> memoryview:
            found = self._obstore.get(self._store, name)
            if found.meta["size"] > len(buffer):
                raise WrongSize(f"{found.meta['size']} bytes")
            return memoryview(found.bytes())

        return self._find(get)

    def put(self, name: str, value: memoryview) -> None:
        self._try(lambda: self._obstore.put(self._store, name, value, use_multipart=False))

    def exist(self, names: Sequence[str]) -> list[bool]:
        async def exists(name: str) -> bool:
            try:
                await self._obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

        return self._all(exists, names)

    def delete(self, names: Sequence[str]) -> None:
        self._try(lambda: self._obstore.delete(self._store, list(names)))

    def refresh(self, names: Sequence[str]) -> None:
        """A lifecycle rule counts from the day of the put."""

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        async def read(name: str) -> bytes | None:
            try:
                found = await self._obstore.get_async(self._store, name)
                return bytes(await found.bytes_async())
            except FileNotFoundError as error:
                _require_bucket(error)
                return None

        return self._all(read, names)

    def create_id(self, name: str, value: bytes) -> bytes:
        try:
            self._try(lambda: self._obstore.put(self._store, name, value, mode="create"))
            return value
        except self._exists_already:
            pass
        except self._not_supported:  # the last one wins, and all read that one when their cached ids expire
            self.write_id(name, value)
        (present,) = self.read_ids([name])
        return present or value

    def write_id(self, name: str, value: bytes) -> None:
        self._try(lambda: self._obstore.put(self._store, name, value))

    def close(self) -> None:
        self._loop.close()

    def _all(self, request: Callable[[str], Awaitable[T]], names: Sequence[str]) -> list[T]:
        """All requests at once."""

        async def together() -> list[T]:
            return list(await self._gather(*map(request, names)))

        return self._try(lambda: self._loop.run_until_complete(together()))

    def _find(self, call: Callable[[], T]) -> T | None:
        """None if the object, but not the bucket, is missing."""
        try:
            return self._try(call)
        except FileNotFoundError:
            return None

    def _try(self, call: Callable[[], T]) -> T:
        """StoreError for what the library raises, but FileNotFoundError of an object and the two of conditional puts."""
        try:
            return call()
        except (self._exists_already, self._not_supported):
            raise
        except FileNotFoundError as error:
            _require_bucket(error)
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise _store_error(error) from None


def _require_bucket(error: FileNotFoundError) -> None:
    if "NoSuchBucket" in str(error):
        raise StoreError("the bucket does not exist") from None


def _store_error(error: Exception) -> StoreError:
    text = str(error)
    shown = " ".join(text.partition("Debug source:")[0].split())[:_MOST_TEXT]
    if "TimedOut" in text or "kind: Timeout" in text:
        return StoreTimeout(shown)
    if any(word in text for word in _NO_SPACE):
        return StoreFull(shown)
    return StoreError(shown)
