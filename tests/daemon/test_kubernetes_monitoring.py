"""deploy/kubernetes: metrics, rules and the dashboard, with the operator of Prometheus and without."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.containers import (
    NEWEST,
    OVERLAYS,
    Object,
    built,
    with_component,
    workloads,
)

DEPLOY = OVERLAYS.parents[1]


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return with_component(tmp_path_factory.mktemp("overlay"), "base/node", "components/monitoring")


def test_the_dashboard_is_a_config_map_for_grafanas_sidecar(monitored: list[Object]) -> None:
    (found,) = (o for o in monitored if o["kind"] == "ConfigMap")
    kubernetes_validate.validate(found, NEWEST, strict=True)
    assert found["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert found["data"] == {"kvserver.json": (DEPLOY / "grafana/kvserver.json").read_text()}
    assert len(found["data"]["kvserver.json"].encode()) < 1 << 20


@pytest.mark.parametrize("name", ["sidecar", "node"])
def test_without_the_operator_daemons_and_engines_are_scraped_under_the_jobs_of_the_rules(
    name: str, tmp_path: Path
) -> None:
    """By a real promtool, which Debian builds without Kubernetes: the pods are a list, in place of what the API server knows."""
    found = yaml.safe_load((DEPLOY / "prometheus/kubernetes.yml").read_text())
    listed = pods_as_discovered(built(OVERLAYS / name))
    for job in found["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["static_configs"] = listed
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(found))
    targets = {job: discovered(tmp_path / "prometheus.yml", job) for job in ("kvserver", "vllm")}
    daemon = "vllm-0" if name.startswith("sidecar") else "kvserver-0"
    places = {"namespace": "llm", "node": "node-1"}
    assert targets == {
        "kvserver": [{"__address__": "10.0.0.1:8080", "job": "kvserver", "pod": daemon, "instance": daemon, **places}],
        "vllm": [{"__address__": "10.0.0.1:8000", "job": "vllm", "pod": "vllm-0", "instance": "vllm-0", **places}],
    }


def pods_as_discovered(objects: list[Object]) -> list[Object]:
    """A target for each port of each container, init containers too, with the labels that Prometheus' role `pod` gives; one pod has ended."""
    found = []
    for workload in workloads(objects):
        template = workload["spec"]["template"]
        name = template["metadata"]["labels"]["app.kubernetes.io/name"]
        for spec in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            for port in spec.get("ports", []):
                for number, phase in enumerate(("Running", "Failed")):
                    about = {"namespace": "llm", "pod_name": f"{name}-{number}", "pod_node_name": "node-1", "pod_phase": phase,
                             "pod_container_port_name": port["name"], "pod_label_app_kubernetes_io_name": name}  # fmt: skip
                    labels = {f"__meta_kubernetes_{key}": value for key, value in about.items()}
                    found.append({"targets": [f"10.0.0.1:{port['containerPort']}"], "labels": labels})
    return found


def discovered(config: Path, job: str) -> list[dict[str, str]]:
    """Labels of the targets of a job, without those that end with the discovery."""
    shown = subprocess.run(
        [promtool(), "check", "service-discovery", "--timeout=1s", config, job],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    kept = [found["labels"] for found in json.loads(shown.stdout) if found.get("labels")]
    return [
        {key: value for key, value in labels.items() if not key.startswith("__") or key == "__address__"}
        for labels in kept
    ]


def promtool() -> str:
    found = shutil.which("promtool") or shutil.which("promtool", path=DEPLOY.parent / "build/promtool/usr/bin")
    if found is None:
        pytest.skip("no promtool: it is neither on PATH nor in build/promtool; `make rules` puts Debian's there")
    return found


# ---- Prometheus Operator ------------------------------------------------------------------------


def one_line(spec: Object) -> Object:
    """kustomize adds empty lines to folded texts, which mean nothing in PromQL."""
    found: Object = json.loads(re.sub(r"(\\n)+ *", " ", json.dumps(spec)))
    return found


def test_the_rules_of_the_operator_are_those_of_deploy_prometheus(monitored: list[Object]) -> None:
    """Which promtool checks: `make rules`. There is no schema of these kinds in the registries of packages."""
    found = {o["metadata"]["name"]: o for o in monitored if o["kind"] == "PrometheusRule"}
    assert found.keys() == {"kvserver-alerts", "kvserver-recording"}
    for name, rule in found.items():
        assert rule.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert rule["apiVersion"] == "monitoring.coreos.com/v1"
        assert one_line(rule["spec"]) == one_line(yaml.safe_load((DEPLOY / f"prometheus/{name}.yaml").read_text()))
        assert rule["spec"].keys() == {"groups"}


def test_the_monitors_find_the_ports_of_the_pods_under_the_jobs_of_the_rules(monitored: list[Object]) -> None:
    monitors = [found for found in monitored if found["kind"] == "PodMonitor"]
    jobs = set()
    for monitor in monitors:
        assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
        (end,) = monitor["spec"]["podMetricsEndpoints"]
        assert end.keys() == {"port", "path", "interval", "relabelings"}
        assert end["path"] == "/metrics"
        names = [w["spec"]["template"] for w in workloads(monitored)]
        assert any(end["port"] == p["name"] for t in names for c in t["spec"]["containers"] for p in c["ports"])
        rules = {rule["targetLabel"]: rule for rule in end["relabelings"]}
        jobs.add(rules["job"]["replacement"])
        assert rules["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_name"]
    example = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in example["scrape_configs"]}
