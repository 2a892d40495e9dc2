"""The event loop and what it does for each request: the one thread that owns all state."""

from kvserver.server.ages import Ages
from kvserver.server.clears import ClearRefusal, ClearReport, ClearRequest, Clears
from kvserver.server.copies import Copies
from kvserver.server.endpoint import Endpoint
from kvserver.server.fills import Fills
from kvserver.server.handlers import Handlers
from kvserver.server.instances import Instances
from kvserver.server.l2_events import L2Events
from kvserver.server.lifeline import Lifelines
from kvserver.server.loads import Loads
from kvserver.server.lookups import L1Lookups
from kvserver.server.loop import Server
from kvserver.server.presence import Presence
from kvserver.server.read_rates import ReadRates
from kvserver.server.reports import EngineReports
from kvserver.server.resync import resync_of_l1
from kvserver.server.samples import SERIES, take_sample
from kvserver.server.serving import Serving
from kvserver.server.spill import Spill
from kvserver.server.status import connects_status, departed_status, instance_status, l1_status, totals_status
from kvserver.server.stores import Stores
from kvserver.server.tickets import Ticket
from kvserver.server.tiers import ConfiguredTier, Tiers
from kvserver.server.upkeep import Audit, Upkeep
from kvserver.server.workers import Workers
