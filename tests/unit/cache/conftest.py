"""The cache that several files of this folder use."""

from __future__ import annotations

import pytest

from kvserver.cache import Cache
from unit.cache.small_cache import make_cache


@pytest.fixture
def cache() -> Cache:
    return make_cache(10)
