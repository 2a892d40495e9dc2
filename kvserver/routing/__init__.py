"""Match of a prompt for routers: how much of it each engine finds in its own memory, in L1 and in L2."""

from kvserver.routing.match import MOST_BODY_BYTES, BadQuery, HashedPrompt, JsonQuery, MatchPages
from kvserver.routing.prefix_index import KVIndex, make_index
