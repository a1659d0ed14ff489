"""Self-consistency: several sequences think, and the most frequent answer wins (Wang et al. 2022,
arXiv:2203.11171).

    tokenbus controller run self_consistency.py --max-tokens 200 --temperature 0.8 \
        --prompt 'What is 6 times 7? ' --arg '{"n": 5, "answer": "[0-9]+"}'

The argument is a JSON object:

- ``answer``: a regular expression for the answer
- ``n``: the number of sequences (5)
- ``cue``: the text before the answer
- ``tokens``: the maximum number of tokens of a thought (60)

Sequence 0 has the answer that won. With the temperature 0, all sequences have the same thought.
"""

from tokenbus.workers.controller.python import Context


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or "answer" not in ctx.arg:
        raise ValueError("the argument needs answer, a regular expression")
    n = ctx.arg.get("n", 5)
    me = await ctx.fork(n)
    await ctx.gen(max_tokens=ctx.arg.get("tokens", 60))
    await ctx.fixed(ctx.arg.get("cue", "\nSo the answer is "))
    before = ctx.label()
    answer = await ctx.gen(regex=ctx.arg["answer"], max_tokens=20)
    ctx.vars[f"answer {me}"] = answer
    if me:
        await ctx.stop()
    answers = []
    for each in range(n):
        answers.append(await ctx.wait_var(f"answer {each}"))  # noqa: PERF401
    best = max(answers, key=answers.count)
    ctx.log(f"{answers.count(best)} of {n} sequences answer {best}")
    if best != answer:
        await ctx.fixed(best, following=before)
