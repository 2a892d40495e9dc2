"""Grafana's published schema of dashboards: the annotated classes of its Foundation SDK, by which a dashboard's JSON is checked.

The SDK's own reader takes what it knows and leaves the rest, and checks no types.
"""

from __future__ import annotations

import enum
import importlib
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.models import dashboard, prometheus

Misfit = tuple[str, str]  # where, and what is wrong
# The SDK names a field that is a word of Python, or of its own, with this end; other names differ by underscores only.
_END = "_val"


def misfits(found: dict[str, Any]) -> list[Misfit]:
    """Of a whole dashboard."""
    return [*_object(found, dashboard.Dashboard, "", {"panels"}), *_panels(found["panels"], "panels")]


def _panels(found: list[dict[str, Any]], path: str) -> Iterator[Misfit]:
    for number, panel in enumerate(found):
        here = f"{path}.{number}"
        if panel["type"] == "row":
            yield from _object(panel, dashboard.RowPanel, here, {"panels"})
            yield from _panels(panel["panels"], f"{here}.panels")
            continue
        # What a panel is made of depends on its kind, each of which has a module.
        kind = importlib.import_module(f"grafana_foundation_sdk.models.{panel['type']}")
        yield from _object(panel, dashboard.Panel, here, {"options", "targets"})
        yield from _object(panel["options"], kind.Options, f"{here}.options")
        if (custom := panel["fieldConfig"]["defaults"].get("custom")) is not None:
            yield from _object(custom, kind.FieldConfig, f"{here}.custom")
        for target in panel["targets"]:
            yield from _object(target, prometheus.Dataquery, f"{here}.targets")


def _object(found: dict[str, Any], cls: type, path: str, elsewhere: set[str] = frozenset()) -> Iterator[Misfit]:  # type: ignore[assignment]
    fields = {_json_name(name): kind for name, kind in typing.get_type_hints(cls).items()}
    for name, value in found.items():
        if name not in fields:
            yield f"{path}.{name}", f"{cls.__name__} has no such field"
        elif name not in elsewhere:
            yield from _value(value, fields[name], f"{path}.{name}")


def _json_name(name: str) -> str:
    first, *rest = name.removesuffix(_END).split("_")
    return first + "".join(word.capitalize() for word in rest)


def _value(found: Any, kind: Any, path: str) -> Iterator[Misfit]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return
    if origin in (typing.Union, types.UnionType):
        tried = [list(_value(found, one, path)) for one in arguments if one is not type(None) or found is None]
        if all(tried):
            yield from min(tried, key=len)
    elif origin is list:
        if not isinstance(found, list):
            yield path, "no list"
            return
        for number, item in enumerate(found):
            yield from _value(item, arguments[0], f"{path}.{number}")
    elif origin is dict:
        if not isinstance(found, dict):
            yield path, "no object"
            return
        for name, item in found.items():
            yield from _value(item, arguments[1], f"{path}.{name}")
    elif origin is typing.Literal:
        if found not in arguments:
            yield path, f"none of {arguments}"
    elif issubclass(kind, enum.Enum):
        if found not in [member.value for member in kind]:
            yield path, f"{found!r} is no {kind.__name__}"
    elif kind in (str, int, float, bool, type(None)):
        if not isinstance(found, (int, float) if kind is float else kind) or (
            isinstance(found, bool) and kind is not bool
        ):
            yield path, f"{found!r} is no {kind.__name__}"
    elif not isinstance(found, dict):
        yield path, f"no {kind.__name__}"
    else:
        yield from _object(found, kind, path)
