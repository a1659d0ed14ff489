"""Parses regular expressions with Python's own parser, and records the position of every node.

``re._parser`` returns a tree without positions. This module makes a private copy of the parser, so
that ``re`` itself is unchanged. In the copy, subclasses of the parser's classes record the position
in the pattern at which each node was made. This works with Python 3.11, 3.12 and 3.13.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from .bounds import MAX_PATTERN_CHARACTERS, Budget, RegexError

_SKIPPED = re.compile(r"(?:\(\?(?:#[^)]*|[aimsux]+)\))*")
_SKIPPED_VERBOSE = re.compile(r"(?:\s+|#[^\n]*(?:\n|\Z)|\(\?(?:#[^)]*|[aimsux]+)\))*")


class Node(tuple[Any, Any]):
    """One ``(operator, argument)`` of the tree, and its span in the pattern."""

    span: tuple[int, int]


def _node(code: tuple[Any, Any], start: int, end: int) -> Node:
    node = Node(code)
    node.span = (start, end)
    return node


def _own_parser() -> Any:
    """A copy of ``re._parser`` whose subpatterns and tokens record positions."""
    spec = importlib.util.find_spec("re._parser")
    if spec is None or spec.loader is None:
        raise ImportError("this Python does not have re._parser; use Python 3.11 to 3.13")
    parser: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parser)

    class SubPattern(parser.SubPattern):  # type: ignore[misc]
        def __init__(self, state: Any, data: list[Any] | None = None) -> None:
            super().__init__(state, data)
            self.cursor = state.source.tell()

        def append(self, code: tuple[Any, Any]) -> None:
            end = self.state.source.tell()
            self.data.append(code if isinstance(code, Node) else _node(code, self.cursor, end))
            self.cursor = end

        def __setitem__(self, index: Any, code: Any) -> None:
            if isinstance(index, slice):
                # The parser replaces a group without name or flags by the group's content.
                start, end = self.data[index][0].span
                nodes = list(code)
                if nodes:
                    nodes[0] = _node(nodes[0], start, nodes[0].span[1])
                    nodes[-1] = _node(nodes[-1], nodes[-1].span[0], end)
                self.data[index] = nodes
            else:
                # The parser replaces a repeated item by the repetition.
                self.cursor = self.state.source.tell()
                self.data[index] = _node(code, self.data[index].span[0], self.cursor)

    class Tokenizer(parser.Tokenizer):  # type: ignore[misc]
        def __init__(self, pattern: str, budget: Budget) -> None:
            super().__init__(pattern)
            self.budget = budget

        def get(self) -> Any:
            self.budget.tick()
            return super().get()

    parser.SubPattern = SubPattern
    parser.Tokenizer = Tokenizer
    return parser


_parser = _own_parser()


def parse(pattern: str, budget: Budget) -> tuple[Any, int]:
    """Returns the tree that ``re._parser`` makes of a pattern, and the global flags of the pattern.
    The nodes of the tree are ``Node`` objects.

    Raises RegexError with Python's message if the pattern is not a regular expression, and
    Exhausted when the time is used up.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise RegexError(
            f"the pattern has {len(pattern):,} characters; at most {MAX_PATTERN_CHARACTERS:,} are "
            "allowed",
            pattern,
        )
    try:
        source = _parser.Tokenizer(pattern, budget)
        state = _parser.State()
        state.flags = 0
        state.str = pattern
        state.source = source
        tree = _parser._parse_sub(source, state, 0, 0)
        flags = _parser.fix_flags(pattern, state.flags)
        if source.next is not None:
            raise source.error("unbalanced parenthesis")
    except re.error as error:
        raise RegexError(_explained(error.msg), pattern, error.pos) from None
    except OverflowError as error:
        raise RegexError(str(error), pattern) from None
    except RecursionError:
        raise too_deep(pattern) from None
    return tree, int(flags)


def too_deep(pattern: str) -> RegexError:
    """The error for a pattern whose groups exhaust the stack of Python."""
    return RegexError("the groups are nested too deeply; 100 levels are always allowed", pattern)


def _explained(message: str) -> str:
    if message.lower().startswith("bad escape \\p"):
        return (
            "Unicode properties (\\p{...}) are not supported: name the characters in a class, as "
            "[\\u0370-\\u03ff], or use \\w, \\d or \\s"
        )
    return message


def place(pattern: str, span: tuple[int, int], verbose: bool) -> tuple[int, int]:
    """The span of a node, without blanks, comments and flags at its beginning."""
    start, end = span
    found = (_SKIPPED_VERBOSE if verbose else _SKIPPED).match(pattern, start, end)
    return (found.end() if found and found.end() < end else start), end
