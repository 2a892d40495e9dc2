"""The token that clients of the status pages send, read from a file.

Owns: the form of the token and the permissions of the file. Refuses to know: the check of a request's token.
"""

from __future__ import annotations

import os
import re
import stat

from kvserver.protocol import ConfigError

LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_NOT_FOR = stat.S_IRWXO | stat.S_IWGRP  # the group may read: Kubernetes hands secrets to users other than root this way


def read_token(path: str) -> str:
    """The token in the file, without surrounding white space; "" for an empty path.

    ConfigError with the reason if the file has no valid token; the text never contains the file's content.
    """
    try:
        return _token(_read(path)) if path else ""
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(f"--http-token-file {path}: {reason}")


def _token(raw: bytes) -> str:
    token = raw.decode("ascii", "replace").strip()
    if len(token) < LEAST_CHARACTERS or len(raw) > _MOST_BYTES:
        raise ValueError(
            f"holds a token of {len(token)} characters; write {LEAST_CHARACTERS} to {_MOST_BYTES}: `openssl rand -hex 32`"
        )
    if not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token):
        raise ValueError("holds no token; a token is one word of A-Z a-z 0-9 . _ ~ + / -")
    return token


def _read(path: str) -> bytes:
    """The file's bytes. ValueError if it is no regular file, or if other users may read or write it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is no file")
        if found.st_mode & _NOT_FOR:
            raise ValueError(
                f"may be read or written by others; its mode is {stat.S_IMODE(found.st_mode):04o}: chmod 600"
            )
        return os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)


def bearer(token: str) -> dict[str, str]:
    """The HTTP header with the token; no header for ""."""
    return {"Authorization": f"Bearer {token}"} if token else {}
