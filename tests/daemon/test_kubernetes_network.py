"""deploy/kubernetes: who may connect to the daemon, and whom it may connect to."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path

import kubernetes_validate
import pytest
from support.containers import (
    NAMES,
    NEWEST,
    OVERLAYS,
    Object,
    built,
    container,
    with_component,
    workloads,
)

from kvserver.config import parse_tiers

DEPLOY = OVERLAYS.parents[1]


@pytest.fixture(params=NAMES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return built(OVERLAYS / request.param)


def test_the_network_lets_prometheus_to_the_pages_and_all_to_vllm() -> None:
    for name in NAMES:
        objects = built(OVERLAYS / name)
        for policy in (found for found in objects if found["kind"] == "NetworkPolicy"):
            pods = [w for w in workloads(objects)
                    if policy["spec"]["podSelector"]["matchLabels"].items() <= w["spec"]["template"]["metadata"]["labels"].items()]  # fmt: skip
            assert len(pods) == 1
            open_to_all = {p["port"] for rule in policy["spec"]["ingress"] if "from" not in rule for p in rule["ports"]}
            assert open_to_all == ({"http"} if pods[0]["kind"] == "StatefulSet" else set())
            ports = {p["name"] for c in [*pods[0]["spec"]["template"]["spec"].get("initContainers", []), *pods[0]["spec"]["template"]["spec"]["containers"]]
                     for p in c.get("ports", [])}  # fmt: skip
            assert {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]} == ports


def reachable(objects: list[Object], port: int, protocol: str = "TCP", address: str = "", **labels: str) -> bool:
    """Whether the policies let the daemon of a node connect: to an address, or to a pod of its namespace or `kube-system`."""
    peer = {key.replace("_", "."): value for key, value in labels.items()}

    def matches(to: Object) -> bool:
        if "ipBlock" in to:
            network = ip_network(to["ipBlock"]["cidr"])
            return bool(address) and ip_address(address) in network
        wanted = {
            **to.get("podSelector", {}).get("matchLabels", {}),
            **to.get("namespaceSelector", {}).get("matchLabels", {}),
        }
        return not address and wanted.items() == peer.items()

    rules = [rule for policy in objects if policy["kind"] == "NetworkPolicy" and "Egress" in policy["spec"]["policyTypes"]
             for rule in policy["spec"].get("egress", [])]  # fmt: skip
    return any(
        any(map(matches, rule["to"]))
        and any(
            p.get("protocol", "TCP") == protocol and p["port"] <= port <= p.get("endPort", p["port"])
            for p in rule["ports"]
        )
        for rule in rules
    )


APP, DNS = "app.kubernetes.io/name", {"k8s-app": "kube-dns", "kubernetes.io/metadata.name": "kube-system"}


def test_the_daemon_of_a_node_reaches_engines_and_names_and_nothing_else() -> None:
    objects = built(OVERLAYS / "node")
    assert reachable(objects, container(objects, "vllm").port("http"), **{APP: "vllm"})
    assert reachable(objects, 53, "UDP", **DNS)
    assert reachable(objects, 53, **DNS)
    assert not reachable(objects, 443, address="203.0.113.9")
    assert not reachable(objects, 6379, **{APP: "valkey"})


@pytest.mark.parametrize(
    ("kind", "url", "peers"),
    [
        ("valkey", "valkey://valkey:6379", [{APP: "valkey"}]),
        ("s3", "s3://bucket", [{"address": "203.0.113.9"}, {"address": "2001:db8::9"}]),
        ("mooncake", "mooncake://master:50051", [{APP: "mooncake"}]),
    ],
)
def test_a_component_lets_the_daemon_of_a_node_reach_its_storage(
    kind: str, url: str, peers: list[dict[str, str]], tmp_path: Path
) -> None:
    objects = with_component(tmp_path, "base/node", f"components/{kind}")
    for found in objects:
        kubernetes_validate.validate(found, NEWEST, strict=True)
    (tier,) = parse_tiers([url])
    assert tier.kind == kind
    ports = {"valkey": [tier.port], "s3": [443], "mooncake": [tier.port, 15000, 17000]}[kind]
    assert all(reachable(objects, port, **peer) for port in ports for peer in peers)
    assert not reachable(objects, 22, **peers[0])
    (secret,) = (source["secretRef"] for source in container(objects, "kvserver").spec["envFrom"])
    assert secret == {"name": "kvserver-l2", "optional": True}


def test_a_sidecar_may_connect_to_anything_as_vllm_downloads_models() -> None:
    policies = [found for found in built(OVERLAYS / "sidecar") if found["kind"] == "NetworkPolicy"]
    assert [policy["spec"]["policyTypes"] for policy in policies] == [["Ingress"]]


def test_a_service_leads_to_the_pages(objects: list[Object]) -> None:
    daemon = container(objects, "kvserver")
    services = [
        o["spec"] for o in objects if o["kind"] == "Service" for p in o["spec"]["ports"] if p["name"] == "kvserver"
    ]
    (service,) = services
    (port,) = (p for p in service["ports"] if p["name"] == "kvserver")
    assert (port["port"], port["targetPort"]) == (daemon.port("kvserver"), "kvserver")
    (workload,) = (w for w in workloads(objects) if w["spec"]["template"]["spec"] == daemon.pod)
    assert service["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert service.get("clusterIP") == "None" or service["internalTrafficPolicy"] == "Local"
