"""README's table of models names the made-up models of the tests."""

from __future__ import annotations

import re
from pathlib import Path

from hybrids import HYBRIDS

README = Path(__file__).parents[2] / "README.md"
VARIANTS = {"long window"}  # of gpt-oss


def test_each_made_up_model_is_in_the_table_of_models_and_no_other():
    table = README.read_text().split("### Models\n")[1].split("\n## ")[0]
    schedulers = [row.split(" | ")[-1] for row in table.splitlines() if row.startswith("| ")]
    named = {name for cell in schedulers for name in re.findall(r"`([^`]+)`", cell)}
    assert named == set(HYBRIDS) - VARIANTS
