"""The variables of OpenTelemetry that a daemon reads itself."""

from __future__ import annotations

import re

import pytest

from kvserver.config import parse_otlp_endpoint
from kvserver.protocol import ConfigError
from kvserver.telemetry.otlp import OtlpMetrics, resource

INTERVAL, TIMEOUT = "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TIMEOUT"


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        *((INTERVAL, value, "100 to 3600000 milliseconds") for value in ("0", "often", "nan", "1e9")),
        *((TIMEOUT, value, "0.1 to 300 seconds") for value in ("-1", "soon", "301")),
    ],
)
def test_a_bad_variable_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, right: str
) -> None:
    monkeypatch.setenv(name, value)
    endpoint = parse_otlp_endpoint("http://127.0.0.1:1")
    assert endpoint is not None
    with pytest.raises(ConfigError, match=re.escape(f"{name} {value!r}: write {right}")):
        OtlpMetrics(endpoint, resource("boot"))
