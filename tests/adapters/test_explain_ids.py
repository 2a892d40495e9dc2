"""The ids that vLLM makes of a client's are found by the client's, in a daemon that vLLM's scheduler has asked."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_model import prompt
from support.daemon import wait_until
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

CHUNK = 64


def internal_ids(request_id: str, samples: int) -> list[str]:
    """What vLLM calls the requests that it makes of one of its API server's."""
    sampling = SamplingParams(n=samples)
    request: Any = SimpleNamespace(
        request_id=request_id, external_req_id=None, params=sampling, sampling_params=sampling
    )  # as far as vLLM looks
    InputProcessor.assign_request_id(request)
    if samples == 1:
        return [request.request_id]
    parent = ParentRequest(request)
    return [parent.get_child_info(index)[0] for index in range(samples)]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    ("of_the_api_server", "known"),  # `cmpl-{X-Request-Id}-{prompt}` and `chatcmpl-{X-Request-Id}`
    [("cmpl-7d1c-0", ["cmpl-7d1c", "7d1c"]), ("chatcmpl-my-id", ["chatcmpl-my-id", "my-id"])],
)
def test_ids_that_a_client_knows_find_their_requests_in_explain(
    make_daemon, make_engine, of_the_api_server, known, samples
):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    ids = internal_ids(of_the_api_server, samples)
    assert of_the_api_server not in ids, "vLLM makes another id of it"
    for request_id in (*ids, *internal_ids("cmpl-another-0", 1)):
        engine.generate(request_id, prompt(1, 2 * CHUNK + 9))

    def explained(client_id: str) -> list[dict[str, Any]]:
        body = daemon.http(f"/explain?request_id={client_id}")[1]
        found: list[dict[str, Any]] = json.loads(body).get("requests", [])
        return found if len(found) == samples and all(r["outcome"] != "running" for r in found) else []

    for client_id in (*known, of_the_api_server):
        found = wait_until(lambda known=client_id: explained(known), 10, client_id)
        assert [request["request_id"] for request in found] == ids[::-1]
        first = found[-1]
        assert (first["outcome"], first["missing"]["reason"]) == ("miss", "never_stored")
        assert first["tokens"]["computed"] == first["tokens"]["prompt"] == 2 * CHUNK + 9
