"""The page at `/` in a real Chromium: what it shows is what the daemon counts, names of engines and models are text, and it goes on
through a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import NARROW, Browser
from support.daemon import Daemon, wait_until
from support.leftovers import closed
from support.worker import Worker, make_keys

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
CONTRAST = """
const channel = (value) => ((value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => { const c = colour(getComputedStyle(e).backgroundColor); return c[3] === 0 ? ground(e.parentElement) : c; };
const low = [];
for (const e of document.querySelectorAll("body *")) {
  const text = [...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!text || !e.checkVisibility() || e.closest("noscript, .skip")) continue;
  const pair = [luminance(colour(getComputedStyle(e).color)), luminance(ground(e))].sort((a, b) => b - a);
  if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) low.push(e.outerHTML.slice(0, 100));
}
return low;
"""
STICKS_OUT = """
return [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest(".scroll, .skip, svg") &&
  e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML.slice(0, 100));
"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """After every test: the browser saw no violation of the page's policy, no error of a script, and requested nothing elsewhere."""
    yield chromium
    expected = re.compile(
        r"ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|status of 401|ERR_NETWORK_CHANGED"
    )
    assert not [line for line in chromium.log() if not expected.search(line)]
    assert not chromium.run(
        "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !n.startsWith(origin))"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l2")


@pytest.fixture(scope="module")
def busy(folder: Path) -> Iterator[Daemon]:
    """A daemon with a folder as L2, two engines that use it, one that waits for a rank, and one that names itself by markup."""
    daemon = Daemon(history_seconds=600, l1_size="1MiB", l2=f"file://{folder}?size=16MiB").start()
    workers: list[Worker] = []
    try:
        for name, world_size in (("llama-1", 1), ("llama-2", 1), ("half", 2)):
            engine = Worker(
                daemon.endpoint, instance_id=name, model_name="meta/llama", world_size=world_size, connect_now=False
            )
            workers.append(engine)
            engine.attach()
            engine.register(engine="sglang" if name == "llama-2" else "vllm", engine_version="0.5.23")
        workers.append(Worker(daemon.endpoint, instance_id=MARKUP, model_name=MARKUP))
        for worker in workers:
            closed(worker)  # by this fixture, not after the first test
        for number, worker in enumerate((*workers[:2], workers[3])):
            worker.round_trip()
            keys = make_keys(60, number)
            for key in keys:  # more than L1 has room for
                worker.store([key], worker.blocks_for(1))
            worker.lookup(keys[:15], f"evicted {number}")
            worker.end_request(
                f"evicted {number}", prompt_tokens=1000, local_tokens=250, loaded_tokens=600, l2_tokens=100, loads=1
            )
            worker.send(
                worker.stats_message(running=3 + number, waiting=number, kv_cache_usage=0.25, interval_seconds=60)
            )
        workers[0].lookup(make_keys(4))
        wait_until(lambda: sum(daemon.status()["totals"]["prompt_tokens"].values()) == 3000)
        wait_until(lambda: (tier := daemon.tier())["objects"] and not tier["queue_objects"])
        yield daemon
    finally:
        for worker in workers:
            worker.close()
        daemon.close()


def numbers(text: str) -> list[str]:
    return re.findall(r"[\d,]*\d(?:\.\d+)?", text)


def rows(browser: Browser, selector: str) -> dict[str, list[str]]:
    """The cells of a table's rows, by the text of each row's head."""
    script = f"""return [...document.querySelectorAll("{selector} tbody tr")].map((row) => [...row.cells].map((c) => c.innerText))"""
    found: dict[str, list[str]] = {head: cells for head, *cells in browser.run(script)}
    return found


def test_page_shows_the_values_of_the_status(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("[data-figure=prompt-tokens]", "3,000")
    status: dict[str, Any] = busy.status()
    assert status["boot_id"] in browser.text("#identity")
    assert browser.text("#ready").strip() == "Ready"
    script = "return Object.fromEntries([...document.querySelectorAll('[data-source]')].map((e) => [e.dataset.source, +e.querySelector('[data-tokens]').dataset.tokens]))"
    assert (
        browser.run(script) == status["totals"]["prompt_tokens"] == {"l0": 750, "l1": 1500, "l2": 300, "computed": 450}
    )
    assert browser.text("[data-figure=not-computed]") == "85.0%"
    totals, l1, tier = status["totals"], status["l1"], status["l2"][0]
    browser.wait_for_text("[data-figure=hit-rate]", f"{100 * totals['hit_tokens'] / totals['lookup_tokens']:.1f}%")
    tiers = rows(browser, "#tiers")
    assert tiers["L1"][-2:] == [f"{l1['chunks']:,}", f"{l1['evictions']:,}"]
    assert l1["evictions"] > 0
    assert tiers[tier["name"]][-2:] == [f"{tier['objects']:,}", f"{tier['evictions']:,}"]
    assert {name: cells[0] for name, cells in rows(browser, "#ages").items()} == {"L1": "100.0%", "L2": "100.0%"}
    engines = {name.split("\n")[0]: cells for name, cells in rows(browser, "#engines").items()}
    assert {name: cells[1:3] for name, cells in engines.items()} == {
        "llama-1": ["3", "0"], "llama-2": ["4", "1"], MARKUP: ["5", "2"], "half": ["–", "–"],
    }  # fmt: skip
    assert "1 of 2 registered so far" in engines["half"][0]
    named = {name.split("\n")[0]: name.split("\n")[2:] for name in rows(browser, "#engines")}
    assert named == {"llama-1": ["vllm 0.5.23"], "llama-2": ["sglang 0.5.23"], MARKUP: [], "half": ["vllm 0.5.23"]}
    assert browser.text("#on-answer") == "In part: 1 of 4 engines runs without cache."
    copies = rows(browser, "#copies")
    assert numbers(copies["Stores, L0 to L1"][0])[0] == f"{totals['stored_bytes'] / 2**20:.1f}"
    wait_until(lambda: "memcpy, measured once" in browser.text("#copies"))
    assert float(rows(browser, "#copies")["Loads, L1 to L0"][2]) > 0


def test_page_shows_what_l1_of_other_sizes_would_have_found(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("#more-answer", "would have found")
    curve = busy.status()["what_if"]
    names = {"1": "as it is", "unlimited": "unlimited"}
    shown = {head: (cells[2], cells[3]) for head, cells in rows(browser, "#what-if").items()}
    assert shown == {
        names.get(one["size"], f"{one['size']} times"): (
            f"{one['would_hit_tokens']:,}", f"{100 * one['would_hit_tokens'] / curve['looked_up_tokens']:.1f}%",
        )
        for one in curve["sizes"]
    }  # fmt: skip


def test_worst_requests_are_explained_as_the_command_explains_them(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("#misses", "kvserver explain")
    requests = json.loads(busy.http("/explain?minutes=60&limit=50")[1])["requests"]
    assert requests[0]["missing"]["reason"] in ("evicted", "in_l2")
    shown = browser.text("#misses")
    assert requests[0]["verdict"] in shown
    assert all(advice in shown for advice in requests[0]["advice"])


def test_markup_in_names_is_shown_as_text(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("#engines", MARKUP)
    browser.wait_for_text("#misses", MARKUP)
    assert browser.run("return document.title") == "kvserver"
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0


def test_every_metric_on_the_page_has_its_documented_definition(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("#definitions", "kvserver_prompt_tokens_total")
    script = """return [...document.querySelectorAll(".metrics a")].map((a) => [a.innerText,
      document.getElementById(a.hash.slice(1))?.nextElementSibling.innerText.replace(/\\s+/g, " ")])"""
    page = (Path(__file__).parent.parent.parent / "kvserver" / "METRICS.md").read_text().replace("`", "")
    for name, definition in browser.run(script):
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert definition in re.sub(r"\s+", " ", line)


def test_page_follows_live_and_keeps_the_last_hour_over_a_reload(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(history_seconds=600)
    browser.open(daemon)
    browser.wait_for_text("#on-answer", "no engine is connected")
    worker = make_worker(daemon)
    worker.end_request(prompt_tokens=1000, local_tokens=250, loaded_tokens=600)
    browser.wait_for_text("#on-answer", "Yes: one engine is connected and uses the cache.")
    browser.wait_for_text("[data-figure=prompt-tokens]", "1,000")
    worker.end_request("another", prompt_tokens=1000)
    browser.wait_for_text("[data-figure=prompt-tokens]", "2,000")
    browser.driver.refresh()
    browser.wait_for_text("[data-figure=prompt-tokens]", "2,000")
    assert browser.text("[data-figure=not-computed]") == "42.5%"


def test_page_goes_on_through_a_restart_of_the_daemon(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(history_seconds=600)
    make_worker(daemon).end_request(prompt_tokens=1000, loaded_tokens=500)
    browser.open(daemon)
    browser.wait_for_text("[data-figure=prompt-tokens]", "1,000")
    browser.run("window.same = true")
    daemon.kill()
    assert re.search(
        r"since \d\d:\d\d:\d\d\. What is below is of", browser.wait_for_text("#unreachable", "Not reachable")
    )
    assert browser.text("#ready").strip() == "Not reachable"
    assert browser.text("[data-figure=prompt-tokens]") == "1,000"
    daemon.flags["http_port"] = daemon.http_port
    daemon.start()
    browser.wait_for_text("#identity", daemon.boot_id)
    assert browser.text("#unreachable") == ""
    make_worker(daemon).end_request(prompt_tokens=200, loaded_tokens=100)
    browser.wait_for_text("[data-figure=prompt-tokens]", "1,200")
    assert browser.run("return window.same")


def test_a_token_is_requested_kept_for_the_tab_and_forgotten(
    browser: Browser, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    token = "correct-horse-battery"
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(token)
    daemon = make_daemon(http_token_file=file)
    browser.open(daemon)
    browser.wait_for_text("#token", "This daemon needs a token")
    assert browser.text("#content") == ""
    browser.find("#token-input").send_keys("wrong" + Keys.ENTER)
    browser.wait_for_text("#token-error", "does not accept that token")
    browser.find("#token-input").send_keys(token + Keys.ENTER)
    browser.wait_for_text("#on-answer", "no engine is connected")
    browser.driver.refresh()
    browser.wait_for_text("#on-answer", "no engine is connected")
    assert token not in browser.driver.page_source + browser.driver.current_url + daemon.log
    browser.find("#forget").click()
    browser.wait_for_text("#token", "This daemon needs a token")
    browser.driver.refresh()
    browser.wait_for_text("#token", "This daemon needs a token")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, NARROW])
def test_page_is_readable_in_light_and_dark_at_every_width(
    browser: Browser, busy: Daemon, dark: bool, width: int
) -> None:
    browser.open(busy, width=width, dark=dark)
    browser.wait_for_text("#misses", "kvserver explain")
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run(STICKS_OUT) == []
    assert browser.run(CONTRAST) == []
    lightness = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(lightness) < 64) == dark
    assert browser.run("return document.querySelectorAll('.chart canvas').length") == 2


def test_page_can_be_read_without_colour_and_used_by_keyboard(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    browser.wait_for_text("#misses", "kvserver explain")
    looks = browser.run("return [...document.querySelectorAll('.key')].map((e) => e.className.split(' ')[1])")
    assert len(looks) == len(set(looks)) == 4, "each source has a pattern of its own"
    assert browser.run("return [...document.querySelectorAll('.mark')].every((e) => e.innerText.trim())")
    assert browser.run("return [...document.querySelectorAll('[role=img], [role=region]')].every((e) => e.ariaLabel)")
    browser.find("body").send_keys(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.run("document.activeElement.click()")
    reached = browser.run("""return [...document.querySelectorAll('.scroll, main a, main button')].filter((e) => e.checkVisibility())
      .every((e) => { e.focus(); return document.activeElement === e; })""")
    assert reached


def test_a_hidden_page_requests_nothing(browser: Browser, busy: Daemon) -> None:
    browser.open(busy)
    count = "return performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/status')).length"
    wait_until(lambda: browser.run(count) >= 2, 20)
    browser.run(
        """Object.defineProperty(document, "hidden", { get: () => window.away, configurable: true }); window.away = true"""
    )
    # The look that has begun ends, and begins no other: after it there is no timer any more.
    ended = """const done = arguments[0], before = () => performance.getEntriesByType('resource').length; let last = before();
      const again = () => { const now = before(); if (now === last) done(now); else { last = now; setTimeout(again, 2500); } };
      setTimeout(again, 2500)"""
    assert browser.driver.execute_async_script(ended)
    before = browser.run(count)
    browser.run("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    wait_until(lambda: browser.run(count) > before, 20)


def test_the_browser_runs_no_inline_script_and_loads_nothing_from_elsewhere(chromium: Browser, busy: Daemon) -> None:
    chromium.open(busy)
    chromium.wait_for_text("#on-answer", "engines")
    refused = chromium.driver.execute_async_script("""
      const done = arguments[0], found = [];
      addEventListener("securitypolicyviolation", (e) => { found.push(e.effectiveDirective); if (found.length === 3) done(found.sort()); });
      const script = document.createElement("script"); script.textContent = "document.title = 'taken'"; document.body.append(script);
      const image = new Image(); image.src = "http://127.0.0.2:9/x.png"; document.body.append(image);
      document.body.setAttribute("style", "color: red");
    """)
    assert refused == ["img-src", "script-src-elem", "style-src-attr"]
    assert chromium.run("return document.title") == "kvserver"
    chromium.log()


def test_an_engine_whose_registration_was_refused_is_shown_with_the_reason(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    make_worker(daemon, instance_id="serves")
    worker = make_worker(daemon, instance_id="ends")
    worker.attach()
    error = worker.error_of(worker.registration(instance_id="refused-1", rank=7))
    wait_until(lambda: daemon.status()["refused_engines"], what="the refusal is in /status")
    browser.open(daemon)
    assert f"refused: {error.message} ({error.code})" in browser.wait_for_text("#engines", "refused-1")
    assert browser.text("#on-answer") == "In part: 1 of 2 engines runs without cache."


def test_what_an_engine_does_not_report_is_named_and_no_zero(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(history_seconds=600)
    worker = make_worker(daemon, instance_id="sglang-1", connect_now=False)
    worker.attach()
    worker.register(engine="sglang", unreported=("requests", "blocks", "stats"))
    worker.round_trip()
    browser.open(daemon)
    browser.wait_for_text("#help-answer", "Prompt tokens by source: not reported by this engine.")
    (cells,) = rows(browser, "#engines").values()
    assert (
        "blocks of L0, prompt tokens by source, running and waiting requests: not reported by this engine" in cells[0]
    )
    assert cells[4:6] == ["–", "–"]
    for figure in ("not-computed", "gained", "prompt-tokens"):
        assert browser.text(f"[data-figure={figure}]") == "–"
    assert browser.text("#help-sources") == ""


def test_the_answer_agrees_with_the_number_of_engines(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    browser.open(daemon)
    for name, ranks, answer in (
        ("half-1", 2, "No: the only engine runs without cache."),
        ("half-2", 2, "No: all 2 engines run without cache."),
        ("whole-1", 1, "In part: 2 of 3 engines run without cache."),
    ):
        make_worker(daemon, instance_id=name, world_size=ranks)
        browser.wait_for_text("#on-answer", answer)


def test_page_answers_with_the_serving_mode_that_the_operator_chose(
    browser: Browser, make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    make_worker(daemon)
    browser.open(daemon)
    for mode, answer in (
        ("off", "No: serving is switched off"),
        ("stores-off", "In part: stores are switched off"),
        ("on", "Yes: one engine"),
    ):
        assert daemon.http(f"/config/serving?value={mode}", "POST")[0] == 200
        browser.wait_for_text("#on-answer", answer)
