"""Which request is explained: by its id, or the worst ones; on the page and on the command line, and to whom."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from support import commands
from support.daemon import Daemon, wait_until
from support.explained import CHUNK, MakeDaemon, MakeWorker, explained, page, stored
from support.registration import identity
from support.worker import make_keys, packed


def test_the_id_that_a_client_knows_finds_its_request(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    ids = (
        "cmpl-my-id-0-0123abcd",
        "cmpl-my-id-1-0123abcd",
        "cmpl-my-id-10-0-0123abcd",
        "chatcmpl-9f-89abcdef",
        "1_cmpl-n-0-00000000",
    )
    for request_id in ids:
        worker.lookup(make_keys(1), request_id)
    explained(daemon, ids[-1])

    def known_as(client_id: str) -> list[str]:
        code, body = page(daemon, request_id=client_id)
        return [request["request_id"] for request in body["requests"]] if code == 200 else []

    assert known_as("cmpl-my-id") == known_as("my-id") == [ids[1], ids[0]], "newest first; not my-id-10"
    assert known_as("my-id-1") == [ids[1]]
    assert known_as("chatcmpl-9f") == known_as("9f") == [ids[3]]
    assert known_as("cmpl-n") == known_as("n") == [ids[4]]
    assert known_as("cmpl-m") == [ids[2], ids[1], ids[0]], "no whole id, so what begins like it"
    assert known_as(ids[0]) == [ids[0]]
    assert [r["request_id"] for r in page(daemon, request_id="cmpl-m", limit=1)[1]["requests"]] == [ids[2]]
    assert known_as("y-id") == []


def test_an_id_that_comes_again_is_another_request(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    for chunks in (1, 2):
        worker.lookup(make_keys(chunks), "same")
        worker.end_request("same", prompt_tokens=100 * chunks)

    def prompts() -> list[int | None]:
        return [request["tokens"]["prompt"] for request in page(daemon, request_id="same")[1].get("requests", ())]

    wait_until(lambda: prompts() == [200, 100], 10, "two requests, each with its end")


def test_explain_without_an_id_lists_the_worst_requests_first(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id="one")
    keys = stored(worker, 3)
    assert page(daemon)[1]["requests"] == []
    new, newer = make_keys(4), make_keys(3)
    for request_id, asked, local in (
        ("good", keys, 3), ("worst", keys, 0), ("new", new, 0), ("bad", keys, 2), ("newer", newer, 0),
    ):  # fmt: skip
        worker.lookup(asked, request_id, tokens=len(asked) * CHUNK)
        worker.end_request(request_id, prompt_tokens=len(asked) * CHUNK, local_tokens=local * CHUNK)
    explained(daemon, "newer", outcome="miss")
    code, body = page(daemon)
    assert code == 200
    assert [request["request_id"] for request in body["requests"]] == ["worst", "bad", "new", "newer", "good"]
    assert body["order"] == "most avoidable tokens first, then most computed tokens, then newest"
    assert body["remembered"]["requests"] == daemon.status()["explain"]["requests"] == 5
    assert [r["request_id"] for r in page(daemon, limit=2, minutes=1)[1]["requests"]] == ["worst", "bad"]
    assert len(page(daemon, instance_id="one")[1]["requests"]) == 5
    assert page(daemon, instance_id="two")[1]["requests"] == []


def test_the_reply_to_an_unknown_id_states_how_far_back_the_daemon_remembers(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    worker.lookup(make_keys(1), "known")
    explained(daemon, "known")
    code, body = page(daemon, request_id="unknown")
    assert (code, body["error"]) == (404, "unknown_request")
    assert "1 are, of at most 8,192" in body["message"]
    assert "the oldest from " in body["message"]


@pytest.mark.parametrize(
    "query",
    [
        "request_id=",
        "request_id=" + "x" * 513,
        "request_id=a&request_id=b",
        "request_id=a&minutes=5",
        "request_id=%ff",
        "minutes=0",
        "minutes=1441",
        "minutes=-1",
        "minutes=1e3",
        "minutes=%D9%A3",
        "limit=101",
        "limit=",
        "unknown=1",
        "&".join(f"limit={n}" for n in range(1, 50)),
    ],
)
def test_a_bad_parameter_is_a_typed_400(module_daemon: Daemon, query: str) -> None:
    code, body = module_daemon.http("/explain?" + query)
    assert (code, json.loads(body)["error"]) == (400, "bad_parameter")


def run(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.run("explain", "--http-port", str(daemon.http_port), *words)


def test_the_command_begins_with_the_verdict_and_ends_with_what_to_do(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    keys = stored(make_worker(daemon, instance_id="has-it"), 2)
    worker = make_worker(daemon, identity=identity(dtype="float16"), instance_id="asks")
    worker.lookup(keys, "cmpl-x-0-01234567", tokens=2 * CHUNK)
    worker.end_request("cmpl-x-0-01234567", prompt_tokens=2 * CHUNK)
    explained(daemon, "x", outcome="miss")
    shown = run(daemon, "x")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("128 of 128 prompt tokens were computed: chunk 0 on is in L1 for engines that may not")
    facts = {line.split()[0]: line for line in lines[1:] if line.startswith("  ") and not line.startswith("    ")}
    assert "cmpl-x-0-01234567" in facts["request"]
    assert "asks" in facts["engine"]
    assert "dtype: float16 here, bfloat16 there" in facts["differs"]
    assert "one lookup" in facts["waited"]
    assert "same values" in shown.stdout.split("to do")[1]
    assert run(daemon).stdout.startswith(lines[0][:60]), "the worst, without an id"
    as_json = json.loads(run(daemon, "x", "--json").stdout)
    assert as_json["requests"][0]["request_id"] == "cmpl-x-0-01234567"


def test_the_command_states_what_is_wrong_in_one_line(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    empty = run(daemon)
    assert (empty.returncode, empty.stdout) == (0, "no request of that time is remembered\n")
    for words, code, stated in (
        (("unknown",), 1, "no request 'unknown' is remembered"),
        (("--minutes", "0"), 1, "minutes is a number from 1 to 1440"),
        (("--http-token-file", "/nowhere"), 2, "--http-token-file /nowhere: cannot be read"),
    ):
        shown = run(daemon, *words)
        assert shown.returncode == code
        assert stated in shown.stderr
        assert len(shown.stderr.splitlines()) == 1
    daemon.kill()
    assert "no daemon answers at" in run(daemon).stderr


def test_the_page_is_for_operators_only(make_daemon: MakeDaemon, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("correct-horse-battery")
    daemon = make_daemon(http_token_file=token)
    assert daemon.http("/explain")[0] == 401
    assert run(daemon).returncode == 1
    assert run(daemon, "--http-token-file", str(token)).returncode == 0


def test_a_peer_cannot_make_the_daemon_remember_more_than_its_bounds(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = make_keys(1)
    for number in range(9000):
        worker.lookup(keys, f"{number:0512}", traceparent="x" * 512)
    found = wait_until(lambda: (e := daemon.status()["explain"])["requests"] > 4000 and e)
    assert found["requests"] <= 8192
    assert found["bytes"] <= 25 << 20
    assert explained(daemon, f"{8999:0512}")
    assert page(daemon, request_id=f"{0:0512}")[0] == 404


def test_load_without_a_lookup_belongs_to_no_request(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = stored(worker, 1)
    worker.load(keys, worker.blocks_for(1), request_id="unknown", block_ids=packed(worker.blocks_for(1)))
    worker.lookup(keys, "after")
    explained(daemon, "after")
    assert page(daemon, request_id="unknown")[0] == 404
