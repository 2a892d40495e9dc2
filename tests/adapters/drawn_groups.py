"""Object groups of any kind, as Hypothesis draws them: blocks of 2 or 4 tokens, for chunks of 8."""

from __future__ import annotations

from hypothesis import strategies as st

from kvserver.protocol import ObjectGroup

GROUPS = st.builds(
    ObjectGroup,
    st.sampled_from(["full", "window", "window", "local", "state"]),
    st.just((0,)),
    st.sampled_from([2, 4]),
    tokens=st.integers(1, 40),
)
