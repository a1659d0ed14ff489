"""Monte Carlo tree search: a verifier rates texts, and the search expands the promising ones
(Kocsis and Szepesvári 2006).

    tokenbus controller run tree_search.py --max-tokens 2000 --temperature 0.8 \
        --prompt 'def fib(n):' --arg '{"verifier": "passes"}'

The argument is a JSON object:

- ``verifier``: a tool that gets the ``text`` after the prompt, and returns a number from 0 to 1
- ``rollouts``: the number of lines that are generated and rated (12)
- ``width``, ``depth``: the maximum number of next lines of a line (3), and of lines of a text (4)
- ``tokens``: the maximum number of tokens of a line (40)

The search is one sequence, which goes back to the line that it expands next. The result is the text
with the best rating; a text with the rating 1 ends the search.
"""

from tokenbus.workers.controller.python import Context

EXPLORATION = 1.0
"""The weight of lines that were tried rarely."""


class Line:
    """A line of a text, with the ratings of all texts that go through it."""

    def __init__(self, text: str = "", parent: "Line | None" = None) -> None:
        self.parent = parent
        self.text: str = parent.text + text if parent else text
        self.depth: int = parent.depth + 1 if parent else 0
        self.next: list[Line] = []
        self.tries: int = 0
        self.sum: float = 0.0

    def promise(self) -> float:
        """The upper bound of the line's rating: the mean, and more if the line was tried rarely."""
        root: float = (self.parent.tries if self.parent else 0) ** 0.5
        return (self.sum + EXPLORATION * root) / self.tries


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or "verifier" not in ctx.arg:
        raise ValueError("the argument needs verifier, the name of a tool")
    width, depth = ctx.arg.get("width", 3), ctx.arg.get("depth", 4)
    start, root = ctx.label(), Line()
    best, best_rating = root, -1.0
    for _ in range(ctx.arg.get("rollouts", 12)):
        line = root
        while len(line.next) == width and line.depth < depth - 1:
            line = max(line.next, key=Line.promise)
        await ctx.fixed(line.text, following=start)
        text = await ctx.gen(stop_at="\n", max_tokens=ctx.arg.get("tokens", 40))
        line.next.append(Line(text, line))
        rating = await ctx.call(ctx.arg["verifier"], text=line.next[-1].text)
        if rating > best_rating:
            best, best_rating = line.next[-1], rating
        rated: Line | None = line.next[-1]
        while rated:
            rated.tries, rated.sum = rated.tries + 1, rated.sum + rating
            rated = rated.parent
        if rating >= 1:
            break
    ctx.log(f"{root.tries} texts were rated, the best one {best_rating}")
    await ctx.fixed(best.text, following=start)
