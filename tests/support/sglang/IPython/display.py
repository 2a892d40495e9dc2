"""The two names that SGLang imports."""


class HTML: ...


def display(*things: object) -> None: ...
