"""Mutants of `kvserver/config`."""

from __future__ import annotations

from support.mutation import Mutant

CAPACITY = "kvserver/config/capacity.py"
SOCKET_FILES = "kvserver/config/socket_files.py"
PATHS = "issues/test_paths_once_bound_were_trusted_for_ever.py"
SHOWN_PASSWORDS = "issues/test_config_showed_passwords_of_storage.py"
DESCRIPTORS = "kvserver/config/descriptors.py"
LISTEN_GATE = "kvserver/config/listen_gate.py"
GATE_TESTS = ("unit/config/test_listen_gate.py",)
OUT_OF_DESCRIPTORS = "issues/test_a_daemon_without_descriptors_was_aborted.py"


MUTANTS = (
    # ---- capacity.py --------------------------------------------------------------------------------
    Mutant(
        "a container's limit need not hold what the index needs",
        CAPACITY, "bytes_beside_l1", "+ l1_bytes * _INDEXED_BYTES // _OBJECT_BYTES", "",
        ("unit/cli/test_checks.py", "daemon/test_kubernetes.py"),
    ),
    # ---- descriptors.py -----------------------------------------------------------------------------
    Mutant(
        "descriptors count as free while the highest number is",
        DESCRIPTORS, "has_free_descriptors", "return limit - used >= wanted", "return True", (OUT_OF_DESCRIPTORS,),
    ),
    # ---- listen_gate.py -----------------------------------------------------------------------------
    Mutant(
        "libzmq accepts without a look at free descriptors",
        LISTEN_GATE, "ListenGate._serve", "if not has_free_descriptors(FOR_ENGINES):", "if False:", (OUT_OF_DESCRIPTORS,),
    ),
    Mutant(
        "a listener is armed for every connection from then on",
        LISTEN_GATE, "ListenGate._arm", "events | select.EPOLLONESHOT", "events", GATE_TESTS,
    ),
    Mutant(
        "a listener is armed before its first client",
        LISTEN_GATE, "ListenGate._gate", "self._arm(listener, 0)", "self._arm(listener, select.EPOLLIN)", GATE_TESTS,
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
        "kvserver/config/sources.py", "_bad", "_shown(name, values[name])", "values[name]", (SHOWN_PASSWORDS,),
    ),
    # ---- stderr.py ----------------------------------------------------------------------------------
    Mutant(
        "the last line before an abort is lost",
        "kvserver/config/stderr.py", "library_lines_logged", "copy_last_words(read.fileno(), former.fileno())", "pass",
        ("issues/test_lines_of_libraries_were_no_records_of_the_log.py::test_the_last_line_before_a_fatal_signal_is_written",),
    ),
    # ---- urls.py ------------------------------------------------------------------------------------
    Mutant(
        "a password with an @ is shown from there on",
        "kvserver/config/urls.py", "without_user", "{scheme}//{rest.rpartition('@')[2]}", "{scheme}//{rest.partition('@')[2]}",
        (SHOWN_PASSWORDS,),
    ),
    # ---- socket_files.py ----------------------------------------------------------------------------
    Mutant(
        "a daemon's end removes another daemon's socket",
        SOCKET_FILES, "SocketFile.remove", "if self.is_ours:", "if True:",
        (f"{PATHS}::test_only_the_file_that_was_made_is_removed",),
    ),
    Mutant(
        "a socket that another process serves is replaced",
        SOCKET_FILES, "SocketFile._remove_dead", 'raise OSError(errno.EADDRINUSE, "another process serves it", self.path)',
        "os.unlink(self.path)",
        (f"{PATHS}::test_a_socket_that_another_program_serves_is_never_replaced",),
    ),
)  # fmt: skip
