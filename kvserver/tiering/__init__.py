"""L2 as the loop uses it: what is written behind, read before a load, known of each tier, and published."""

from kvserver.tiering.ages import Ages
from kvserver.tiering.events import L2Events
from kvserver.tiering.fills import Fills
from kvserver.tiering.presence import Presence
from kvserver.tiering.rates import ReadRates
from kvserver.tiering.resync import Resync, resync_of_l1
from kvserver.tiering.spill import Spill
from kvserver.tiering.tiers import ConfiguredTier, Tiers
