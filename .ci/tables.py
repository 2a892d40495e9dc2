"""Write the tables of settings into the README files, or with --check only print which ones differ.

The settings of the vLLM adapter are read from their module alone, so that this needs no vLLM.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from kvserver.adapters.common.settings import PREFIX
from kvserver.config import Settings
from kvserver.config.sources import flag, markdown_table

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- settings of {}: `make docs` writes this -->\n"
END = "<!-- end of settings -->"


def adapter_table() -> str:
    name = "adapter_settings"
    spec = importlib.util.spec_from_file_location(name, ROOT / "adapters/vllm/settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its annotations are looked up
    spec.loader.exec_module(module)
    return markdown_table(module.AdapterSettings, "key", lambda field: PREFIX + field)


TABLES = {
    "kvserver/config/README.md": ("kvserver/config/settings.py", lambda: markdown_table(Settings, "flag", flag)),
    "adapters/README.md": ("adapters/vllm/settings.py", adapter_table),
}


def main() -> int:
    stale = []
    for page, (source, table) in TABLES.items():
        path = ROOT / page
        text = path.read_text()
        before, begin, rest = text.partition(BEGIN.format(source))
        old, end, after = rest.partition(END)
        assert end, f"{page} has no markers for the settings of {source}"
        if old != table():
            stale.append(page)
            if "--check" not in sys.argv:
                path.write_text(before + begin + table() + end + after)
    if stale and "--check" in sys.argv:
        print(f"{', '.join(stale)}: not what the code has; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
