"""An interpreter of the parse tables in Python: the reference for the guest engine."""

from __future__ import annotations

from .compiled import CompiledGrammar
from .tables import ACCEPT, REDUCE, SHIFT

Stack = tuple[int, ...]
"""Parser states, the start state first."""

CACHED_STACKS = 4096


class Parser:
    """Runs parse tables over stacks. Stacks are immutable, so a push returns a new stack."""

    start: Stack = (0,)

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self._viable: dict[Stack, int] = {}

    def push(self, stack: Stack, terminal: int) -> Stack | None:
        """The stack after a terminal, including the reductions before the terminal; None if the
        terminal cannot follow. For terminal 0, the end of the text, returns the stack after the
        last reductions."""
        grammar = self.grammar
        row = grammar.num_terminals
        while True:
            action = grammar.actions[stack[-1] * row + terminal]
            kind = action & 3
            if kind == SHIFT:
                return (*stack, action >> 2)
            if kind == ACCEPT:
                return stack
            if kind != REDUCE:
                return None
            stack = self._reduce(stack, action >> 2)

    def viable(self, stack: Stack) -> int:
        """The set of terminals that can follow a stack. A terminal can follow if it is shifted or
        accepted after the reductions that it causes. SKIP is never in the set."""
        known = self._viable.get(stack)
        if known is not None:
            return known
        grammar = self.grammar
        found = 0
        waiting = [(stack, (1 << grammar.num_terminals) - 1)]
        while waiting:
            at, terminals = waiting.pop()
            found |= grammar.shifted[at[-1]] & terminals
            for production, lookahead in grammar.reduced[at[-1]]:
                if lookahead & terminals:
                    waiting.append((self._reduce(at, production), lookahead & terminals))
        if len(self._viable) >= CACHED_STACKS:
            self._viable.clear()
        self._viable[stack] = found
        return found

    def _reduce(self, stack: Stack, production: int) -> Stack:
        grammar = self.grammar
        rest = stack[: len(stack) - grammar.length[production]]
        goto = grammar.gotos[rest[-1] * grammar.num_nonterminals + grammar.lhs[production]]
        return (*rest, goto)
