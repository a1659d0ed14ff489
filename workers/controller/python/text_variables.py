"""Access to the variables of a request as text, for the code of controllers."""

from __future__ import annotations

from ....protocol.errors import Code, ControllerError
from ..host import Stored, Variables, Written


class Vars:
    """``vars["name"]`` reads and ``vars["name"] = "text"`` writes a variable of the request.

    All sequences of the request share its variables. An access may wait for the state worker. It
    raises ControllerError if a name or a value is not valid, or if the quota is exceeded.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def read(self, name: str) -> Stored | None:
        """A variable's version and bytes; None if the variable does not exist."""
        return self._variables.get(name)

    def get(self, name: str, default: str | None = None) -> str | None:
        """A variable as text, or ``default``; raises ControllerError if the variable is not
        UTF-8."""
        stored = self.read(name)
        return default if stored is None else text_of(name, stored)

    def has(self, name: str) -> bool:
        """Whether a variable exists."""
        return name in self

    def set(self, name: str, value: str | bytes, when_version_is: int | None = None) -> Written:
        """Writes a variable. If ``when_version_is`` is given, the variable is written only if it
        has this version; version 0 means that the variable does not exist."""
        return self._variables.set(name, _bytes(name, value), when_version_is)

    def append(self, name: str, value: str | bytes, when_version_is: int | None = None) -> Written:
        """Appends ``value`` to a variable, which is created if it does not exist.
        ``when_version_is``: see ``set``."""
        return self._variables.append(name, _bytes(name, value), when_version_is)

    def __getitem__(self, name: str) -> str:
        stored = self.read(name)
        if stored is None:
            raise KeyError(name)
        return text_of(name, stored)

    def __setitem__(self, name: str, value: str | bytes) -> None:
        self.set(name, value)

    def __contains__(self, name: str) -> bool:
        return self.read(name) is not None


def text_of(name: str, stored: Stored) -> str:
    """A variable's text; raises ControllerError if its bytes are not UTF-8."""
    try:
        return stored.value.decode()
    except UnicodeDecodeError as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"variable {name!r} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "vars.read(name).value gives its bytes",
        ) from None


def _bytes(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ControllerError(
        Code.CONTROLLER_FAILED,
        f"variable {name!r} was set to {value!r}; expected text or bytes",
    )
