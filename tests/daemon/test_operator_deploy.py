"""The steps of `deploy/`, done by hand: no container engine and no systemd runs here, but their steps can be taken."""

from __future__ import annotations

import configparser
import ctypes
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import run
from support.daemon import KVSERVER, Daemon, wait_until
from support.mooncake import BINARIES as MOONCAKE
from support.valkey import ValkeyStore

from kvserver import __version__
from kvserver.config import field_types, parse_tiers, variable
from kvserver.daemon import EXIT_DEVICE_LOST

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


def instructions(path):
    """(keyword, rest) of every instruction of a Dockerfile, comments and continuations resolved."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages(path):
    """The instructions after each FROM."""
    found = []
    for keyword, rest in instructions(path):
        if keyword == "FROM":
            found.append([])
        if found:
            found[-1].append((keyword, rest))
    return found


def context_files():
    """What .dockerignore lets through: it shuts everything out and names exceptions."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    return [line[1:] for line in lines if line.startswith("!")]


def copied(stage, folder):
    """Carry out COPY instructions that name files of the sources."""
    allowed = context_files()
    for keyword, rest in stage:
        if keyword != "COPY" or rest.startswith("--from"):
            continue
        *sources, target = rest.split()
        for source in sources:
            assert any(fnmatch.fnmatch(source, name) for name in allowed), f"{source} is not in the build's context"
            goal = folder / target / source if target == "./" else folder / target
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, goal, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_native.pyi")
                )
            else:
                shutil.copy(ROOT / source, goal)


def stage_arguments(path):
    """(name, default) of every ARG of a Dockerfile."""
    return [tuple(rest.split("=", 1)) for keyword, rest in instructions(path) if keyword == "ARG" and "=" in rest]


@pytest.fixture(scope="module", params=["the wheel of make", pytest.param("its own build", marks=pytest.mark.long)])
def image(tmp_path_factory, request):
    """The Dockerfile's own steps in a folder, all but those that install packages and users of a system.

    pip builds what is installed from the sources that the Dockerfile copies, or finds it built from the checkout.
    """
    folder = tmp_path_factory.mktemp("image")
    _cuda, build, final = stages(DEPLOY / "Dockerfile")
    (folder / "src").mkdir()
    copied(build, folder / "src")
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    what = "."
    if request.param == "the wheel of make":
        wheels = list((ROOT / "build/wheel").glob("kvserver-*.whl"))
        assert len(wheels) == 1, "make build/wheel/.built makes it"
        what = str(wheels[0])
    taken = 0
    for keyword, rest in build:
        if keyword == "RUN" and not rest.startswith("apt-get"):
            install = 'pip install --no-cache-dir ".${EXTRAS:+[${EXTRAS}]}"'
            assert rest.count(install) == 1
            steps = rest.replace(install, f"pip install --no-cache-dir {what}")
            subprocess.run(
                ["sh", "-ec", steps.replace("/opt/kvserver", str(folder / "opt/kvserver"))],
                cwd=folder / "src",
                env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "VERSION": __version__},
                check=True,
                timeout=500,
            )
            taken += 1
    assert taken == 1
    return folder, dict(final), environment(final)


def environment(stage):
    return dict(word.split("=", 1) for keyword, rest in stage if keyword == "ENV" for word in shlex.split(rest))


def test_the_image_starts_a_daemon_that_passes_its_own_health_check(image):
    folder, final, environ = image
    kvserver = folder / "opt/kvserver/bin/kvserver"
    settings = {name: value for name, value in environ.items() if name.startswith("KVSERVER_")}
    assert settings.keys() <= {variable(name) for name in field_types()}
    command = [str(kvserver), *json.loads(final["CMD"])]
    assert json.loads(final["ENTRYPOINT"]) == ["kvserver"]
    holder = Daemon()  # for a folder with a short name
    settings |= {"KVSERVER_ENDPOINT": holder.endpoint, "KVSERVER_HTTP_HOST": "127.0.0.1", "KVSERVER_HTTP_PORT": "0"}
    process = subprocess.Popen(
        command, env={**os.environ, **settings, "KVSERVER_L1_SIZE": "64MiB"}, cwd="/", stdout=subprocess.PIPE, text=True
    )
    try:
        ready = process.stdout.readline()
        port = ready.split("http://127.0.0.1:")[1].split(",")[0]
        words = json.loads(final["HEALTHCHECK"].split("CMD", 1)[1])
        python = str(folder / "opt/kvserver/bin/python")

        def healthy(at):
            return subprocess.run([python, *words[1:]], env={"KVSERVER_HTTP_PORT": at}, capture_output=True).returncode

        assert words[0] == "python"
        assert healthy(port) == 0
        process.send_signal(getattr(signal, final["STOPSIGNAL"]))
        assert process.wait(10) == 0
        assert healthy(port) != 0
    finally:
        process.kill()
        process.stdout.close()
        holder.close()


def test_the_image_holds_neither_pip_nor_engines(image):
    folder, _, _ = image
    shown = subprocess.run(
        [folder / "opt/kvserver/bin/python", "-c", "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    names = set(shown.stdout.lower().split())
    assert "kvserver" in names
    assert not names & {"pip", "torch", "vllm", "cmake", "nanobind"}


def test_an_image_is_labelled_with_the_version_that_is_in_it(image):
    folder, _, _ = image
    (labels,) = [rest for keyword, rest in stages(DEPLOY / "Dockerfile")[-1] if keyword == "LABEL"]
    assert "org.opencontainers.image.version=${VERSION}" in labels.split()
    steps = next(rest for keyword, rest in stages(DEPLOY / "Dockerfile")[1] if "--version" in rest)
    (check,) = re.findall(r'found="\$\(\S+ --version\)" && test .*? = "\$found"', steps)

    def builds(version):
        words = check.replace("/opt/kvserver", f"{folder}/opt/kvserver")
        return subprocess.run(["sh", "-ec", words], env={**os.environ, "VERSION": version}).returncode == 0

    assert builds(__version__)
    assert builds("")
    assert not builds("9.9.9")


def test_the_daemon_of_the_image_is_not_root():
    final = stages(DEPLOY / "Dockerfile")[-1]
    users = [rest for keyword, rest in final if keyword == "USER"]
    assert users == ["${UID}"], "a number: Kubernetes cannot see that a name is not root"
    assert dict(stage_arguments(DEPLOY / "Dockerfile"))["UID"] == "1000"
    assert final.index(("USER", "${UID}")) < next(i for i, (keyword, _) in enumerate(final) if keyword == "ENTRYPOINT")


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile", "sglang.Dockerfile"])
def test_everything_that_a_dockerfile_copies_is_there_and_in_its_context(name, tmp_path):
    for number, stage in enumerate(stages(DEPLOY / name)):
        (tmp_path / str(number)).mkdir()
        copied(stage, tmp_path / str(number))


# ---- compose ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_services_of_compose_share_the_folder_of_the_endpoint_and_the_user(compose):
    services = compose["services"]
    endpoint = environment(stages(DEPLOY / "Dockerfile")[-1])["KVSERVER_ENDPOINT"]
    folder = str(Path(endpoint.removeprefix("ipc://")).parent)
    for service in services.values():
        assert f"socket:{folder}" in service["volumes"]
        assert service["build"]["args"]["UID"] == "${KVSERVER_UID:-1000}"
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    transfer = json.loads(services["vllm"]["command"][services["vllm"]["command"].index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["kvserver.endpoint"] == endpoint
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("KVServerConnector", "kv_both")


def test_sglang_of_compose_shares_the_folder_the_user_and_the_models(compose):
    added = yaml.safe_load((DEPLOY / "compose.sglang.yaml").read_text())["services"]
    assert added["kvserver"].keys() == {"gpus", "pid"}, "the rest is compose.yaml's"
    sglang, vllm = added["sglang"], compose["services"]["vllm"]
    assert sglang["volumes"] == vllm["volumes"]
    assert sglang["pid"] == added["kvserver"]["pid"] == "host", (
        "the end of the daemon would end an engine of its namespace"
    )
    assert sglang["build"]["args"]["UID"] == vllm["build"]["args"]["UID"]
    assert (DEPLOY / sglang["build"]["context"] / sglang["build"]["dockerfile"]).is_file()
    command = sglang["command"]
    extra = json.loads(command[command.index("--unified-cache-external-linker-config") + 1])["linker_extra_config"]
    assert extra["kvserver.endpoint"] == environment(stages(DEPLOY / "Dockerfile")[-1])["KVSERVER_ENDPOINT"]
    assert all(port.startswith("127.0.0.1:") for port in sglang["ports"])


def test_engines_of_prefill_and_decode_share_a_daemon_and_their_router_names_each(compose):
    added = yaml.safe_load((DEPLOY / "compose.prefill-decode.yaml").read_text())["services"]
    router, vllm = added.pop("router"), compose["services"]["vllm"]
    roles = {}
    for name, service in added.items():
        assert {key: service[key] for key in service.keys() - {"command"}} == {
            key: vllm[key] for key in service.keys() - {"command"}
        }, "as compose.yaml has it"
        transfer = json.loads(service["command"][service["command"].index("--kv-transfer-config") + 1])
        endpoint = transfer["kv_connector_extra_config"]["kvserver.endpoint"]
        assert endpoint == environment(stages(DEPLOY / "Dockerfile")[-1])["KVSERVER_ENDPOINT"]
        roles[name] = transfer["kv_role"]
        assert f"http://{name}:8000" in router["command"][-1]
    assert roles == {"vllm": "kv_producer", "decode-1": "kv_consumer", "decode-2": "kv_consumer"}
    (pinned,) = re.findall(r"vllm-router==[0-9.]+", router["command"][-1])
    assert pinned in (ROOT / "Makefile").read_text()
    assert all(port.startswith("127.0.0.1:") for port in router["ports"])


def test_every_example_names_its_engine_and_all_of_them_differently(compose):
    """Without a name of its own, legends are made up anew at every start; with one name two engines cannot both have a cache."""
    names = []
    pages = [ROOT / "README.md", DEPLOY / "README.md", DEPLOY / "router/README.md", ROOT / "adapters/README.md"]
    for page in [*pages, *DEPLOY.glob("guides/*.md")]:
        text = page.read_text()
        examples = re.findall(r"--kv-transfer-config '(\{.*?\}+)'(?=[\s`\\])", text, re.DOTALL)
        assert len(examples) == text.count("--kv-transfer-config '"), page
        names += [json.loads(example)["engine_id"] for example in examples]
    for service in compose["services"].values():
        command = service.get("command", [])
        if "--kv-transfer-config" in command:
            names.append(json.loads(command[command.index("--kv-transfer-config") + 1])["engine_id"])
    assert len(names) >= 4
    assert len(set(names)) == len(names)


def test_the_shared_memory_of_compose_holds_the_kv_cache(compose):
    vllm = compose["services"]["vllm"]
    assert int(vllm["shm_size"].removesuffix("gb")) > int(vllm["environment"]["VLLM_CPU_KVCACHE_SPACE"])


def test_compose_publishes_pages_to_this_machine_only_and_sets_what_is_a_setting(compose):
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        given = {name for name in service["environment"] if name.startswith("KVSERVER_")}
        assert given <= {variable(name) for name in field_types()}


def test_the_token_of_compose_is_where_the_daemon_looks_for_it_and_may_be_left_out(compose):
    service = compose["services"]["kvserver"]
    where = (
        service["environment"]["KVSERVER_HTTP_TOKEN_FILE"]
        .removeprefix("${KVSERVER_HTTP_TOKEN_FILE:+")
        .removesuffix("}")
    )
    assert f"${{KVSERVER_HTTP_TOKEN_FILE:-/dev/null}}:{where}:ro" in service["volumes"]
    assert where.startswith("/")


@pytest.mark.parametrize("kind", ["valkey", "s3", "mooncake"])
def test_the_storage_of_each_compose_file_is_a_tier_whose_client_the_image_has(compose, kind):
    added = yaml.safe_load((DEPLOY / f"compose.{kind}.yaml").read_text())["services"]
    service = added.pop("kvserver")
    assert service.keys() == {"environment"}, "the rest is compose.yaml's"
    given = {name for name in service["environment"] if name.startswith("KVSERVER_")}
    assert given <= {variable(name) for name in field_types()} - compose["services"]["kvserver"]["environment"].keys()
    url = service["environment"]["KVSERVER_L2"].removeprefix("${KVSERVER_L2:-").removesuffix("}")
    (tier,) = parse_tiers([url])
    assert tier.kind == kind
    assert kind in dict(stage_arguments(DEPLOY / "Dockerfile"))["EXTRAS"].split(",")
    if kind != "s3":
        assert tier.host in added
    for name, other in added.items():
        assert name not in compose["services"]
        assert "ports" not in other, "for this network only: it has no passwords"
        assert other["restart"] == "unless-stopped"


def test_the_commands_of_the_examples_start_their_servers(tmp_path):
    """With addresses of this machine, and less memory."""
    program, *words = example("valkey", "valkey")["command"]
    assert program == "valkey-server"
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    store = ValkeyStore(tmp_path, **dict(zip(names, words[1::2], strict=True)) | {"maxmemory": "64mb"})
    with store.client() as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}
    store.close()
    for program, name in MOONCAKE_PROGRAMS.items():
        assert example("mooncake", name)["entrypoint"] == [program]
        flags = [word.partition("=")[0] for word in example("mooncake", name)["command"]]
        known = subprocess.run([MOONCAKE / program, "-help"], capture_output=True, text=True).stdout
        assert all(f"    {flag} (" in known for flag in flags), flags


MOONCAKE_PROGRAMS = {"mooncake_master": "master", "mooncake_client": "memory"}


def example(kind, service):
    return yaml.safe_load((DEPLOY / f"compose.{kind}.yaml").read_text())["services"][service]


# ---- systemd ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(DEPLOY / "kvserver.service")
    return parser


@pytest.mark.parametrize("gpu", [False, True])
def test_systemd_accepts_the_unit(tmp_path, gpu):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    text = (DEPLOY / "kvserver.service").read_text().replace("/opt/kvserver/bin/kvserver", KVSERVER)
    (tmp_path / "kvserver.service").write_text(text)
    if gpu:
        (tmp_path / "kvserver.service.d").mkdir()
        shutil.copy(DEPLOY / "kvserver-gpu.conf", tmp_path / "kvserver.service.d/gpu.conf")
    checked = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "kvserver.service"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_unit_gives_the_daemon_the_folder_of_its_endpoint_and_its_limits(unit):
    service = unit["Service"]
    name, endpoint = service["Environment"].split("=", 1)
    assert name == "KVSERVER_ENDPOINT"
    assert Path(endpoint.removeprefix("ipc://")).parent == Path("/run") / service["RuntimeDirectory"]
    assert service["RuntimeDirectoryMode"] == "0700"
    assert (service["LimitMEMLOCK"], service["LimitNOFILE"]) == ("infinity", "65536")
    assert service["User"] != "root"


def test_a_daemon_that_lost_its_gpu_is_started_again(unit):
    assert unit["Service"]["Restart"] == "on-failure"
    assert str(EXIT_DEVICE_LOST) not in unit["Service"]["RestartPreventExitStatus"].split()


def test_a_daemon_that_cannot_start_as_configured_is_not_started_again(unit):
    ended = run("serve", "--l1-size", "much")
    assert str(ended.returncode) == unit["Service"]["RestartPreventExitStatus"]


def test_a_daemon_serves_without_new_privileges_and_executable_memory(make_daemon, make_worker, monkeypatch):
    """Of the unit's restrictions those that a process can take upon itself and that could break it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(66, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel has no PR_SET_MDWE")
    wrapper = (
        f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0) == 0 "
        "or sys.exit('refused'); os.umask(0o077); os.execv(sys.argv[1], sys.argv[1:])"
    )
    daemon = make_daemon(start=False)
    plain = daemon.command()
    monkeypatch.setattr(daemon, "command", lambda: [sys.executable, "-c", wrapper, *plain])
    daemon.start()
    make_worker(daemon).round_trip()
    wait_until(lambda: daemon.http("/readyz")[0] == 200)
    assert daemon.terminate() == 0
