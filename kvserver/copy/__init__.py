"""Copies in flight, and the devices that move the bytes."""

from kvserver.copy.devices import THIS_MACHINE, Devices, GpuRules, Hardware
from kvserver.copy.tickets import Completion, Copier, l1_region

__all__ = ["THIS_MACHINE", "Completion", "Copier", "Devices", "GpuRules", "Hardware", "l1_region"]
