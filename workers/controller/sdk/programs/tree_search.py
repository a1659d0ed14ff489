"""Monte Carlo tree search: a verifier rates texts, and the search expands the promising ones
(Kocsis and Szepesvári 2006).

    tokenbus controller run tree_search.py --max-tokens 2000 --temperature 0.8 \
        --prompt 'def fib(n):' --arg '{"verifier": "passes"}'

The argument is a JSON object:

- ``verifier``: a tool that gets the ``text`` after the prompt, and returns a number from 0 to 1
- ``rollouts``: the number of lines that are generated and rated (12)
- ``parallel``: the number of lines that are generated at the same time (4)
- ``width``, ``depth``: the maximum number of next lines of a line (3), and of lines of a text (4)
- ``tokens``: the maximum number of tokens of a line (40)

Each line is the end of a sequence, which forks for each next line. Sequence 0 decides where the
next lines begin, and its text is the one with the best rating. A rating of 1 ends the search.
"""

import json

from tokenbus.workers.controller.python import Context, Label

EXPLORATION = 1.0
"""The weight of the bonus for lines that were tried rarely."""


class Line:
    """A line of a text, with the ratings of all texts that go through it."""

    def __init__(self, name: str = "", parent: "Line | None" = None) -> None:
        self.name = name
        self.path: list[Line] = parent.path + [self] if parent else [self]  # noqa: RUF005
        self.next: list[Line] = []
        self.tries: int = 0
        self.sum: float = 0.0

    def promise(self) -> float:
        """The mean rating of the line, plus a bonus that is larger if the line was tried rarely."""
        root: float = self.path[-2].tries ** 0.5
        return (self.sum + EXPLORATION * root) / self.tries


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or "verifier" not in ctx.arg:
        raise ValueError("the argument needs verifier, the name of a tool")
    arg, lines = ctx.arg, [Line()]
    width, depth = arg.get("width", 3), arg.get("depth", 4)
    if await ctx.fork(2):
        await grow(ctx, ctx.label(), depth)
    best, rating = "", -1.0
    while lines[0].tries < arg.get("rollouts", 12) and rating < 1:
        new = []
        for _ in range(arg.get("parallel", 4)):
            line = lines[0]
            while len(line.next) >= width and len(line.path) < depth:
                line = max(line.next, key=Line.promise)
            ctx.vars[f"next {line.name} {len(line.next)}"] = "line"
            new.append(Line(f"{line.name} {len(line.next)}", line))
            line.next.append(new[-1])
            for each in new[-1].path:
                each.tries += 1
        for line in new:
            text, found = json.loads(await ctx.wait_var("rated" + line.name))
            for each in line.path:
                each.sum += found
            if found > rating:
                best, rating = text, found
        lines += new
    for line in lines:
        ctx.vars[f"next {line.name} {len(line.next)}"] = "end"
    ctx.log(f"{len(lines) - 1} texts were rated, the best one {rating}")
    await ctx.fixed(best)


async def grow(ctx: Context, start: Label, depth: int) -> None:
    """Generates lines when sequence 0 requests them. Each line is generated in a new fork."""
    name, made, level = "", 0, 0
    while level < depth and await ctx.wait_var(f"next {name} {made}") == "line":
        made += 1
        if await ctx.fork(2):
            name, made, level = f"{name} {made - 1}", 0, level + 1
            await ctx.gen(stop_at="\n", max_tokens=ctx.arg.get("tokens", 40))
            text = ctx.text_since(start)
            rating = await ctx.call(ctx.arg["verifier"], text=text)
            ctx.vars["rated" + name] = json.dumps([text, rating])
    await ctx.stop()
