"""The sources of settings: defaults, a TOML file, `KVSERVER_*` and the command line; later ones win.

Owns: reading and checking values, the source of each value, and the tables of settings. Refuses to know: what single
settings mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvserver.config.names import flag, nearest, variable
from kvserver.config.otlp import ENDPOINT_VARIABLE, endpoint_of_sdk, parse_otlp_endpoint
from kvserver.config.settings import (
    MIN_L1_BYTES,
    REMOVED,
    KiB,
    Settings,
    check_placeholders,
    parse_events_endpoint,
    parse_gpus,
    parse_size,
)
from kvserver.config.shares import parse_shares
from kvserver.config.tiers import parse_tiers
from kvserver.config.urls import urls_in, without_user
from kvserver.protocol import ConfigError, allowed_values, choices_of, default_endpoint, failed_field

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Source:
    """Source of one value: `kind` is default, file, environment or flag; `name` is the key there."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


DEFAULT = Source("default")


@dataclass(frozen=True)
class Configuration:
    """Settings of one daemon and the source of each value."""

    settings: Settings
    sources: dict[str, Source]  # of the values that are not defaults

    def table(self) -> dict[str, dict[str, Any]]:
        """Every setting by name, as `/config` shows it: URLs without user and password."""
        texts, defaults = descriptions(), _defaults()
        return {
            name: {
                "value": _shown(name, getattr(self.settings, name)),
                "default": default,
                "source": self.sources.get(name, DEFAULT).kind,
                "source_name": self.sources.get(name, DEFAULT).name,
                "flag": flag(name),
                "description": texts[name],
            }
            for name, default in defaults.items()
        }


def _defaults() -> dict[str, Any]:
    fields = msgspec.structs.fields(Settings)
    return {field.name: field.default for field in fields} | {"endpoint": default_endpoint()}


def field_types() -> dict[str, type]:
    """The plain type of every setting, by field name."""
    types: dict[str, type] = {}
    for name, hint in get_type_hints(Settings).items():
        types[name] = str if get_origin(hint) is Literal else hint
    return types


def _repeatable() -> set[str]:
    """The settings with several values: flags that may be given again, words in the environment, lists in a file."""
    return {name for name, hint in field_types().items() if get_origin(hint) is tuple}


def descriptions(of: type[msgspec.Struct] = Settings) -> dict[str, str]:
    """The description of every setting, by field name."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(of, include_extras=True).items():
        metas = [m for m in get_args(hint)[1:] if isinstance(m, Meta)]
        found[name] = " ".join(m.description for m in metas if m.description)
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; unset flags stay out of the namespace."""
    parser.add_argument(
        "--config", metavar="FILE.toml", default=None, help="TOML file with the same keys as the flags."
    )
    for name in REMOVED:
        parser.add_argument(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    texts, repeatable = descriptions(), _repeatable()
    for field in msgspec.structs.fields(Settings):
        parser.add_argument(
            flag(field.name),
            dest=field.name,
            action="append" if field.name in repeatable else "store",
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=(
                texts[field.name] + (f" (default: {field.default})" if field.default not in ("", ()) else "")
            ).replace("%", "%%"),
        )


def read_configuration(arguments: dict[str, Any], environ: dict[str, str] | None = None) -> Configuration:
    """Merge defaults < TOML file < environment < `arguments`. ConfigError names flag, value and source."""
    environ = dict(os.environ) if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    given = [*_given(arguments, environ)]
    if not any(name == "otlp_endpoint" for name, _, _ in given):
        try:
            if of_sdk := endpoint_of_sdk(environ):
                values["otlp_endpoint"], sources["otlp_endpoint"] = of_sdk, Source("environment", ENDPOINT_VARIABLE)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    for name, value, source in given:
        if name in REMOVED:
            raise ConfigError(f"{source} is no setting any more: {REMOVED[name]}")
        several = name in _repeatable() and isinstance(value, str)
        values[name], sources[name] = (urls_in(value) if name in _URLS else value.split()) if several else value, source
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        name = failed_field(error)
        raise ConfigError(_bad(name, f"write {allowed_values(Settings, name)}", values, sources)) from None
    for name, check in _CHECKS.items():
        try:
            check(getattr(settings, name))
        except ValueError as error:
            raise ConfigError(_bad(name, str(error), values, sources)) from None
    if settings.kv_events_replay_endpoint and not settings.kv_events_endpoint:
        reason = "there is nothing to replay without --kv-events-endpoint"
        raise ConfigError(_bad("kv_events_replay_endpoint", reason, values, sources))
    if not settings.endpoint:
        settings = msgspec.structs.replace(settings, endpoint=default_endpoint())
        sources.pop("endpoint", None)
    return Configuration(settings, sources)


def _given(arguments: dict[str, Any], environ: dict[str, str]) -> Iterator[tuple[str, Any, Source]]:
    """All values that the user gave, those that win last. ConfigError if the file cannot be read."""
    known = [*field_types(), *REMOVED]
    if path := arguments.get("config"):
        for key, value in _read_toml(path, known).items():
            yield key.replace("-", "_"), value, Source("file", f"{path}: {key}")
    for name in known:
        if (text := environ.get(variable(name))) is not None:
            yield name, text, Source("environment", variable(name))
    for name, value in arguments.items():
        if name in known:
            yield name, value, Source("flag", flag(name))


def chosen_log_format(arguments: dict[str, Any]) -> str:
    """The form in which to report that read_configuration() failed."""
    without_file = {name: value for name, value in arguments.items() if name != "config"}
    for given in (arguments, without_file):
        with contextlib.suppress(ConfigError):
            return next(
                (value for name, value, _ in reversed([*_given(given, dict(os.environ))]) if name == "log_format"),
                "text",
            )
    raise AssertionError("only the file can fail")


_URLS = ("l2", "otlp_endpoint")  # with passwords, where the user gives one


def _check_l1_size(text: str) -> None:
    if text != "auto" and parse_size(text) < MIN_L1_BYTES:
        raise ValueError(f"L1 needs at least {MIN_L1_BYTES // KiB}KiB")


_CHECKS: dict[str, Callable[[Any], object]] = {  # checks that a type cannot express
    "kv_events_buffer": parse_size,
    "kv_events_endpoint": parse_events_endpoint,
    "kv_events_replay_endpoint": parse_events_endpoint,
    "kv_events_topic": lambda text: check_placeholders(text, "model", "form", "instance"),
    "kv_events_memory": parse_size,
    "kv_index_size": parse_size,
    "l1_size": _check_l1_size,
    "record_size": parse_size,
    "gpus": parse_gpus,
    "l2": parse_tiers,
    "share": parse_shares,
    "otlp_endpoint": parse_otlp_endpoint,
}


def _read_toml(path: str, names: list[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: the file is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    known = sorted(name.replace("_", "-") for name in names if name not in REMOVED)
    for key in table:
        if key.replace("-", "_") not in names:
            near = nearest(key, known)
            hint = f"do you mean {near}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"--config {path}: {key} is no setting; {hint}")
    return table


def _bad(name: str, reason: str, values: dict[str, Any], sources: dict[str, Source]) -> str:
    source, value = sources[name], _shown(name, values[name])
    origin = "" if source.kind == "flag" else f" (from {'--config' if source.kind == 'file' else 'the'} {source})"
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)  # as a file has it
    return f"bad setting: {flag(name)} {text}{origin}: {reason}"


def _shown(name: str, value: Any) -> Any:
    """Value as pages and the log show it."""
    if isinstance(value, (list, tuple)):
        return [_shown(name, one) for one in value]
    return without_user(value, name in _URLS) if isinstance(value, str) else value


def markdown_table(settings: type[msgspec.Struct], title: str, label: Callable[[str], str]) -> str:
    """The settings as a table for people."""
    texts, allowed = descriptions(settings), choices_of(settings)
    lines = [f"| {title} | default | what it does, what it costs |", "| --- | --- | --- |"]
    for field in msgspec.structs.fields(settings):
        text = texts[field.name]
        if len(allowed.get(field.name, ())) > 1:
            text += " One of " + ", ".join(f"`{value}`" for value in allowed[field.name]) + "."
        default = (
            ""
            if field.default == ()
            else str(field.default)
            if not isinstance(field.default, float)
            else f"{field.default:g}"
        )
        lines.append(f"| `{label(field.name)}` | {f'`{default}`' if default else ''} | {text} |")
    return "\n".join(lines) + "\n"
