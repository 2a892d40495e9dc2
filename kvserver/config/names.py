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


# What Kubernetes sets for each Service whose name begins with kvserver.
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables `KVSERVER_*` that are no setting, each with the variable that may be meant, or ""."""
    settings = (*_NAMES, *REMOVED)
    found = {}
    for name in sorted(environ):
        prefix, rest = name[: len(_PREFIX)], name[len(_PREFIX) :]
        if prefix.upper() == _PREFIX and name not in map(variable, settings) and not _OF_A_SERVICE.search(name):
            near = nearest(rest, _NAMES)
            found[name] = variable(near) if near else ""
    return found
