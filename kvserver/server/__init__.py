"""The event loop and what it does for each request: the one thread that owns all state."""

from kvserver.server.endpoint import Endpoint
from kvserver.server.handlers import Handlers
from kvserver.server.instances import Disconnect
from kvserver.server.lifeline import Lifelines
from kvserver.server.loop import Server
from kvserver.server.observability import Observability

__all__ = ["Disconnect", "Endpoint", "Handlers", "Lifelines", "Observability", "Server"]
