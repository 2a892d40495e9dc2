"""A small router: each request goes to the engine that has most of its prompt cached and is not too busy.

    python router.py --daemon http://127.0.0.1:8080 --engine one=http://127.0.0.1:8001 --engine two=http://127.0.0.1:8002

An engine's name is the `engine_id` of its --kv-transfer-config. The walk of a request: its tokens (an engine's
/tokenize, or the ids in the request) -> the daemon's POST /kv/match -> a score for each engine -> the answer streamed
through. Whatever fails on the way to the score costs no request: then the engine with the fewest requests gets it.

An example to read and to change, for one machine and one daemon. It has no authentication.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientConnectionError, ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("router")

TOKENIZE_SECONDS = 0.25  # for an engine to tokenize a prompt
MATCH_SECONDS = 0.05  # for the daemon to answer which engine has it
DOWN_SECONDS = 5.0  # an engine that did not answer is the last choice for so long
DAEMON_SHARE = 0.8  # what a token in L1 or L2 is worth, beside one in the engine's own memory
REQUEST_TOKENS = 256  # a request that is running or waiting outweighs so many cached tokens
LARGEST_REQUEST = 64 << 20
ONE_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}  # headers that are not passed on
CHAT_FIELDS = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


@dataclass
class Engine:
    name: str
    url: str
    in_flight: int = 0  # requests that we sent it and that have not ended
    down_until: float = 0.0
    sent: int = 0


def score(engine: Engine, row: dict[str, Any]) -> float:
    """Tokens that need not be computed there, less the requests in front of it. `row`: the daemon's answer for the engine.

    The daemon's engine stats are up to a second old, so our own count is used where it is higher.
    """
    own = min(row["l0"], row["best"])
    cached = (own + DAEMON_SHARE * (row["best"] - own)) * row["block_tokens"]
    load = row["load"] or {}
    return float(cached - REQUEST_TOKENS * max(engine.in_flight, load.get("running", 0) + load.get("waiting", 0)))


class Router:
    def __init__(
        self,
        engines: Iterable[Engine],
        daemon: str,
        daemon_token: str = "",
        tokenize_seconds: float = TOKENIZE_SECONDS,
        match_seconds: float = MATCH_SECONDS,
    ) -> None:
        self.engines = list(engines)
        self._tokenize_seconds, self._match_seconds = tokenize_seconds, match_seconds
        self.daemon = daemon
        self._daemon_headers = {"Authorization": f"Bearer {daemon_token}"} if daemon_token else {}
        self.guesses = 0  # requests placed without an answer of the daemon
        self._turns = itertools.count()
        self._session: ClientSession | None = None

    # ---- choosing -----------------------------------------------------------------------------

    async def order(self, body: dict[str, Any]) -> list[Engine]:
        """All engines, the best first."""
        worths: dict[str, float] = {}
        try:
            rows = await self._match(body, await self._tokens(body))
            worths = {engine.name: score(engine, rows[engine.name]) for engine in self.engines if engine.name in rows}
        except (ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
            self.guesses += 1
            log.info("no engine is known to have the prompt: %s: %s", type(error).__name__, error)
        turn, now = next(self._turns), time.monotonic()

        def rank(numbered: tuple[int, Engine]) -> tuple[Any, ...]:
            number, engine = numbered
            worth = worths.get(engine.name, -REQUEST_TOKENS * float(engine.in_flight))
            return engine.down_until > now, -worth, (number - turn) % len(self.engines)

        return [engine for _, engine in sorted(enumerate(self.engines), key=rank)]

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        """Of the prompt, or of the first of several. ValueError if there is none."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return prompt
        question = {name: body[name] for name in ("model", *CHAT_FIELDS) if name in body}
        if isinstance(prompt, str):
            question["prompt"] = prompt
        elif "messages" not in question:
            raise ValueError("a request without a prompt")
        engine = min(self.engines, key=lambda engine: (engine.down_until, engine.in_flight))
        tokens: list[int] = (await self._ask(engine.url + "/tokenize", question, self._tokenize_seconds))["tokens"]
        return tokens

    async def _match(self, body: dict[str, Any], tokens: list[int]) -> dict[str, dict[str, Any]]:
        """The daemon's answer for each engine it knows, by name."""
        question = {"model": body.get("model", ""), "tokens": tokens}
        found = await self._ask(self.daemon + "/kv/match", question, self._match_seconds, self._daemon_headers)
        return {row["instance_id"]: row for row in found["instances"]}

    async def _ask(
        self, url: str, question: dict[str, Any], seconds: float, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        assert self._session is not None
        async with self._session.post(
            url, json=question, headers=headers, timeout=ClientTimeout(total=seconds)
        ) as answer:
            if answer.status != 200:
                raise ValueError(f"{url} answers {answer.status}")
            found: dict[str, Any] = await answer.json()
            return found

    # ---- passing on ---------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": {"message": "the body is no JSON object", "code": 400}}, status=400)
        return await self._pass_on(request, raw, await self.order(body))

    async def anything(self, request: web.Request) -> web.StreamResponse:
        """What needs no choice, as /v1/models: the engine with the fewest requests answers."""
        now = time.monotonic()
        ready = sorted(self.engines, key=lambda engine: (engine.down_until > now, engine.in_flight))
        return await self._pass_on(request, await request.read(), ready)

    async def _pass_on(self, request: web.Request, raw: bytes, engines: list[Engine]) -> web.StreamResponse:
        """To the first engine that begins to answer. From then on it is that one's: nothing is sent twice to a user."""
        for engine in engines:
            engine.in_flight += 1
            try:
                answer = await self._begin(engine, request, raw)
                if answer is not None:
                    return await self._stream(engine, request, answer)
            finally:
                engine.in_flight -= 1
        return web.json_response({"error": {"message": "no engine answers", "code": 503}}, status=503)

    async def _begin(self, engine: Engine, request: web.Request, raw: bytes) -> ClientResponse | None:
        """Its answer as soon as that has a status; None if the engine is away."""
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ONE_HOP}
        try:
            answer = await self._session.request(
                request.method, engine.url + request.path_qs, data=raw, headers=headers
            )
        except ClientConnectionError as error:
            engine.down_until = time.monotonic() + DOWN_SECONDS
            log.warning("engine %s does not answer: %s", engine.name, error)
            return None
        engine.down_until = 0.0
        engine.sent += 1
        return answer

    async def _stream(self, engine: Engine, request: web.Request, answer: ClientResponse) -> web.StreamResponse:
        async with answer:
            headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in ONE_HOP]
            stream = web.StreamResponse(status=answer.status, headers=[*headers, ("x-kvserver-engine", engine.name)])
            await stream.prepare(request)
            async for piece in answer.content.iter_any():
                await stream.write(piece)
            await stream.write_eof()
            return stream

    # ---- start and end ------------------------------------------------------------------------

    async def status(self, request: web.Request) -> web.Response:
        rows = [vars(engine) | {"down": engine.down_until > time.monotonic()} for engine in self.engines]
        return web.json_response({"engines": rows, "guesses": self.guesses})

    async def _connections(self, app: web.Application) -> AsyncIterator[None]:
        waits = ClientTimeout(total=None, sock_connect=2.0)  # an answer may take its time, a connection not
        plain = {"Accept-Encoding": "identity"}  # unless the user wants more: answers pass through as they are
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=waits, headers=plain, auto_decompress=False
        ) as self._session:
            yield

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.cleanup_ctx.append(self._connections)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_get("/router", self.status)
        app.router.add_route("*", "/{path:.*}", self.anything)
        return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", required=True, metavar="ENGINE_ID=URL")
    parser.add_argument("--daemon", default="http://127.0.0.1:8080", help="kvserver's status pages")
    parser.add_argument(
        "--daemon-token-file",
        default=os.environ.get("KVSERVER_HTTP_TOKEN_FILE", ""),
        metavar="FILE",
        help="the daemon's --http-token-file, if it has one (or KVSERVER_HTTP_TOKEN_FILE)",
    )
    parser.add_argument(
        "--tokenize-seconds", type=float, default=TOKENIZE_SECONDS, help="how long an engine may take to tokenize"
    )
    parser.add_argument(
        "--match-seconds", type=float, default=MATCH_SECONDS, help="how long the daemon may take to answer"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    engines = []
    for text in arguments.engine:
        name, _, url = text.partition("=")
        if not url.startswith("http"):
            parser.error(f"--engine {text}: write ENGINE_ID=http://host:port")
        engines.append(Engine(name, url.rstrip("/")))
    token = Path(arguments.daemon_token_file).read_text().strip() if arguments.daemon_token_file else ""
    patience = arguments.tokenize_seconds, arguments.match_seconds
    router = Router(engines, arguments.daemon.rstrip("/"), token, *patience)
    web.run_app(router.app(), host=arguments.host, port=arguments.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
