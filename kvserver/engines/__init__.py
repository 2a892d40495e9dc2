"""Who is connected, with what memory, and what engines report about themselves."""

from kvserver.engines.instances import Counts, Disconnect, Instance, Instances, Worker, WorkerGroup
from kvserver.engines.lifeline import Lifeline, Lifelines
from kvserver.engines.reports import EngineReports
from kvserver.engines.tickets import CopyTicket, LoadTicket, MapTicket, Respond, StoreTicket, Ticket, UnmapTicket
from kvserver.engines.workers import Workers
