"""Values of vLLM's configuration as texts: equal values have equal texts, in any process.

Owns: which fields of its objects count. Refuses to know: the form of a value (`common/canonical`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from kvserver.adapters.common.canonical import Forms
from kvserver.adapters.vllm.harmless import is_harmless


def counted_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all fields of a configuration object that are not harmless, declared or not.

    What a cached_property left in the object is made from the rest, and not in all of an engine's processes.
    """
    declared = {field.name for field in dataclasses.fields(config)}
    for name in sorted(declared | set(getattr(config, "__dict__", ()))):
        kept = isinstance(getattr(type(config), name, None), cached_property)
        if not is_harmless(config, name) and not kept and not name.startswith("__pydantic"):
            yield name, getattr(config, name, None)


FORMS = Forms("vllm", counted_fields)
canonical = FORMS.of
