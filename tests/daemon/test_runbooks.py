"""Commands of the runbooks fit the pods of deploy/kubernetes: containers, ports and programs that they name are there, and no policy is in their way."""

from __future__ import annotations

import re

import pytest
import yaml
from support.containers import NAMES, OVERLAYS, Object, built, workloads
from support.promtool import ALERTS, ROOT

TEXT = ALERTS.read_text() + (ROOT / "deploy/guides/alerts.md").read_text()
EXEC = re.findall(r"kubectl -n \S+(?: \. \}\})? exec .+? -c (\w+) -- (\w+)", TEXT)
FORWARDED = re.findall(r"port-forward .+? (\d+)\b", TEXT)


def containers(name: str) -> dict[str, Object]:
    pods = [found["spec"]["template"]["spec"] for found in workloads(built(OVERLAYS / name))]
    return {one["name"]: one for pod in pods for one in [*pod.get("initContainers", []), *pod["containers"]]}


@pytest.mark.parametrize("name", NAMES)
def test_the_containers_and_ports_of_the_commands_exist(name: str) -> None:
    there = containers(name)
    assert {container for container, _ in EXEC} == {"kvserver", "vllm"} <= there.keys()
    assert {program for _, program in EXEC} == {"kvserver"}, "both images have it"
    ports = {name: str(one["ports"][0]["containerPort"]) for name, one in there.items() if "ports" in one}
    assert set(FORWARDED) == {ports["kvserver"]}
    assert set(re.findall(r"exec .+? --engine http://127\.0\.0\.1:(\d+)", TEXT)) == {ports["vllm"]}


def test_every_command_for_a_pod_ends_at_its_own_loopback() -> None:
    """`exec` and `port-forward` do, whatever a NetworkPolicy forbids; an address of another pod or a Service may be forbidden."""
    commands = re.findall(r"kubectl -n [^\n`]*", TEXT)
    assert len(commands) >= 6
    for command in commands:
        assert re.search(r" (exec|logs|port-forward) ", command), command
        assert set(re.findall(r"https?://([^:/\s]+)", command.partition("{{ else }}")[0])) <= {"127.0.0.1", "localhost"}


def test_the_texts_of_alerts_name_no_port_of_an_instance_that_is_a_pod() -> None:
    """Prometheus Operator's `instance` has none, so `http://{{ $labels.instance }}` is for targets outside a namespace only."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            within, other, _ = rule["annotations"]["runbook"].partition("{{ else }}")
            assert "http://{{ $labels.instance }}" not in within
            assert bool(other) == ("kubectl" in within)
