"""The names of settings as flags and as variables, and the setting that a misspelt name may mean.

Owns: these names. Refuses to know: values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from kvserver.config.settings import REMOVED, Settings

_NAMES = Settings.__struct_fields__
_PREFIX = "KVSERVER_"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return _PREFIX + name.upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` may be a misspelling of; "" if there is none."""
    plain = {re.sub("[-_]", "", one).lower(): one for one in known}
    near = difflib.get_close_matches(re.sub("[-_]", "", name).lower(), plain, 1, 0.7)
    return plain[near[0]] if near else ""


def unknown_flags(words: Sequence[str]) -> str:
    """The fault of words of the command line that no flag takes. Values are left out: one may be a password."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        return "a value without a flag is on the command line"
    near = nearest(flags[0], _NAMES)
    return f"{flags[0]} is no setting; {f'do you mean {flag(near)}?' if near else 'kvserver serve --help lists all'}"


def misspelt_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables `KVSERVER_*` that are no setting, each with the one that it resembles.

    One that resembles none is left out: Kubernetes sets some for a Service whose name begins with kvserver, others are of scripts.
    """
    known = set(map(variable, (*_NAMES, *REMOVED)))
    found = {}
    for name in sorted(environ):
        if name.upper().startswith(_PREFIX) and name not in known and (near := nearest(name[len(_PREFIX) :], _NAMES)):
            found[name] = variable(near)
    return found
