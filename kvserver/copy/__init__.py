"""Copies in flight, and the devices that move the bytes."""

from kvserver.copy.devices import THIS_MACHINE, Devices, GpuRules, Hardware
from kvserver.copy.tickets import Completion, Tickets, l1_region

__all__ = ["THIS_MACHINE", "Completion", "Devices", "GpuRules", "Hardware", "Tickets", "l1_region"]
