"""`kvserver serve` with a fault of its own: its program's arguments are the name of a method, and what it does instead, `raise` or `hang`."""

import sys
import time
from typing import NoReturn
from unittest import mock

from kvserver.__main__ import main


def fail(*_: object) -> NoReturn:
    raise AssertionError("a fault that a test made")


def hang(*_: object) -> None:
    time.sleep(3600)


if __name__ == "__main__":
    method, instead = sys.argv.pop(1), sys.argv.pop(1)
    with mock.patch(method, {"raise": fail, "hang": hang}[instead]):
        sys.exit(main())
