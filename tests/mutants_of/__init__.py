"""Deliberate faults in a copy of the code, by what each would do: wrong KV, stalls, death of the daemon or an engine.

Owns: which tables there are. Refuses to know: how a mutant is run (`mutants.py`).
"""

from __future__ import annotations

from mutants_of import death, stalls, wrong_kv

MUTANTS = wrong_kv.MUTANTS + stalls.MUTANTS + death.MUTANTS
