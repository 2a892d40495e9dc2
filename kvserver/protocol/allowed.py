"""Values that a setting may have, in words for the operator who gave another one.

Owns: those words, for the fields of a msgspec struct. Refuses to know: flags, variables and keys.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

_FIELD = re.compile(r" - at `\$\.(\w+)")


def failed_field(error: msgspec.ValidationError) -> str:
    """The field that a conversion failed at; "" if it names none."""
    match = _FIELD.search(str(error))
    return match[1] if match else ""


def choices_of(of: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The accepted values of settings with a fixed list of values, by field name."""
    return {name: get_args(hint) for name, hint in get_type_hints(of).items() if get_origin(hint) is Literal}


def allowed_values(of: type[msgspec.Struct], name: str) -> str:
    """Allowed values of a field in words: "a whole number from 0 to 65535"."""
    if fixed := choices_of(of).get(name):
        return f"one of {', '.join(fixed)}"
    field = get_type_hints(of, include_extras=True)[name]
    examples = [one for meta in get_args(field)[1:] for one in getattr(meta, "examples", None) or ()]
    if examples:
        return f"one of {', '.join(examples)}"
    kind = inspect.type_info(field)
    match kind.type if isinstance(kind, inspect.Metadata) else kind:
        case inspect.IntType(gt=gt, ge=ge, le=le):
            return f"a whole number{_bounds(gt, ge, le)}"
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            return f"a number{_bounds(gt, ge, le)}"
        case inspect.StrType(pattern=str(pattern)):
            return f"text of the form {pattern}"
        case inspect.StrType(max_length=int(most)):
            return f"text of at most {most} characters"
        case inspect.StrType():
            return "text in quotes"
        case inspect.BoolType():
            return "true or false"
        case _:
            return "a list of texts in quotes"


def _bounds(gt: float | None, ge: float | None, le: float | None) -> str:
    if ge is not None:
        return f" from {_plain(ge)} to {_plain(le)}" if le is not None else f" of at least {_plain(ge)}"
    above = f" above {_plain(gt)}" if gt is not None else ""
    return f"{above} and at most {_plain(le)}" if le is not None else above


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
