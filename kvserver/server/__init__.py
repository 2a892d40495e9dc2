"""The event loop and what it does for each request: the one thread that owns all state."""

from kvserver.server.clears import ClearRefusal, ClearReport, ClearRequest, Clears
from kvserver.server.copies import Copies
from kvserver.server.endpoint import Endpoint
from kvserver.server.handlers import Handlers
from kvserver.server.loads import Loads
from kvserver.server.lookups import L1Lookups
from kvserver.server.loop import Server
from kvserver.server.pins import PinReport, PinRequest, Pins, PinsReport, SessionPinRequest
from kvserver.server.prefetches import PrefetchReports
from kvserver.server.samples import SERIES, take_sample
from kvserver.server.serving import Serving
from kvserver.server.sessions import DeletedSession, SessionReports, SessionsReport
from kvserver.server.status import (
    connects_status,
    departed_status,
    instance_status,
    l1_status,
    pins_status,
    prefetches_status,
    totals_status,
)
from kvserver.server.store_waits import StoreWaits
from kvserver.server.stores import Stores
from kvserver.server.upkeep import Audit, Upkeep
