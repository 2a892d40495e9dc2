"""A real server of S3's protocol for a test, with one bucket, on a port that it keeps while it is down; what it had is then lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import boto3
import botocore.config
import botocore.exceptions
import pytest

from support.ports import reserved_port
from support.server_process import ServerProcess
from support.store_process import S3_CREDENTIALS as CREDENTIALS

BUCKET = "bucket"
_START_SECONDS = 60.0


class S3Server(ServerProcess):
    """REQUIRES: the process has CREDENTIALS in its environment. `conditions`: whether it knows If-None-Match, as not all stores do."""

    def __init__(self, conditions: Literal["known", "refused", "ignored"] = "known") -> None:
        self._program = ["-m", "moto.server" if conditions == "known" else "support.s3_without_conditions"]
        self._environment = {**os.environ, "CONDITIONS": conditions}
        self._reservation, self.port = reserved_port()
        once = botocore.config.Config(retries={"max_attempts": 0}, connect_timeout=60, read_timeout=60)
        self._client: Any = boto3.client("s3", endpoint_url=self.endpoint, config=once)
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_of(self, prefix: str, *parameters: str) -> str:
        return f"s3://{BUCKET}/{prefix}?" + "&".join([f"endpoint={self.endpoint}", "region=us-east-1", *parameters])

    def start(self) -> None:
        command = [sys.executable, *self._program, "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
            env=self._environment,
        )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(botocore.exceptions.ConnectionError):
                self._client.create_bucket(Bucket=BUCKET)
                return
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)

    def objects(self) -> list[str]:
        """Names of records."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return sorted(name for name in names if "/generations/" not in name)

    def uploads(self) -> list[str]:
        """Names of uploads that are neither complete nor aborted."""
        found = self._client.list_multipart_uploads(Bucket=BUCKET)
        return [each["Key"] for each in found.get("Uploads", [])]

    def read(self, where: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=where)["Body"].read()
        return found

    def modified(self, where: str) -> datetime:
        found: datetime = self._client.head_object(Bucket=BUCKET, Key=where)["LastModified"]
        return found

    def write(self, where: str, value: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=where, Body=value)

    def remove(self, where: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=where)

    def close(self) -> None:
        self.kill()
        self._client.close()
        self._reservation.close()


def one_server() -> Iterator[S3Server]:
    """For a fixture: a server, with CREDENTIALS in the environment while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)
        server = S3Server()
        try:
            yield server
        finally:
            server.close()
