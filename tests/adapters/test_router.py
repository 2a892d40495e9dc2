"""The example router of deploy/router, between engines and a daemon that are made up here.

It needs what vLLM's environment has (aiohttp), so it is tested there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

FILE = Path(__file__).parent.parent.parent / "deploy/router/router.py"


@pytest.fixture(scope="module")
def router() -> Any:
    spec = importlib.util.spec_from_file_location("example_router", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["example_router"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """Answers with three pieces once it may; `asked` has the bodies."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tokenized: list[Any] = []
        self.headers: list[Any] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.breaks = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        if self.breaks == "before":
            assert request.transport is not None
            request.transport.close()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"one ")
        await self.goes_on.wait()
        if self.breaks == "amid":
            assert request.transport is not None
            request.transport.close()
        await answer.write(b"two ")
        await answer.write(b"three")
        await answer.write_eof()
        return answer

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(await request.json())
        return web.json_response({"tokens": [7, 8, 9]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/tokenize", self.tokenize)
        return app


class KV:
    """A daemon's /kv/match."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.rows: Any = []
        self.token = ""  # that it wants

    async def match(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "token_required"}, status=401)
        return web.json_response({"instances": self.rows})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/kv/match", self.match)
        return app


class Scene:
    """Two engines, "one" and "two", a daemon and the router, with a client in front."""

    def __init__(self, engines: list[Engine], kv: KV, client: aiohttp.ClientSession, router: Any) -> None:
        self.one, self.two = engines
        self.kv = kv
        self.client = client
        self.router = router

    async def complete(self, prompt: Any = (1, 2, 3), **more: Any) -> str:
        """Which engine answered."""
        async with self.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **more}) as answer:
            assert (answer.status, await answer.text()) == (200, "one two three")
            return answer.headers["x-kvserver-engine"]


def row(name: str, l0: int = 0, best: int = 0, running: int = 0, **more: Any) -> dict[str, Any]:
    load = {"running": running, "waiting": 0}
    return {"instance_id": name, "l0": l0, "l1": best, "l2": 0, "best": best, "block_tokens": 16, "load": load, **more}


@contextlib.asynccontextmanager
async def stage(module: Any, *daemon_token: str) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        engines, kv = [Engine(), Engine()], KV()
        urls = []
        for app in (*(engine.app() for engine in engines), kv.app()):
            server = await stack.enter_async_context(TestServer(app))
            urls.append(str(server.make_url("")).rstrip("/"))
        router = module.Router([module.Engine("one", urls[0]), module.Engine("two", urls[1])], urls[2], *daemon_token)
        front = await stack.enter_async_context(TestServer(router.app()))
        client = await stack.enter_async_context(aiohttp.ClientSession(front.make_url("")))
        yield Scene(engines, kv, client, router)


@pytest.fixture
def play(router: Any) -> Callable[[Callable[[Scene], Awaitable[None]]], None]:
    """Run it with a scene of its own, for half a minute at most."""

    def run(act: Callable[[Scene], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with stage(router) as scene:
                await act(scene)

        asyncio.run(asyncio.wait_for(whole(), 30))

    return run


def test_load_outweighs_a_short_match_and_not_a_long_one(play):
    async def act(scene):
        scene.kv.rows = [row("one", 4, 4, running=1), row("two")]
        assert await scene.complete() == "two"
        scene.kv.rows = [row("one", 40, 40, running=1), row("two")]
        assert await scene.complete() == "one"

    play(act)


def test_text_and_chats_are_tokenized_by_an_engine(play):
    async def act(scene):
        await scene.complete("some text", max_tokens=3)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [], "temperature": 0}
        async with scene.client.post("/v1/chat/completions", json=chat) as answer:
            assert await answer.text() == "one two three"
        asked = scene.one.tokenized + scene.two.tokenized
        assert {"model": "tiny", "prompt": "some text"} in asked
        assert {"model": "tiny", "messages": chat["messages"], "tools": []} in asked
        assert [question["tokens"] for question in scene.kv.asked] == [[7, 8, 9]] * 2
        assert scene.one.asked + scene.two.asked == [
            {"model": "tiny", "prompt": "some text", "max_tokens": 3},
            chat,
        ] or scene.one.asked + scene.two.asked == [chat, {"model": "tiny", "prompt": "some text", "max_tokens": 3}]

    play(act)


def test_answers_stream_through(play):
    async def act(scene):
        scene.kv.rows = [row("one", 9, 9), row("two")]
        scene.one.goes_on.clear()
        headers = {"authorization": "Bearer x"}
        async with scene.client.post("/v1/completions", json={"prompt": [1]}, headers=headers) as answer:
            assert await answer.content.readany() == b"one "
            assert answer.headers["content-type"] == "text/event-stream"
            scene.one.goes_on.set()
            assert await answer.content.read() == b"two three"
        assert scene.one.headers[0]["authorization"] == "Bearer x"

    play(act)


def test_another_engine_is_asked_if_one_breaks_before_it_answered(play):
    async def act(scene):
        scene.kv.rows = [row("one", 9, 9), row("two")]
        scene.one.breaks = "before"
        assert await scene.complete() == "two"
        assert (len(scene.one.asked), len(scene.two.asked)) == (1, 1)

    play(act)


def test_an_answer_that_breaks_amid_is_not_begun_anew(play):
    async def act(scene):
        scene.kv.rows = [row("one", 9, 9), row("two")]
        scene.one.breaks = "amid"
        with pytest.raises(aiohttp.ClientPayloadError):
            await scene.complete()
        assert scene.two.asked == []

    play(act)


@pytest.mark.parametrize("token", ["", "correct-horse-battery"])
def test_the_token_of_the_daemon_is_shown_to_it_and_to_no_other(router: Any, token: str) -> None:
    async def act() -> None:
        async with stage(router, token) as scene:
            scene.kv.rows, scene.kv.token = [row("two", l0=10, best=10)], "correct-horse-battery"
            found = [await scene.complete() for _ in range(4)]
            assert scene.router.guesses == (0 if token else 4)
            assert not token or found == ["two"] * 4
            assert not [headers for headers in (*scene.one.headers, *scene.two.headers) if "Authorization" in headers]

    asyncio.run(asyncio.wait_for(act(), 30))
