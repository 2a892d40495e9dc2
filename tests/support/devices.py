"""Which devices a module's cases run on."""

from __future__ import annotations

import pytest

# Engines in CPU memory, and engines on a simulated GPU: the same cases, by the fixture `device`.
on_each_device = pytest.mark.parametrize("device", ["cpu", "gpu"], indirect=True, scope="module")
