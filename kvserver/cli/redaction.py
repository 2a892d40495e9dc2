"""Redaction: removes from a text secrets, users' names in paths, and token ids.

Secrets are found by their value and by the form in which they are written. Values are those of a token file, of passwords in
URLs, and of variables whose name suggests a secret. A user's part of a path is found by the places of homes and by this machine's
user names.

Owns: the rules. Refuses to know: where a text comes from.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvserver.config import forms_of, passwords_in

SECRET, USER, NUMBERS = "(secret)", "(user)", "(numbers)"
_SHORTEST = 4  # a shorter secret is in too many other words
_NAMES = (
    r"[\w.-]{0,64}(?:passw(?:or)?d|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|credential)[\w.-]{0,64}"
    r"|[\w.-]{0,64}[_.-]token|token|authorization"
)
_NAME = re.compile(_NAMES, re.IGNORECASE)
_NAMES_OF_VARIABLES = re.compile(r"PASS|SECRET|TOKEN|CREDENTIAL|HEADERS|(?:API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
_FILES = re.compile(r"_(?:FILE|PATH|DIR)$", re.IGNORECASE)  # a variable that names a file has no secret
_RULES = (
    (re.compile(r"([?&][\w.-]{0,64}(?:pass|secret|token|key|sig|credential)[\w.-]{0,64}=)[^&#\s\"']+", re.IGNORECASE), rf"\1{SECRET}"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1 {SECRET}"),
    (re.compile(rf"(\b(?:{_NAMES})[\"']?\s*[:=]\s*)(?!\(secret\))(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;{{}}\[\]\"']+)", re.IGNORECASE), rf'\1"{SECRET}"'),
    (re.compile(r"(--[\w-]*(?:password|secret|token|key)\s+)(?!-)\S+"), rf"\1{SECRET}"),
    (re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|eyJ[\w-]+\.[\w-]+\.[\w-]*)"), SECRET),
    (re.compile(r"(\b\w*token_ids[\"']?\s*[:=]\s*)[\[(][^\])]*[\])]"), rf'\1"{NUMBERS}"'),
    (re.compile(r"(/(?:home|Users|export/home|usr/home)/)[^/\s\"':,;)\]]+"), rf"\1{USER}"),
    (re.compile(r"(/run/user/|/tmp/[\w.-]+-)\d+\b"), rf"\1{USER}"),
)  # fmt: skip
_WORD, _USER_BEGINS = re.compile(r"\S+"), re.compile(r"(?<!file:)(?<!ipc:)//")
_OF_LOGS = (
    (re.compile(r"([\[(])\s*\d+(?:\s*,\s*\d+){3,}(?:\s*,)?(?:\s*(?:\.\.\.))?\s*([\])]|$)", re.MULTILINE), rf"\1{NUMBERS}\2"),
    (re.compile(r"\bb(['\"])(?:\\.|(?!\1).){16,}(?:\1|$)", re.MULTILINE), "b'(bytes)'"),
)  # fmt: skip


class Redactor:
    """Redactor of one machine's texts. `secrets`: values to remove. `homes` and `users`: beside those of the machine's list of users."""

    def __init__(self, secrets: Iterable[str] = (), homes: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        known = {one for secret in secrets for one in forms_of(secret) if len(one) >= _SHORTEST}
        self._secrets = sorted(known, key=len, reverse=True)  # the longest first: one may be in another
        people = [one for one in pwd.getpwall() if 1000 <= one.pw_uid < 65_534]
        self._homes = sorted(
            {*homes, *(one.pw_dir for one in people)} - {"", "/", "/root", "/nonexistent"}, key=len, reverse=True
        )
        names = {*users, *(one.pw_name for one in people)} - {"", "root"}
        self._users = (
            re.compile(rf"(?<=/)(?:{'|'.join(map(re.escape, sorted(names)))})(?=[/\s\"':,;)\]]|$)") if names else None
        )

    def text(self, text: str, log: bool = False) -> str:
        """`log`: lists of numbers are left out, too: elsewhere they are counts."""
        for secret in self._secrets:
            text = text.replace(secret, SECRET)
        for home in self._homes:
            text = text.replace(home, "~")
        text = _WORD.sub(_without_user, text)
        for rule, shown in (*_RULES, *(_OF_LOGS if log else ())):
            text = rule.sub(shown, text)
        return self._users.sub(USER, text) if self._users is not None else text

    def json(self, value: Any) -> Any:
        """The same of each text in it; values of names that name a secret or token ids are left out."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {self.text(name): self._named(name, one) for name, one in value.items()}

    def _named(self, name: str, value: Any) -> Any:
        if "token_ids" in name:
            return NUMBERS
        return SECRET if isinstance(value, str) and _NAME.fullmatch(name) else self.json(value)


def _without_user(word: re.Match[str]) -> str:
    """The word without what is between its first `//` and its last `@`: a password may have any other character."""
    begins, last = _USER_BEGINS.search(word[0]), word[0].rfind("@")
    return word[0] if begins is None or last < begins.end() else word[0][: begins.end()] + word[0][last + 1 :]


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Values of variables whose name names a secret, and the user's parts of URLs."""
    found = {value for name, value in environ.items() if _NAMES_OF_VARIABLES.search(name) and not _FILES.search(name)}
    return found | {part for value in environ.values() for part in passwords_in(value)}
