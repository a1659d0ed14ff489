"""Best of n: several sequences write a text, and the likeliest text wins.

    tokenbus controller run best_of_n.py --max-tokens 200 --temperature 0.8 \
        --prompt $'A poem about the sea:\n' --arg '{"n": 8}'

The argument is a JSON object, or empty:

- ``n``: the number of texts (4)
- ``tokens``: the maximum number of tokens of a text (40)

Sequence 0 has the text that won. Its tokens have the highest mean log-probability. With the
temperature 0, all texts are the same.
"""

from tokenbus.workers.controller.python import Context


async def main(ctx: Context) -> None:
    arg = ctx.arg or {}
    n = arg.get("n", 4)
    begin = ctx.label()
    me = await ctx.fork(n)
    found = await ctx.gen(max_tokens=arg.get("tokens", 40), logprobs=True)
    logprobs = [each for each in found.logprobs if each is not None]
    scored = f"{sum(logprobs) / len(logprobs)} {found.text}" if logprobs else ""
    ctx.vars[f"text {me}"] = scored
    if me:
        await ctx.stop()
    means, texts = [], []
    for each in range(n):
        mean, _, text = (await ctx.wait_var(f"text {each}")).partition(" ")
        if text:
            means.append(float(mean))
            texts.append(text)
    await ctx.fixed("", following=begin)
    if not texts:
        return
    ctx.log(f"the best of {len(texts)} texts has {max(means):.3f} for each token")
    await ctx.fixed(texts[means.index(max(means))])
