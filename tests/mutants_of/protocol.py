"""Mutants of `kvserver/protocol`."""

from __future__ import annotations

from support.mutation import Mutant

CLIENT = "kvserver/protocol/client.py"
FORKED = "issues/test_a_forked_child_hid_its_parents_death.py"
DYING = "issues/adapters/test_a_dying_daemons_writes_were_over_at_its_end_of_file.py"

MUTANTS = (
    Mutant(
        "a forked child keeps the lifeline",
        CLIENT, "_close_in_child", "attachment.close()", "pass", (f"{FORKED}::test_a_child_has_no_lifeline",),
    ),
    Mutant(
        "the end of a connection is the end of the process",
        CLIENT, "Attachment.wait_for_death", "poller.poll()", "pass", (DYING,),
    ),
    Mutant(
        "an answer is awaited from a server that has ended",
        CLIENT, "WatchedClient._wait", "not self.alive()", "False",
        ("issues/adapters/test_a_half_waited_for_the_answer_of_a_daemon_that_had_ended.py",),
    ),
)  # fmt: skip
