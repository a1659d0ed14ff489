"""A whole system on this machine, under supervisord: ``up``, ``down`` and ``serve-model``."""

from .commands import add_commands

__all__ = ["add_commands"]
