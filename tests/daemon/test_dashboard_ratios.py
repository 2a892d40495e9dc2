"""Every share on the dashboard is one, whatever is chosen: of two models with two engines each, in two namespaces, on a real daemon's metrics."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.daemon import GPUS, Daemon, wait_until
from support.promtool import as_asked, check, panels, scraped
from support.worker import Worker, make_keys

ENGINES = {"e1": "m1", "e2": "m1", "e3": "m2", "e4": "m2"}
CHOICES = [
    {"namespace": namespace, "model": model, "engine": engine}
    for namespace, model, engine in itertools.product((".*", "a", "b"), (".*", "m1", "m2"), (".*", *ENGINES))
]


def ratios() -> dict[str, str]:
    """Queries of shares, by panel. A heatmap's unit is its axis's: it shows counts."""
    return {
        f"{panel['id']}:{target['refId']}": target["expr"]
        for panel in panels()
        if panel["type"] != "heatmap" and panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "percentunit"
        for target in panel["targets"]
    }


def work(worker: Worker, chunks: int) -> None:
    """Nearly all that is looked up is found: a share over the tokens of other engines would be above 1."""
    keys = make_keys(chunks)
    worker.send(worker.stats_message(running=1, kv_cache_usage=0.9))
    worker.store(keys, worker.blocks_for(chunks))
    for number in range(8):
        request = f"{worker.instance_id} {number}"
        assert worker.lookup(keys, request) == chunks
        worker.load(keys, worker.blocks_for(chunks), request_id=request)
        worker.end_request(request, prompt_tokens=100, local_tokens=10, loaded_tokens=80, loads=1)
    stats = {
        "prefix_queries": 100,
        "prefix_hits": 10,
        "external_queries": 90,
        "external_hits": 80,
        "prompt_tokens": 100,
    }
    worker.send(worker.stats_message(running=1, kv_cache_usage=0.9, **stats))


@pytest.fixture(scope="module")
def scrapes() -> tuple[str, str]:
    """Before and after the engines worked."""
    daemon = Daemon(metrics_sample_rate=1, simulated_gpus=1).start()
    workers: list[Worker] = []
    try:
        for engine, model in ENGINES.items():
            workers.append(Worker(daemon.endpoint, instance_id=engine, model_name=model, gpu=GPUS[0]))
        before = daemon.http("/metrics")[1]
        for chunks, worker in enumerate(workers, 1):
            work(worker, chunks)
        wait_until(lambda: daemon.metric("kvserver_events_queue_depth") == 0)
        return before, daemon.http("/metrics")[1]
    finally:
        for worker in workers:
            worker.close()
        daemon.close()


def five_minutes_each(scrapes: tuple[str, str], of: set[str]) -> list[dict[str, str]]:
    """In two namespaces with a daemon of one name."""
    found = []
    for namespace in ("a", "b"):
        before, after = (scraped(text, job="kvserver", namespace=namespace, instance="d") for text in scrapes)
        for series, value in after.items():
            if series.partition("{")[0] in of:
                found.append({"series": series, "values": f"{before.get(series, 0):f}x5 {value:f}x5"})
    return found


def test_every_ratio_is_between_0_and_1_for_every_choice_of_the_variables(
    scrapes: tuple[str, str], tmp_path: Path
) -> None:
    rules: list[dict[str, Any]] = [
        {"record": "share", "labels": {"panel": panel, "choice": str(number)}, "expr": as_asked(query, **choice)}
        for panel, query in ratios().items()
        for number, choice in enumerate(CHOICES)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "shares", "interval": "8m", "rules": rules}]}))
    named = set(re.findall(r"kvserver_\w+", "".join(ratios().values())))
    found = [{"labels": f'{{panel="{panel}"}}', "value": 1} for panel in ratios()]
    check(
        tmp_path,
        path,
        [
            {
                "interval": "1m",
                "input_series": five_minutes_each(scrapes, named),
                "promql_expr_test": [
                    {"expr": "share unless (share >= 0 <= 1)", "eval_time": "8m", "exp_samples": []},
                    {"expr": 'group by (panel) (share{choice="0"})', "eval_time": "8m", "exp_samples": found},
                ],
            }
        ],
    )
