"""Mutants of `kvserver/config`."""

from __future__ import annotations

from support.mutation import Mutant

CAPACITY = "kvserver/config/capacity.py"
SHOWN_PASSWORDS = "issues/test_config_showed_passwords_of_storage.py"

MUTANTS = (
    # ---- capacity.py --------------------------------------------------------------------------------
    Mutant(
        "a container's limit need not hold what the index needs",
        CAPACITY, "bytes_beside_l1", "+ l1_bytes * _INDEXED_BYTES // _OBJECT_BYTES", "",
        ("unit/cli/test_checks.py", "daemon/test_kubernetes.py"),
    ),
    # ---- shares.py ----------------------------------------------------------------------------------
    Mutant(
        "shares of more than all of L1 are taken",
        "kvserver/config/shares.py", "parse_shares", "> 1:", "> 2:", ("unit/config/test_config.py",),
    ),
    # ---- sources.py ---------------------------------------------------------------------------------
    Mutant(
        "/config shows the password of a tier",
        "kvserver/config/sources.py", "Configuration.table", "_shown(name, getattr(self.settings, name))",
        "getattr(self.settings, name)", (SHOWN_PASSWORDS,),
    ),
    Mutant(
        "a refused setting is logged with its password",
        "kvserver/config/sources.py", "_bad", "{_shown(name, values[name])!r}", "{values[name]!r}", (SHOWN_PASSWORDS,),
    ),
    # ---- urls.py ------------------------------------------------------------------------------------
    Mutant(
        "a password with an @ is shown from there on",
        "kvserver/config/urls.py", "without_user", "{scheme}//{rest.rpartition('@')[2]}", "{scheme}//{rest.partition('@')[2]}",
        (SHOWN_PASSWORDS,),
    ),
)  # fmt: skip
