"""Client of a bucket of S3, or of a store that speaks its protocol: `obstore`.

Credentials are those of the environment (AWS_ACCESS_KEY_ID, ..., web identity, the machine's role); a URL has none. A value that
is read stays in the client's own memory until the caller releases it. A large one is read in parts, each by a connection of its own,
whose pieces the caller writes where they belong. The e_tag keeps parts of two writes apart, and the record's checks cover them all. A
larger one is also written in parts: S3 shows it once all are there. The library sends a part that failed again, and ends an upload that fails as a whole.

Expiry is the bucket's: a lifecycle rule, which would remove ids as well. So ids in use are written anew.

Owns: the form of URLs of this kind, and the meaning of the client's errors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from kvserver.config import TierUrl
from kvserver.l2.remote.store import (
    ReadPieces,
    StoreClient,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTimeout,
    StoreTooLarge,
    WritePiece,
)
from kvserver.l2.remote.tls import authorities_of
from kvserver.protocol import ConfigError

T = TypeVar("T")

_MOST_VALUE_BYTES = 5 << 30  # of one PUT
_MOST_QUESTIONS = 16  # requests at once, of objects, too
_PART_BYTES = 2 << 20  # of a part of a value that is read, about; one of less than two parts is read by one request
_MOST_PARTS = 16  # of one value, whose parts are larger then; all that are read are under way at once
_MOST_UPLOADED = 4  # parts of a value that are put at once: the puts of all lanes may share their line with gets
_UPLOAD_BYTES = 16 << 20  # of the largest value that is put by one request
_UPLOAD_PART_BYTES = 5 << 20  # of the smallest part of a larger one: S3 takes less of the last one only
_PIECE_BYTES = 512 << 10  # of a part in the client's memory at a time
_MOST_RETRIES = 2  # of one request, inside its time-out: S3 answers 503 where it wants less of them
_NO_SPACE = ("QuotaExceeded", "StorageFull", "507 Insufficient Storage")
_RENEWAL = timedelta(hours=12)  # of ids in use: the shortest lifecycle rule is a day
_MOST_TEXT = 300
_NOISE = re.compile(  # of the library's texts: paths, which are long, what it was made with, and how the answer's XML begins
    r"(?<=://)([^/\s]+)/\S*| (?:for path|at location) \S+?(?=:? )|, max_retries: \d+, retry_timeout: [\d.]+\w+|<\?xml.*?\?>"
)
_STATUS = re.compile(r"status:? [45]\d\d|<Code>")  # the store answered
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")


class S3Url:
    """Parts of a URL of this kind. Raises ConfigError if the URL is invalid."""

    def __init__(self, url: TierUrl) -> None:
        self.bucket = url.host
        self.prefix = url.path.strip("/") or "kvserver"
        self.endpoint, self.region = url.own.get("endpoint", "").rstrip("/"), url.own.get("region", "")
        self.authorities = authorities_of(url)
        self.virtual_hosted = url.states("virtual_hosted")
        self.read_only = url.read_only
        self.timeout, self.seconds_for = timedelta(seconds=url.timeout_seconds), url.seconds_for
        if url.username or url.password or url.port:
            raise ConfigError(f"--l2 {url.shown}: write s3://bucket/prefix; credentials come from the environment")
        if "@" in self.endpoint:
            raise ConfigError(f"--l2 {url.shown}: an endpoint has no user; credentials come from the environment")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--l2 {url.shown}: endpoint={self.endpoint}: write http://host:port or https://host:port"
            )
        if self.endpoint and self.virtual_hosted:
            scheme, _, rest = self.endpoint.partition("://")
            self.endpoint = f"{scheme}://{self.bucket}.{rest}"


def require_client(url: TierUrl) -> None:
    """ConfigError, with the command to type, unless the client's library is there."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"--l2 {url.shown} needs a client of S3, and Python 3.11 or later: pip install obstore"
        ) from None


def connect(url: S3Url, size: int = 0) -> StoreClient:
    """Make a client; nothing is sent yet. `size`: bytes of the largest request."""
    return _S3Client(url, size)


class _S3Client:
    most_questions, asks_apart = _MOST_QUESTIONS, True

    def __init__(self, url: S3Url, size: int) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        self.most_value_bytes = _MOST_VALUE_BYTES
        self._obstore, self._url, self._seconds = obstore, url, url.seconds_for(size)
        self._slow_seconds = url.seconds_for(2 * _MOST_PARTS * _PIECE_BYTES)  # the parts may share a slow line
        self._exists_already = AlreadyExistsError
        self._renews, self._knows_uploads = not url.read_only, True
        self._loop = asyncio.new_event_loop()
        self._store = self._try(lambda: self._make_store(self._seconds))

    @cached_property
    def _store_of_uploads(self) -> Any:
        """A part that stands still is sent again while the put has time."""
        return self._make_store(self._seconds / 2)

    def _make_store(self, seconds: float) -> Any:
        """`seconds`: of one request, without those that it is repeated by."""
        from obstore.store import S3Store

        url = self._url
        return S3Store(
            url.bucket,
            # A record has a checksum of its own; reading all of it once more for the signature doubles a put's work.
            config={
                "unsigned_payload": True,
                "virtual_hosted_style_request": url.virtual_hosted,
                **({"endpoint": url.endpoint} if url.endpoint else {}),
                **({"region": url.region} if url.region else {}),
            },
            client_options={
                "allow_http": url.endpoint.startswith("http://"),
                "timeout": timedelta(seconds=seconds),
                "connect_timeout": url.timeout,
                **({"root_certificate": url.authorities} if url.authorities else {}),
            },
            retry_config={"max_retries": _MOST_RETRIES, "retry_timeout": timedelta(seconds=self._seconds)},
        )

    def get(
        self, names: Sequence[str], buffers: Sequence[memoryview]
    ) -> Sequence[memoryview | ReadPieces | StoreError | None]:
        async def get(name: str, buffer: memoryview) -> memoryview | ReadPieces | None:
            if _parts_of(len(buffer)) > 1:
                return partial(self._read_in_parts, name, len(buffer))
            try:
                found = await self._obstore.get_async(self._store, name)
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            return buffer[:0] if found.meta["size"] > len(buffer) else memoryview(await found.bytes_async())

        return self._each(get, names, buffers)

    @property
    def _piece_seconds(self) -> float:
        """Seconds that a part may stand still. A second request has as long."""
        return min(self._slow_seconds, self._seconds / 2)

    def _read_in_parts(self, name: str, size: int, write: WritePiece) -> bool | StoreError | None:
        step = -(-size // _parts_of(size))
        tags: list[str | None] = []

        async def read(name: str) -> bool | None:
            parts = [
                asyncio.ensure_future(self._read_part(name, size, (start, min(start + step, size)), tags, write))
                for start in range(0, size, step)
            ]
            try:
                await asyncio.wait_for(asyncio.gather(*parts), self._seconds)
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            except _OtherSizeError:
                return False
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)  # none of them writes any more
            return True

        return self._each(read, [name])[0]

    async def _read_part(
        self, name: str, size: int, part: tuple[int, int], tags: list[str | None], write: WritePiece
    ) -> None:
        """Read bytes [begin, end) of an object. A part that fails or stands still is requested once more. `tags`: the object's e_tag,
        once a part has it."""
        at, end = part
        for last in (False, True):
            try:
                async with asyncio.timeout(self._piece_seconds):
                    found = await self._obstore.get_async(self._store, name, options={"range": part})
                if found.meta["size"] != size:
                    raise _OtherSizeError
                tags.append(found.meta["e_tag"])
                if tags[-1] != tags[0]:
                    raise StoreRefused("it was replaced while it was read")
                (at, _), pieces = part, aiter(found.stream(min_chunk_size=_PIECE_BYTES))
                while at < end:
                    async with asyncio.timeout(self._piece_seconds):  # wait_for() of Python 3.11 may swallow a cancel
                        piece = memoryview(await anext(pieces))
                    if len(piece) > end - at:
                        raise ValueError("a part of it is too long")
                    write(at, piece)
                    at += len(piece)
                return
            except FileNotFoundError:
                raise
            except (
                self._obstore.exceptions.BaseError, OSError, ValueError, StopAsyncIteration, asyncio.TimeoutError,
            ) as error:  # fmt: skip
                if "status code: 416" in str(error):  # the object ends before this part
                    raise _OtherSizeError from None
                if last or "non-2xx status" in str(
                    error
                ):  # the library has repeated what the store may answer otherwise
                    raise

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        async def put(name: str, value: memoryview) -> None:
            if len(value) > _UPLOAD_BYTES and self._knows_uploads:
                try:
                    return await self._upload(name, value)
                except _NotImplementedError:
                    self._knows_uploads = False
            await self._obstore.put_async(self._store, name, value, use_multipart=False)

        answers = self._each(put, names, values)
        refused = [
            len(value) for value, answer in zip(values, answers, strict=True) if isinstance(answer, StoreTooLarge)
        ]
        self.most_value_bytes = min([self.most_value_bytes, *(size - 1 for size in refused)])
        return answers

    async def _upload(self, name: str, value: memoryview) -> None:
        """Put `value` in parts. StoreError if that fails."""
        step = max(_UPLOAD_PART_BYTES, -(-len(value) // _MOST_PARTS))
        parts = (value[start : start + step] for start in range(0, len(value), step))  # the library copies none
        try:
            await self._obstore.put_async(
                self._store_of_uploads, name, parts, chunk_size=step, max_concurrency=_MOST_UPLOADED
            )
        except (self._obstore.exceptions.BaseError, OSError) as error:
            found = _store_error(error)
            if isinstance(found, StoreRefused) and "performing DELETE" in str(error):  # the put's own error is lost
                found = StoreRefused(
                    "a put in parts failed, and its upload could not be aborted: does the key have "
                    f"AbortMultipartUpload? {found}"
                )
            raise found from None

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]:
        async def exists(name: str) -> bool:
            try:
                await self._obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

        return self._each(exists, names)

    def delete(self, names: Sequence[str]) -> None:
        self._try(lambda: self._obstore.delete(self._store, list(names)))

    def refresh(self, names: Sequence[str]) -> None:
        """A lifecycle rule counts from the day of the put."""

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        async def read(name: str) -> bytes | None:
            try:
                found = await self._obstore.get_async(self._store, name)
                value = bytes(await found.bytes_async())
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            if self._renews and datetime.now(timezone.utc) - found.meta["last_modified"] > _RENEWAL:
                await self._renew(name, value, found.meta["e_tag"])
            return value

        found = self._each(read, names)
        if errors := [each for each in found if isinstance(each, StoreError)]:
            raise errors[0]
        return cast(list[bytes | None], found)

    async def _renew(self, name: str, id: bytes, tag: str | None) -> None:
        """Write an id anew, so that no lifecycle rule removes it. A later id is never replaced, and a failure costs nothing yet."""
        with suppress(self._obstore.exceptions.BaseError, OSError):
            await self._obstore.put_async(self._store, name, id, mode={"e_tag": tag}, use_multipart=False)

    def create_id(self, name: str, value: bytes) -> bytes:
        try:
            self._try(lambda: self._obstore.put(self._store, name, value, mode="create"))
            return value
        except self._exists_already:
            pass
        except _NotImplementedError:  # the last one wins, and all read that one when their cached ids expire
            self.write_id(name, value)
        (present,) = self.read_ids([name])
        return present or value

    def write_id(self, name: str, value: bytes) -> str:
        self._try(lambda: self._obstore.put(self._store, name, value))
        return ""

    def close(self) -> None:
        self._loop.close()

    def _each(self, request: Callable[..., Awaitable[T]], *of: Sequence[Any]) -> list[T | StoreError]:
        """The answer of each request, _MOST_QUESTIONS at a time. All have ended when this returns."""

        async def together() -> list[T | StoreError]:
            free = asyncio.Semaphore(_MOST_QUESTIONS)

            async def one(*arguments: Any) -> T | StoreError:
                async with free:
                    try:
                        return await request(*arguments)
                    except StoreError as error:
                        return error
                    except asyncio.TimeoutError:
                        return StoreTimeout("a part of it stands still")
                    except StopAsyncIteration:
                        return StoreError("a part of it is too short")
                    except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
                        return _store_error(error)

            return list(await asyncio.gather(*map(one, *of)))

        return self._loop.run_until_complete(together())

    def _try(self, call: Callable[[], T]) -> T:
        """StoreError for what the library raises, but FileNotFoundError of an object and that of a conditional put."""
        try:
            return call()
        except self._exists_already:
            raise
        except FileNotFoundError as error:
            _require_bucket(error)
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise _store_error(error) from None


class _OtherSizeError(Exception):
    """The object has not the size of the wanted one."""


def _parts_of(size: int) -> int:
    """Number of parts that a value of so many bytes is read in."""
    return min(_MOST_PARTS, round(size / _PART_BYTES))


class _NotImplementedError(StoreRefused):
    """The store does not know what was requested, as some do not know conditional puts."""


def _require_bucket(error: FileNotFoundError) -> None:
    if "NoSuchBucket" in str(error):
        raise StoreError("the bucket does not exist") from None


def _store_error(error: Exception) -> StoreError:
    text = str(error)
    shown = " ".join(_NOISE.sub(r"\1", text.partition("Debug source:")[0]).split())[:_MOST_TEXT]
    if "TimedOut" in text or "kind: Timeout" in text:
        return StoreTimeout(shown)
    if found := _CERTIFICATE.search(text):
        return StoreError(f"the server's certificate is refused: {found[1]}")
    if "EntityTooLarge" in text:
        return StoreTooLarge(shown)
    if any(word in text for word in _NO_SPACE):
        return StoreFull(shown)
    if "501 Not Implemented" in text or "<Code>NotImplemented" in text:
        return _NotImplementedError(shown)
    return (StoreRefused if _STATUS.search(text) else StoreError)(shown)
