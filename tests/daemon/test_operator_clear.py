"""`kvserver clear` and what `POST /cache/clear` does with a filter: what is meant is forgotten, what others use only if that is agreed to."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
from typing import Any

import pytest
import requests
from support.commands import run
from support.daemon import Daemon, wait_until
from support.ports import reserved_port
from support.registration import identity
from support.valkey import ValkeyStore
from support.worker import Worker, make_keys

from kvserver.protocol import Status, StatusReply

KEYS = make_keys(3, "clear")


def clear(daemon: Daemon, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    options = {"stdin": subprocess.DEVNULL, **options}
    return run("clear", "--http-port", str(daemon.http_port), *words, **options)


def answered(daemon: Daemon, answer: str, *words: str) -> subprocess.CompletedProcess[str]:
    """By a person on a terminal."""
    reader, terminal = pty.openpty()
    try:
        os.write(reader, answer.encode())
        return clear(daemon, *words, stdin=terminal)
    finally:
        os.close(terminal)
        os.close(reader)


def stored(*workers: Worker) -> None:
    for worker in workers:
        worker.store(KEYS, worker.blocks_for(len(KEYS)))


def post(daemon: Daemon, query: str) -> tuple[int, dict[str, Any]]:
    code, body = daemon.http(f"/cache/clear?{query}", "POST")
    return code, json.loads(body)


def test_one_model_is_cleared_and_others_are_left(make_daemon, make_worker):
    daemon = make_daemon()
    one = make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model="one"))
    other = make_worker(daemon, instance_id="b", model_name="m/two", identity=identity(model="two"))
    stored(one, other)
    one.store(KEYS[:2], one.blocks_for(2), variant="lora")
    ended = clear(daemon, "--model", "m/one", "--yes")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["cleared: 5 chunks in L1", "  of engines: a", "  of models: m/one"]
    assert [one.lookup(KEYS), one.lookup(KEYS, variant="lora"), other.lookup(KEYS)] == [0, 0, 3]


def test_the_kv_of_a_model_whose_engines_have_disconnected_is_cleared_by_its_name(make_daemon, make_worker):
    daemon = make_daemon()
    left = make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model="one"))
    stored(left)
    left.close()
    wait_until(lambda: not daemon.status()["instances"])
    ended = clear(daemon, "--model", "m/one", "--yes", "--json")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["chunks"], report["cleared"]) == (0, 3, True)
    assert daemon.status()["l1"]["chunks"] == 0


def test_an_engine_that_shares_its_kv_is_not_cleared_before_that_is_agreed_to(make_daemon, make_worker):
    daemon = make_daemon()
    one, twin, _ = (make_worker(daemon, instance_id=name) for name in ("a", "twin", "b"))
    stored(one)
    ended = clear(daemon, "--instance", "a", "--yes")
    assert ended.returncode == 3
    assert ended.stdout == ""
    assert "the same KV may be used by the engines b, twin; add --shared" in ended.stderr
    assert twin.lookup(KEYS) == 3
    ended = clear(daemon, "--instance", "a", "--yes", "--shared", "--json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert (report["chunks"], report["instances"], report["shared_with"]) == (3, ["a"], ["b", "twin"])
    assert twin.lookup(KEYS) == 0


def test_the_endpoint_itself_refuses_to_clear_what_others_use(make_daemon, make_worker):
    daemon = make_daemon()
    one, twin = make_worker(daemon, instance_id="a"), make_worker(daemon, instance_id="twin")
    stored(one)
    code, answer = post(daemon, "instance_id=a")
    assert (code, answer["error"], answer["report"]["shared_with"]) == (409, "shared", ["twin"])
    assert answer["report"]["cleared"] is False
    assert twin.lookup(KEYS) == 3
    twin.close()
    wait_until(lambda: len(daemon.status()["instances"]) == 1)
    assert post(daemon, "instance_id=a")[0] == 409, "it may come back within minutes"
    assert post(daemon, "instance_id=a&shared=true")[0] == 200
    assert one.lookup(KEYS) == 0


def test_an_engine_whose_kv_no_other_may_use_is_cleared_without_further_words(make_daemon, make_worker):
    daemon = make_daemon()
    one, other = make_worker(daemon, instance_id="a", identity=identity(model="x")), make_worker(daemon)
    stored(one, other)
    assert clear(daemon, "--instance", "a", "--yes").returncode == 0
    assert [one.lookup(KEYS), other.lookup(KEYS)] == [0, 3]


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 3, 3), ("\n", 3, 3), ("\x04", 3, 3)])
def test_a_person_is_asked_and_shown_what_would_be_cleared(make_daemon, make_worker, answer, code, left):
    daemon = make_daemon()
    one, twin = make_worker(daemon, instance_id="a"), make_worker(daemon, instance_id="twin")
    stored(one)
    ended = answered(daemon, answer, "--instance", "a")
    assert ended.returncode == code
    assert "this clears: 3 chunks in L1" in ended.stderr
    assert "the same KV may be used by the engines twin" in ended.stderr
    assert "Clear it? [y/N]" in ended.stderr
    assert twin.lookup(KEYS) == left


def test_without_a_terminal_nothing_is_cleared_unless_yes_is_given(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    stored(worker)
    ended = clear(daemon)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "add --yes" in ended.stderr
    assert worker.lookup(KEYS) == 3
    assert json.loads(clear(daemon, "--json").stdout)["error"] == "not_confirmed"
    assert clear(daemon, "--yes").stdout.startswith("cleared: 3 chunks in L1\n")
    assert worker.lookup(KEYS) == 0


def test_a_dry_run_reports_and_clears_nothing(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    stored(worker)
    ended = clear(daemon, "--dry-run")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, "would clear: 3 chunks in L1")
    assert json.loads(clear(daemon, "--dry-run", "--json").stdout)["cleared"] is False
    assert worker.lookup(KEYS) == 3


def test_an_unknown_name_and_an_engine_that_waits_have_exit_codes_of_their_own(make_daemon, make_worker):
    daemon = make_daemon()
    make_worker(daemon, instance_id="half", world_size=2)
    for words in (["--instance", "unknown"], ["--model", "none"]):
        ended = clear(daemon, *words, "--yes")
        assert ended.returncode == 4
        assert "nothing was cleared" in ended.stderr
    ended = clear(daemon, "--instance", "half", "--yes", "--json")
    assert (ended.returncode, json.loads(ended.stdout)["error"]) == (3, "not_ready")


def test_objects_of_files_are_counted_and_cleared_with_their_model_only(make_daemon, make_worker, tmp_path):
    daemon = make_daemon(l2=f"file://{tmp_path}/l2?size=16MiB")
    daemon.wait_for_tiers()  # what is stored before is not written
    one = make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model="one"))
    other = make_worker(daemon, instance_id="b", model_name="m/two", identity=identity(model="two"))
    stored(one, other)
    wait_until(lambda: daemon.tier()["objects"] == 6, what="all is written")
    ended = clear(daemon, "--model", "m/one", "--yes", "--json")
    assert json.loads(ended.stdout)["l2"] == [{"name": "file", "kind": "file", "objects": 3, "shared": False}]
    wait_until(lambda: daemon.tier()["objects"] == 3, what="the others are left")
    assert [one.lookup(KEYS), other.lookup(KEYS)] == [0, 3]
    assert "3 objects in L2 file" in clear(daemon, "--yes").stdout


def test_kv_that_only_l2_has_after_a_restart_is_not_passed_over_in_silence(make_daemon, make_worker, tmp_path):
    daemon = make_daemon(l2=f"file://{tmp_path}/l2?size=16MiB")
    daemon.wait_for_tiers()  # what is stored before is not written
    stored(make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model="one")))
    wait_until(lambda: daemon.tier()["objects"] == 3, what="all is written")
    known = clear(daemon, "--model", "m/one", "--dry-run", "--json")
    assert json.loads(known.stdout)["unnamed_l2"] == []
    assert "L2" not in clear(daemon, "--model", "m/two", "--yes").stderr, (
        "all that it has is of an engine that is known"
    )
    assert daemon.terminate() == 0
    daemon.start()
    wait_until(lambda: daemon.tier()["objects"] == 3, what="the folder is open")
    ended = clear(daemon, "--model", "m/one", "--yes")
    assert (ended.returncode, ended.stdout) == (4, "")
    assert "L2 file may have KV of it, but keeps no names of models: start an engine of it first" in ended.stderr
    # Another engine of the model, with another namespace: 0 objects are not all that there are.
    make_worker(daemon, instance_id="b", model_name="m/one", identity=identity(model="anew"))
    ended = clear(daemon, "--model", "m/one", "--yes")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, "cleared: 0 chunks in L1; 0 objects in L2 file")
    assert "not included: what L2 file may have of engines that are not known here" in ended.stdout
    make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model="one"))
    ended = clear(daemon, "--model", "m/one", "--yes")
    assert "not included" not in ended.stdout
    assert ended.stdout.startswith("cleared: 0 chunks in L1; 3 objects in L2 file\n")


def test_what_machines_share_is_cleared_only_if_that_is_agreed_to(make_daemon, make_worker, tmp_path):
    with contextlib.closing(ValkeyStore(tmp_path)) as valkey:
        daemon = make_daemon(l2=valkey.url_of("kvserver"))
        daemon.wait_for_tiers()
        worker = make_worker(daemon, instance_id="a")
        stored(worker)
        for words in ([], ["--instance", "a"]):
            ended = clear(daemon, *words, "--yes")
            assert ended.returncode == 3, ended
            assert "other machines, through valkey" in ended.stderr
        assert worker.lookup(KEYS) == 3
        ended = clear(daemon, "--instance", "a", "--yes", "--shared")
        assert (ended.returncode, worker.lookup(KEYS)) == (0, 0)
        assert "all objects (their number is not known) in L2 valkey" in ended.stdout


@pytest.mark.parametrize(
    "query",
    [
        "what=1", "instance_id=", "instance_id=a&model_name=b", "instance_id=a&instance_id=b", "dry_run=yes", "shared=1",
        "instance_id=" + "a" * 2000, "%ff=1", "a", "&".join(f"x{n}=1" for n in range(50)),
    ],
)  # fmt: skip
def test_a_query_that_is_not_understood_clears_nothing(daemon, worker, query):
    stored(worker)
    code, answer = post(daemon, query)
    assert (code, answer["error"]) == (400, "bad_parameter")
    assert worker.lookup(KEYS) == 3


def test_names_with_control_characters_are_shown_without_them(make_daemon, make_worker):
    daemon = make_daemon()
    stored(make_worker(daemon, instance_id="a\x1b[2J", model_name="m\x07"))
    ended = clear(daemon, "--dry-run")
    assert "a\\x1b[2J" in ended.stdout
    assert not {"\x1b", "\x07"} & set(ended.stdout)


def test_without_a_daemon_the_exit_code_is_one():
    reservation, port = reserved_port()
    with reservation:
        ended = run("clear", "--yes", "--http-port", str(port))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no daemon answers" in ended.stderr


def test_help_of_clear_has_an_example_and_the_exit_codes():
    ended = run("clear", "--help")
    assert "kvserver clear --model" in ended.stdout
    assert "exit codes: 0 cleared" in ended.stdout


def test_a_model_of_more_namespaces_than_a_turn_of_the_loop_can_clear_is_refused(make_daemon, make_worker):
    daemon = make_daemon(l1_size="64MiB")
    for number in range(65):
        worker = make_worker(daemon, instance_id="a", model_name="m/one", identity=identity(model=str(number)))
        worker.store(KEYS[:1], worker.blocks_for(1))
        worker.close()
        wait_until(lambda: not daemon.status()["instances"])
    code, answer = post(daemon, "model_name=m/one")
    assert (code, answer["error"]) == (409, "too_many")
    assert daemon.status()["l1"]["chunks"] == 65
    assert post(daemon, "")[1]["chunks"] == 65


def test_what_is_being_stored_when_its_model_is_cleared_is_never_found(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon, instance_id="a", model_name="m/one")
    stored(worker)
    more = make_keys(2, "more")
    with daemon.paused_copies():
        store = worker.begin_store(more, worker.blocks_for(2))
        worker.ask(Status(), StatusReply)  # the store has begun
        assert post(daemon, "model_name=m/one")[0] == 200
    store.reply()
    assert [worker.lookup(KEYS), worker.lookup(more)] == [0, 0]
    daemon.wait_for_accounting(tickets=0, pins=0, used_pages=0)


def test_a_filter_needs_the_token_and_no_other_sites_page_may_send_one(make_daemon, make_worker, tmp_path):
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef" * 2)
    daemon = make_daemon(http_token_file=token)
    worker = make_worker(daemon, instance_id="a")
    stored(worker)
    ended = clear(daemon, "--instance", "a", "--yes")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "answers 401" in ended.stderr
    url = f"http://127.0.0.1:{daemon.http_port}/cache/clear?instance_id=a"
    headers = {"Authorization": f"Bearer {token.read_text()}", "Origin": "http://evil.example"}
    assert requests.post(url, headers=headers, timeout=10).status_code == 403
    assert worker.lookup(KEYS) == 3
    assert clear(daemon, "--instance", "a", "--yes", "--http-token-file", str(token)).returncode == 0
    assert worker.lookup(KEYS) == 0
