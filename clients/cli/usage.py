"""A command-line parser that reports each error on one line, with a remedy."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ...protocol.settings import NAMES, PREFIX
from .exits import WRONG_USAGE, one_line
from .options import PARAMETERS


class Parser(argparse.ArgumentParser):
    """The parser of the command line and of each command."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, _whole_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses the arguments. The parser of a command reports unknown arguments of this command
        itself, because it has the list of valid flags."""
        self._check_order(sys.argv[1:] if args is None else list(args))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Prints ``message``, from argparse or from this class, on one line on stderr and exits."""
        what = one_line(message.removeprefix("argument "))
        print(f"tokenbus: {what} (see: {self.prog} --help)", file=sys.stderr)
        sys.exit(WRONG_USAGE)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError if ``value`` is not a choice. The message names the nearest choice,
        or all choices."""
        if action.choices is not None and value not in action.choices:
            remedy = suggestion(str(value), list(action.choices))
            name = action.metavar or "/".join(action.option_strings) or action.dest
            raise argparse.ArgumentError(None, f"{name}: unknown value {value!r}{remedy}")

    def _check_order(self, args: Sequence[str]) -> None:
        """Exits with an error if the command is missing, or if an unknown flag precedes the
        command."""
        flag = args[0].split("=")[0] if args else ""
        if args and (not flag.startswith("-") or flag in self._option_string_actions):
            return
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                command = next((text for text in args if text in action.choices), None)
                if command is not None:
                    self.error(f"{flag} must follow the command: {self.prog} {command} {flag} …")
                valid = f"; valid: {', '.join(action.choices)}"
                if not args:
                    self.error(f"{action.metavar} is missing{valid}")
                near = suggestion(flag, list(self._option_string_actions))
                self.error(f"unknown flag {flag!r} before {action.metavar}{near or valid}")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((text for text in unknown if text.startswith("-")), None)
        if flag is None:
            self.error(f"unexpected argument {unknown[0]!r}")
        name = flag.split("=")[0]
        setting = name.removeprefix("--").replace("-", "_")
        if setting in NAMES and any(action.dest == "gpu_workers" for action in self._actions):
            self.error(
                f"the setting {setting!r} has no flag; set {PREFIX}{setting.upper()}=VALUE, or "
                f"{setting} in tokenbus.toml"
            )
        if setting in PARAMETERS and "--set" in self._option_string_actions:
            self.error(f"the parameter {setting!r} has no flag; use --set {setting}=VALUE")
        if name == "--front" and "--back" in self._option_string_actions:
            self.error(
                "unknown flag '--front'; a worker connects to the broker's address for workers: "
                "use --back ADDRESS or --run-dir DIR, where DIR is the run directory of the system"
            )
        self.error(f"unknown flag {name!r}{suggestion(name, list(self._option_string_actions))}")


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None


def suggestion(name: str, known: Sequence[str]) -> str:
    """The remedy for an unknown name: the nearest known name or, if no known name is similar, all
    known names. If a flag is not similar to a known flag, the remedy is empty."""
    near = difflib.get_close_matches(name, known, 1, 0.7)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "" if name.startswith("-") else f"; valid: {', '.join(known)}"
