"""Tree of thoughts: a search that keeps the best thoughts of each level (Yao et al. 2023,
arXiv:2305.10601).

    tokenbus controller run tree_of_thoughts.py --max-tokens 500 --temperature 0.8 \
        --prompt $'A plan for a party:\n'

The argument is a JSON object, or empty:

- ``width``: the number of thoughts after each kept thought, at most 10 (3)
- ``depth``: the number of levels (2)
- ``keep``: the number of thoughts that are kept in each level (2)
- ``tokens``: the maximum number of tokens of a thought and of the answer (40)

Each thought is a separate sequence. The model rates each thought, and the program then drops the
text of the rating. If a thought is not kept, its sequence ends.
"""

from tokenbus.workers.controller.python import Context

RATINGS = ["sure", "likely", "unlikely", "impossible"]
"""The ratings of a thought, the best one first."""


async def main(ctx: Context) -> None:
    arg = ctx.arg or {}
    width, tokens = arg.get("width", 3), arg.get("tokens", 40)
    me, kept = "", [""]  # A thought's name has a digit for each level: "02".
    for level in range(arg.get("depth", 2)):
        me += str(await ctx.fork(width))
        await line(ctx, f"Step {level + 1}: ", tokens)
        rating = await rated(ctx)
        line_of_me = f"{RATINGS.index(rating)} {me}\n"
        if ctx.vars.append(f"level {level}", line_of_me).version == width * len(kept):
            ratings = sorted(ctx.vars[f"level {level}"].splitlines())
            best = ratings[: arg.get("keep", 2)]
            ctx.vars[f"kept {level}"] = " ".join(each.split()[1] for each in best)
        kept = (await ctx.wait_var(f"kept {level}")).split()
        if me not in kept:
            ctx.log(f"thought {me} is {rating}: pruned")
            await ctx.stop()
    if me != kept[0]:
        await ctx.stop()
    ctx.log(f"the best thought is {me}")
    await line(ctx, "Answer: ", tokens)


async def rated(ctx: Context) -> str:
    """Returns the model's rating of the text so far, and drops the text of the rating."""
    before = ctx.label()
    await ctx.fixed("(It is ")
    rating = await ctx.gen(choice=[f"{each} that this leads to the goal.)\n" for each in RATINGS])
    await ctx.fixed("", following=before)
    return rating.split(" ")[0]


async def line(ctx: Context, begin: str, tokens: int) -> None:
    """Generates one line, which begins with a text."""
    await ctx.fixed(begin)
    text = await ctx.gen(stop_at="\n", max_tokens=tokens)
    if not text.endswith("\n"):
        await ctx.fixed("\n")
