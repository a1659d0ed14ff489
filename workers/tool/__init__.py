"""The tool worker: functions that programs call over the bus."""

from .functions import tool

__all__ = ["tool"]
