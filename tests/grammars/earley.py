"""An Earley recognizer and a test for LR(1), with which tests compare the compiled tables.

Both follow the textbook, and share no code with the compiler of grammars.
"""

from __future__ import annotations

Rules = dict[str, list[tuple[str, ...]]]
"""The alternatives of each rule. A symbol that is not a key is a terminal of one character."""
Item = tuple[str, tuple[str, ...], int, int]
"""Rule, alternative, position of the dot, and the number of the item set where the item began."""
Ahead = tuple[str, tuple[str, ...], int, str]
"""Rule, alternative, position of the dot, and the lookahead of the item."""


class Earley:
    """Recognizes the prefixes of the sentences that ``start`` derives."""

    def __init__(self, rules: Rules, start: str) -> None:
        self.rules = rules
        self.start = start
        self.nullable = nullable(rules)
        items: set[Item] = {(start, alternative, 0, 0) for alternative in rules[start]}
        self.first = self._closed([], items)

    def _closed(self, sets: list[set[Item]], items: set[Item]) -> set[Item]:
        number = len(sets)
        found = set(items)
        waiting = list(items)

        def add(item: Item) -> None:
            if item not in found:
                found.add(item)
                waiting.append(item)

        while waiting:
            name, alternative, dot, origin = waiting.pop()
            if dot == len(alternative):
                for other in list(found if origin == number else sets[origin]):
                    if other[2] < len(other[1]) and other[1][other[2]] == name:
                        add((other[0], other[1], other[2] + 1, other[3]))
            elif (symbol := alternative[dot]) in self.rules:
                for chosen in self.rules[symbol]:
                    add((symbol, chosen, 0, number))
                if symbol in self.nullable:
                    add((name, alternative, dot + 1, origin))
        return found

    def after(self, sets: list[set[Item]], terminal: str) -> list[set[Item]]:
        """The item sets after one more terminal. The last set is empty if the terminal cannot
        follow."""
        moved = {
            (name, alternative, dot + 1, origin)
            for name, alternative, dot, origin in sets[-1]
            if dot < len(alternative) and alternative[dot] == terminal
        }
        return [*sets, self._closed(sets, moved)]

    def begin(self) -> list[set[Item]]:
        """The item sets of the empty text."""
        return [self.first]

    def next(self, sets: list[set[Item]]) -> set[str]:
        """The terminals that can follow. Every rule must derive some text."""
        return {a[d] for _, a, d, _ in sets[-1] if d < len(a) and a[d] not in self.rules}

    def complete(self, sets: list[set[Item]]) -> bool:
        """Whether the text that was read is a sentence."""
        return any(n == self.start and d == len(a) and o == 0 for n, a, d, o in sets[-1])


def nullable(rules: Rules) -> set[str]:
    """The rules that can derive the empty text."""
    found: set[str] = set()
    while True:
        more = {n for n, alts in rules.items() if any(all(s in found for s in a) for a in alts)}
        if more == found:
            return found
        found = more


def is_lr1(rules: Rules, start: str) -> bool:
    """Whether the canonical LR(1) tables of the rules have no conflict."""
    empty = nullable(rules)
    first: dict[str, set[str]] = {name: set() for name in rules}
    changed = True
    while changed:
        changed = False
        for name, alternatives in rules.items():
            for alternative in alternatives:
                new = first_of(alternative, first, empty) - first[name]
                if new:
                    first[name] |= new
                    changed = True

    def closed(items: frozenset[Ahead]) -> frozenset[Ahead]:
        found = set(items)
        waiting = list(items)
        while waiting:
            _, alternative, dot, ahead = waiting.pop()
            if dot < len(alternative) and alternative[dot] in rules:
                rest = alternative[dot + 1 :]
                follow = first_of(rest, first, empty)
                if all(symbol in empty for symbol in rest):
                    follow = follow | {ahead}
                for chosen in rules[alternative[dot]]:
                    for terminal in follow:
                        item = (alternative[dot], chosen, 0, terminal)
                        if item not in found:
                            found.add(item)
                            waiting.append(item)
        return frozenset(found)

    begin = closed(frozenset({("", (start,), 0, "$")}))
    seen = {begin}
    waiting = [begin]
    while waiting:
        state = waiting.pop()
        shifts = {a[d] for _, a, d, _ in state if d < len(a)}
        reductions = [(ahead, n, a) for n, a, d, ahead in state if d == len(a)]
        if len({ahead for ahead, _, _ in reductions}) < len(set(reductions)):
            return False
        if any(ahead in shifts for ahead, _, _ in reductions):
            return False
        for symbol in shifts:
            moved = frozenset(
                (n, a, d + 1, ahead) for n, a, d, ahead in state if d < len(a) and a[d] == symbol
            )
            target = closed(moved)
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return True


def first_of(symbols: tuple[str, ...], first: dict[str, set[str]], empty: set[str]) -> set[str]:
    """The terminals that can start a sequence of symbols."""
    found: set[str] = set()
    for symbol in symbols:
        found |= first.get(symbol, {symbol})
        if symbol not in empty:
            break
    return found
