"""Identity of an engine, in which engines that share KV agree.

Owns: the record, and how weights are named by their files. Refuses to know: which fields an engine has, and how the server hashes
all this into a namespace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvserver.adapters.common.canonical import Forms, Refused, digest
from kvserver.adapters.common.weights import NoWeights, file_digest, folder_digest
from kvserver.protocol import Counted

_LONGEST_VALUE = 100
LEARN_NAME = "kvserver.model_version or kvserver.weights_digest=whole would name them for other machines"


@dataclass
class EngineIdentity:
    """`counted`: field -> digest. `values`: some fields' values, for people. `private`: why KV is not shared, or "".
    `machine_only`: why it is shared on this machine only, or "".

    An engine is private if another start of it would have another identity, or would wrongly have the same one.
    """

    forms: ClassVar[Forms]
    shown: ClassVar[
        frozenset[str]
    ]  # fields whose values may be sent to the daemon: never an address, a path or a secret

    counted: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    private: str = ""
    machine_only: str = ""

    def add(self, name: str, value: Any) -> None:
        """Add the digest of a value; a value without one makes the engine private, with the name as the reason."""
        try:
            form = self.forms.of(value)
        except (Refused, RecursionError) as refusal:
            self.refuse(f"{name} cannot be compared: {refusal}")
            return
        self.counted[name] = digest(form)
        text = str(form)
        if name in self.shown and len(text) <= _LONGEST_VALUE:
            self.values[name] = text

    def refuse(self, reason: str) -> None:
        self.private = self.private or reason

    def fields(self) -> tuple[Counted, ...]:
        return tuple(Counted(name, found, self.values.get(name, "")) for name, found in sorted(self.counted.items()))


def files_of(model: str, commit: str | None, whole: bool) -> str:
    """A text that is the same for the same files of a model: by their content, or by the commit of a repository.

    NoWeights or OSError.
    """
    path = Path(model)
    if path.is_dir():
        return "folder:" + folder_digest(path, whole=whole)
    if path.is_file():
        return "file:" + file_digest(path, whole)
    if not commit:
        raise NoWeights("the commit of the model is not known")
    return f"commit:{model}@{commit}"
