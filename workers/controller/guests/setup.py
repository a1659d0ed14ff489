"""The setup of guest processes, which the worker passes to the zygote as JSON."""

from __future__ import annotations

import msgspec

from ..limits import Limits


class Setup(msgspec.Struct, frozen=True):
    """The limits of guests, and the Python controllers that all processes have."""

    limits: Limits
    controllers: list[str] = []
    """Python controllers of the operator, each named ``module:Name``."""

    @property
    def trusted(self) -> bool:
        """Whether the processes run only code of the operator, and so keep their rights."""
        return bool(self.controllers)
