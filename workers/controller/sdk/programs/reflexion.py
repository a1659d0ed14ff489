"""Reflexion: after each attempt that fails, the model writes a lesson for the next one (Shinn et
al. 2023, arXiv:2303.11366).

    tokenbus controller run reflexion.py --max-tokens 1000 --prompt $'# A haiku:\n' \
        --arg '{"verifier": "is_haiku"}'

The argument is a JSON object:

- ``verifier``: a tool that gets the ``text`` of an attempt, and returns null, or a text that says
  what is wrong
- ``tries``: the maximum number of attempts (3)
- ``tokens``: the maximum number of tokens of an attempt (80)

The program drops earlier attempts and the lessons, so only the last attempt stays in the text.
"""

from tokenbus.workers.controller.python import Context


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or "verifier" not in ctx.arg:
        raise ValueError("the argument needs verifier, the name of a tool")
    tries, start, lessons = ctx.arg.get("tries", 3), ctx.label(), ""
    for attempt in range(tries):
        await ctx.fixed(lessons, following=start)
        text = await ctx.gen(max_tokens=ctx.arg.get("tokens", 80))
        wrong = await ctx.call(ctx.arg["verifier"], text=text)
        if wrong is None or attempt == tries - 1:
            break
        await ctx.fixed(f"\nWrong: {wrong}\nLesson: ")
        lesson = await ctx.gen(stop_at="\n", max_tokens=40)
        lessons += f"Wrong: {wrong}\nLesson: {lesson.rstrip()}\n"
    ctx.log(f"{attempt + 1} attempts; the last one is " + (f"wrong: {wrong}" if wrong else "right"))
    await ctx.fixed(text, following=start)
