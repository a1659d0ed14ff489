"""The setup of guest processes. The worker passes it as JSON to the zygote, the parent of these
processes."""

from __future__ import annotations

import msgspec

from ....protocol.guest_user import GuestUser
from ..limits import Limits


class Setup(msgspec.Struct, frozen=True):
    """The limits of guests, the Python controllers that all processes load, and the processes'
    user."""

    limits: Limits
    controllers: list[str] = []
    """Python controllers of the operator, each named ``module:Name``."""
    user: GuestUser | None = None
    """The user under which processes run code of clients; None stands for the worker's user."""

    @property
    def trusted(self) -> bool:
        """Whether the processes run only code of the operator. Such processes keep their rights."""
        return bool(self.controllers)
