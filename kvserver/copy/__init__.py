"""Copies in flight, and the devices that move the bytes."""

from kvserver.copy.devices import THIS_MACHINE, Devices, GpuRules, Hardware
from kvserver.copy.l1 import chosen_l1, map_l1
from kvserver.copy.tickets import Completion, Tickets
