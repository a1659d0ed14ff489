"""The commands ``up``, ``down`` and ``serve-model``, which start and stop a whole system on this
machine under supervisord."""

from .commands import add_command

__all__ = ["add_command"]
