"""The files of certificates and keys that a URL names.

Owns: that each is there and has what it is named for. Refuses to know: whether a server accepts it.
"""

from __future__ import annotations

from pathlib import Path

from kvserver.config import TierUrl
from kvserver.protocol import ConfigError


def authorities_of(url: TierUrl) -> bytes | None:
    """The certificates of `?ca=FILE`; None: those of the system."""
    return _pem(url, "ca", "CERTIFICATE") if url.own.get("ca") else None


def own_certificate_of(url: TierUrl) -> tuple[str, str] | None:
    """The files of `?cert=FILE&key=FILE`, which show the server who the daemon is."""
    files = url.own.get("cert", ""), url.own.get("key", "")
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"--l2 {url.shown}: cert and key belong together")
    _pem(url, "cert", "CERTIFICATE")
    _pem(url, "key", "PRIVATE KEY")
    return files


def _pem(url: TierUrl, parameter: str, content: str) -> bytes:
    file = url.own[parameter]
    try:
        found = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--l2 {url.shown}: {parameter}={file}: {error.strerror}") from None
    if b"-----BEGIN " not in found or f"{content}-----".encode() not in found:
        raise ConfigError(f"--l2 {url.shown}: {parameter}={file} has no {content.lower()} in PEM")
    return found
