"""Connected engines: their memory, and their reports about themselves."""

from kvserver.engines.counts import Counts
from kvserver.engines.instance import Instance
from kvserver.engines.instances import Disconnect, Instances
from kvserver.engines.lifeline import Lifeline, Lifelines
from kvserver.engines.reports import EngineReports
from kvserver.engines.tickets import CopyTicket, LoadTicket, MapTicket, Respond, StoreTicket, Ticket, UnmapTicket
from kvserver.engines.worker import Worker, WorkerGroup, log_fields
from kvserver.engines.workers import Workers
