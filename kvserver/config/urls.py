"""URLs with a user and a password: how they are shown, and which are refused.

Owns: the rule that nothing between `//` and the last `@` of a URL is shown. Refuses to know: what a URL names.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, quote, unquote, urlsplit

_LOCAL = ("file:///", "ipc://")  # paths: an @ there ends no password
_NEXT_URL = re.compile(r"\s+(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_SHOWN_AS = "(secret)"


def without_user(text: str, is_url: bool = False) -> str:
    """One URL without user and password, and without values of parameters that have an encoded @.

    A text without `//` is shown as it is, unless it should be a URL.
    """
    if text.startswith(_LOCAL) or not ("//" in text or is_url):
        return text
    scheme, rest = _split_scheme(text) if is_url else text.partition("//")[::2]
    shown = f"{scheme}//{rest.rpartition('@')[2]}" if scheme or not is_url else rest.rpartition("@")[2]
    return re.sub(r"=[^&\s]*%40[^&\s]*", f"={_SHOWN_AS}", shown, flags=re.IGNORECASE)


def _split_scheme(url: str) -> tuple[str, str]:
    """(scheme with its colon, text behind the first `//`); ("", url) if the URL has no such form."""
    match = re.match(r"([a-z][a-z0-9+.-]*:)//", url, re.IGNORECASE)
    return (match[1], url[match.end() :]) if match else ("", url)


def urls_in(text: str) -> list[str]:
    """The URLs in a text. Each reaches to the next one: its password may have spaces."""
    return _NEXT_URL.split(text.strip()) if text.strip() else []


def split_url(url: str) -> SplitResult:
    """The parts. ValueError, which names none of them, where a password might be cut in two or the port is no number."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = None
    rest = _split_scheme(url)[1]
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if re.search(r"\s", rest.rpartition("@")[0]) or (not url.startswith(_LOCAL) and "@" in rest[len(place) :]):
        raise ValueError(
            "write each /, ?, #, @ and space of a user, a password or a parameter as %2F, %3F, %23, %40 and %20"
        )
    if parts is None:
        raise ValueError("it is no URL, or its port is no number from 0 to 65535")
    return parts


def passwords_in(text: str) -> set[str]:
    """Passwords of the URLs in a text, as they are written and decoded. A password reaches to the last @ before the next URL."""
    found = set()
    for one in re.split(r"[a-z][a-z0-9+.-]*://", text, flags=re.IGNORECASE)[1:]:
        user = one.rpartition("@")[0]
        if not user or user.startswith("/"):
            continue
        name, _, password = user.partition(":")
        found |= {password} if password else {user} if re.search(r"[/?#]", name) else set()
    return found


def forms_of(secret: str) -> set[str]:
    """A secret as it is, decoded, and encoded for a URL, for JSON and as Python shows it."""
    plain = {secret, unquote(secret)}
    encoded = {quote(one, safe="") for one in plain} | {quote(one) for one in plain}
    return (
        plain
        | encoded
        | {one.encode("unicode_escape").decode().replace('"', '\\"') for one in plain}
        | {repr(one)[1:-1] for one in plain}
    )
