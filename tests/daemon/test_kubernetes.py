"""deploy/kubernetes: the overlays are valid, and fit the daemon and one another."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
from support.containers import (
    KUBECTL,
    NAMES,
    NEWEST,
    OVERLAYS,
    Container,
    Object,
    built,
    container,
    with_component,
    workloads,
)

from kvserver.config import MiB, bytes_beside_l1, parse_size, read_configuration

DEPLOY = OVERLAYS.parents[1]
VERSIONS = ("1.29", NEWEST)  # from the first with native sidecars


@pytest.fixture(params=NAMES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return built(OVERLAYS / request.param)


# ---- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_the_oldest_and_the_newest_kubernetes(objects: list[Object], version: str) -> None:
    assert len(objects) >= 4
    for found in objects:
        kubernetes_validate.validate(found, version, strict=True)


def mebibytes(quantity: str) -> int:
    return parse_size(quantity + "B") // MiB


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_the_daemon_is_what_doctor_computes(name: str) -> None:
    daemon = container(built(OVERLAYS / name), "kvserver")
    settings = read_configuration({}, daemon.environment).settings
    l1_bytes = parse_size(settings.l1_size)
    needed = l1_bytes + bytes_beside_l1(settings, l1_bytes, uses_gpus=name.endswith("-gpu"))
    resources = daemon.spec["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == f"{-(-needed // MiB)}Mi"


def test_the_engine_and_the_daemon_have_one_endpoint_one_user_and_the_same_folder(objects: list[Object]) -> None:
    """At the same path, since the daemon names its second socket in its answers."""
    daemon, engine = container(objects, "kvserver"), container(objects, "vllm")
    words = engine.words({"POD_NAME": "vllm-0", **engine.environment})
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer == {
        "kv_connector": "KVServerConnector",
        "kv_role": "kv_both",
        "engine_id": "vllm-0",
        "kv_connector_extra_config": {"kvserver.endpoint": daemon.environment["KVSERVER_ENDPOINT"]},
    }
    assert daemon.mounts["socket"]["mountPath"] == engine.mounts["socket"]["mountPath"]
    assert engine.mounts["socket"]["readOnly"]
    assert daemon.setting("runAsUser") == engine.setting("runAsUser") != 0
    volumes = [{v["name"]: v for v in pod.pod["volumes"]}["socket"] for pod in (daemon, engine)]
    assert volumes[0] == volumes[1]


def test_the_shared_memory_of_an_engine_holds_its_kv_cache_and_counts_in_its_limit() -> None:
    for name in ("sidecar", "node"):
        engine = container(built(OVERLAYS / name), "vllm")
        (shm,) = (volume["emptyDir"] for volume in engine.pod["volumes"] if volume["name"] == "shm")
        assert shm["medium"] == "Memory"
        assert engine.mounts["shm"]["mountPath"] == "/dev/shm"
        cache = int(engine.environment["VLLM_CPU_KVCACHE_SPACE"]) * 1024
        assert cache < mebibytes(shm["sizeLimit"]) < mebibytes(engine.spec["resources"]["limits"]["memory"])


def test_no_pod_shares_the_nodes_ipc_namespace_and_only_gpus_of_a_node_its_pids() -> None:
    for name in NAMES:
        for workload in workloads(built(OVERLAYS / name)):
            pod = workload["spec"]["template"]["spec"]
            assert not pod.get("hostIPC")
            assert not pod.get("hostNetwork")
            assert bool(pod.get("hostPID")) == (name == "node-gpu")
            assert bool(pod.get("shareProcessNamespace")) == (name == "sidecar-gpu")


@pytest.mark.parametrize("name", ["sidecar", "sidecar-gpu"])
def test_the_pods_of_sidecars_pass_the_restricted_standard(name: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/ as of 1.37."""
    objects = built(OVERLAYS / name)
    (namespace,) = (found for found in objects if found["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(objects):
        pod = workload["spec"]["template"]["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(volume.keys() & {"emptyDir", "secret"} for volume in pod["volumes"])
        for spec in [*pod["initContainers"], *pod["containers"]]:
            held = Container(pod, spec)
            assert held.setting("runAsNonRoot")
            assert held.setting("runAsUser") != 0
            assert held.setting("seccompProfile") == {"type": "RuntimeDefault"}
            assert held.setting("allowPrivilegeEscalation") is False
            assert held.setting("capabilities") == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in spec["ports"])


def test_a_sidecar_never_keeps_its_engine_from_serving() -> None:
    """A sidecar's readiness is its pod's, and a container waits for the startup probe of a sidecar before it."""
    for name in ("sidecar", "sidecar-gpu"):
        spec = container(built(OVERLAYS / name), "kvserver").spec
        assert spec["restartPolicy"] == "Always"
        assert not {"readinessProbe", "startupProbe"} & spec.keys()


@pytest.mark.parametrize("name", NAMES)
def test_daemons_of_pods_with_one_name_are_two_instances_to_a_collector(name: str) -> None:
    given = {one["name"]: one for one in container(built(OVERLAYS / name), "kvserver").spec["env"]}
    assert given["OTEL_RESOURCE_ATTRIBUTES"]["value"] == "service.instance.id=$(POD_UID)"
    assert given["POD_UID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid"
    assert [*given].index("POD_UID") < [*given].index("OTEL_RESOURCE_ATTRIBUTES"), "else it is not replaced"


def test_a_node_has_one_daemon_at_a_time() -> None:
    (found,) = (o for o in built(OVERLAYS / "node") if o["kind"] == "DaemonSet")
    assert found["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_pods_for_gpus_go_to_nodes_that_are_kept_for_gpus() -> None:
    """The daemon requests none, so that neither an admission plugin nor the scheduler sees that it belongs there."""
    for name in (name for name in NAMES if name.endswith("-gpu")):
        for workload in workloads(built(OVERLAYS / name)):
            pod = workload["spec"]["template"]["spec"]
            assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]
            requested = any("nvidia.com/gpu" in c["resources"]["limits"] for c in pod["containers"])
            assert requested or pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize("base", ["base/sidecar", "base/node"])
def test_sglang_takes_vllms_place_and_all_else_stays(tmp_path: Path, base: str) -> None:
    objects = with_component(tmp_path, base, "components/sglang")
    for found in objects:
        kubernetes_validate.validate(found, NEWEST, strict=True)
    daemon, engine = container(objects, "kvserver"), container(objects, "vllm")
    words = engine.words({"POD_NAME": "vllm-0", **engine.environment})
    assert words[:2] == ["sglang", "serve"]
    assert "--kv-transfer-config" not in words
    config = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
    endpoint = daemon.environment["KVSERVER_ENDPOINT"]
    assert config["linker_extra_config"] == {"kvserver.endpoint": endpoint, "kvserver.engine_id": "vllm-0"}
    (port,) = engine.spec["ports"]
    assert words[words.index("--port") + 1] == str(port["containerPort"])
    assert engine.spec["image"] == "sglang-kvserver"
    assert {"socket", "shm", "models"} <= engine.mounts.keys()


@pytest.mark.parametrize("base", ["node", "node-gpu"])
def test_prefill_and_decode_are_on_one_node_and_their_router_names_each(tmp_path: Path, base: str) -> None:
    objects = with_component(tmp_path, f"overlays/{base}", "components/prefill-decode")
    for found in objects:
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
    (engines,) = (found for found in workloads(objects) if found["metadata"]["name"] == "vllm")
    (affinity,) = engines["spec"]["template"]["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert affinity["labelSelector"]["matchLabels"].items() <= engines["spec"]["template"]["metadata"]["labels"].items()
    assert affinity["topologyKey"] == "kubernetes.io/hostname"
    daemon, engine, router = (container(objects, name) for name in ("kvserver", "vllm", "router"))
    words = engine.words({"POD_NAME": "vllm-0", **engine.environment})
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert (transfer["kv_role"], transfer["engine_id"]) == ("kv_both", "vllm-0")
    assert transfer["kv_connector_extra_config"] == {"kvserver.endpoint": daemon.environment["KVSERVER_ENDPOINT"]}
    assert {"socket", "shm", "models"} <= engine.mounts.keys(), "what it had is still there"
    command = shlex.split(router.words({})[-1].partition("exec ")[2])
    named = [(role, url) for role, url in itertools.pairwise(command) if role in ("--prefill", "--decode")]
    pods = [
        f"http://vllm-{n}.{engines['spec']['serviceName']}:{engine.port('http')}"
        for n in range(engines["spec"]["replicas"])
    ]
    assert named == list(zip(("--prefill", "--decode", "--decode"), pods, strict=True))
    assert command[command.index("--port") + 1] == str(router.port("http"))
    (pinned,) = re.findall(r"vllm-router==[0-9.]+", router.words({})[-1])
    assert pinned in (DEPLOY.parent / "Makefile").read_text()
    (service,) = (found["spec"] for found in objects if found["kind"] == "Service" and found["metadata"]["name"] == "router")  # fmt: skip
    assert [port["targetPort"] for port in service["ports"]] == [router.spec["readinessProbe"]["httpGet"]["port"]]
    folders = {mount["mountPath"] for mount in router.mounts.values()}
    assert router.setting("runAsNonRoot")
    assert {router.environment["HOME"], "/tmp"} == folders, "pip writes there only"


# ---- the page -----------------------------------------------------------------------------------


def test_the_commands_of_the_page_that_need_no_cluster_run() -> None:
    page = (DEPLOY / "kubernetes/README.md").read_text()
    built_there = re.findall(r"^kubectl kustomize (\S+)", page, re.M)
    assert built_there
    for folder in built_there:
        subprocess.run([KUBECTL, "kustomize", DEPLOY.parent / folder], check=True, capture_output=True, timeout=60)
    applied = re.findall(r"^kubectl apply --server-side -k (\S+)", page, re.M)
    assert applied
    assert all((DEPLOY.parent / folder).is_dir() for folder in applied)


def test_the_token_that_the_page_makes_is_the_one_that_it_reads() -> None:
    """By kubectl itself, without a cluster."""
    page = (DEPLOY / "kubernetes/README.md").read_text()
    (made,) = re.findall(r"^kubectl -n llm (create secret generic kvserver-http-token .*)$", page, re.M)
    (template,) = re.findall(r"kvserver-http-token -o (go-template='.*')\)$", page, re.M)
    command = f"{KUBECTL} {made.partition('$(')[0]}secret --dry-run=client -o {template}"
    shown = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60)
    assert (shown.stdout, shown.stderr) == ("secret", "")
