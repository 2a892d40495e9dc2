"""The address of an OpenTelemetry collector, from `--otlp-endpoint` or from OpenTelemetry's own variables.

Owns: its forms. Refuses to know: how anything is sent (`telemetry.otlp`), the other variables, which the SDK reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvserver.config.urls import split_url

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"


@dataclass(frozen=True)
class OtlpEndpoint:
    """A collector. `base` is a URL without a trailing slash, or host:port for gRPC, then with TLS or without it."""

    grpc: bool
    base: str
    tls: bool = False


def parse_otlp_endpoint(text: str) -> OtlpEndpoint | None:
    """The endpoint; None for "". ValueError states the accepted forms."""
    if not text:
        return None
    parts = split_url(text)
    port, rest = parts.port, parts.path.strip("/")
    if parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment:
        return OtlpEndpoint(False, text.rstrip("/"))
    bare = parts.hostname and port and "@" not in parts.netloc and not rest and not parts.query
    if parts.scheme in ("grpc", "grpcs") and bare:
        return OtlpEndpoint(True, parts.netloc, parts.scheme == "grpcs")
    raise ValueError("write http://host:port, https://host:port, grpc://host:port or grpcs://host:port")


def endpoint_of_sdk(environ: Mapping[str, str]) -> str:
    """The endpoint that OpenTelemetry's variables name, in the form of `--otlp-endpoint`; "" if they name none.

    ValueError if it needs a protocol that the daemon does not speak.
    """
    url, protocol = environ.get(ENDPOINT_VARIABLE, ""), environ.get(_PROTOCOL_VARIABLE) or "http/protobuf"
    if not url or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if protocol == "http/protobuf":
        return url
    if protocol != "grpc":
        raise ValueError(f"{_PROTOCOL_VARIABLE} {protocol!r}: write http/protobuf or grpc")
    scheme, found, rest = url.rpartition("://")
    insecure = scheme == "http" or (not found and environ.get("OTEL_EXPORTER_OTLP_INSECURE", "").lower() == "true")
    rest = rest.rstrip("/")
    if ":" not in rest.rpartition("]")[2]:  # behind an IPv6 address
        rest += ":4317" if insecure else ":443"
    return f"{'grpc' if insecure else 'grpcs'}://{rest}"
