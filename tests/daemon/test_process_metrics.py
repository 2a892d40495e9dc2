"""What a daemon exports of its own process, under the names that all Prometheus clients use."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from support.collector import over_http
from support.daemon import Daemon, wait_until


def test_the_start_time_changes_with_a_restart_and_with_nothing_else(make_daemon: Callable[..., Daemon]) -> None:
    before = time.time()
    daemon = make_daemon()
    started = daemon.metric("process_start_time_seconds")
    assert before - 5 < started < time.time() + 5
    assert daemon.metric("process_start_time_seconds") == started
    time.sleep(0.05)  # the kernel counts hundredths
    daemon.kill()
    assert daemon.start().metric("process_start_time_seconds") > started


def test_memory_descriptors_and_processor_time_are_those_of_the_daemon(daemon: Daemon) -> None:
    assert abs(daemon.metric("process_resident_memory_bytes") - daemon.rss_bytes()) < 64 << 20
    assert daemon.metric("process_virtual_memory_bytes") > daemon.metric("process_resident_memory_bytes")
    assert abs(daemon.metric("process_open_fds") - len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))) < 20
    assert daemon.metric("process_max_fds") > daemon.metric("process_open_fds")
    assert daemon.metric("process_cpu_seconds_total") > 0


def test_process_metrics_are_exported_over_otlp(make_daemon: Callable[..., Daemon]) -> None:
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, env={"OTEL_METRIC_EXPORT_INTERVAL": "100"})
        wait_until(lambda: "process_start_time_seconds" in collector.latest())
        (point,) = collector.latest()["process_start_time_seconds"].gauge.data_points
        assert point.as_double == daemon.metric("process_start_time_seconds")
        assert collector.latest()["process_cpu_seconds"].sum.is_monotonic
