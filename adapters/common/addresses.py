"""Addresses of an engine's sockets, as other processes of its machine reach them."""

from __future__ import annotations


def local(endpoint: str) -> str:
    """Address by which this machine connects to a listener at `endpoint`."""
    for wildcard, address in (("//*:", "//127.0.0.1:"), ("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        endpoint = endpoint.replace(wildcard, address)
    return endpoint
