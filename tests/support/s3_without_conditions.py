"""moto's server as a store of S3's protocol that does not know If-None-Match: by CONDITIONS it answers 501 NotImplemented, or ignores
the header, as such stores do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import moto.server

_ANSWER = (
    b"<?xml version='1.0'?><Error><Code>NotImplemented</Code><Message>A header is not implemented</Message></Error>"
)


def without_conditions(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environment["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environment:
            if os.environ["CONDITIONS"] == "ignored":
                del environment["HTTP_IF_NONE_MATCH"]
                return application(environment, start)
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start("501 Not Implemented", [("Content-Type", "application/xml"), ("Content-Length", str(len(_ANSWER)))])
            return [_ANSWER]
        return application(environment, start)

    return answer


if __name__ == "__main__":
    run = moto.server.run_simple
    moto.server.run_simple = lambda host, port, application, **options: run(
        host, port, without_conditions(application), **options
    )
    moto.server.main()
