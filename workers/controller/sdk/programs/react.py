"""ReAct: the model thinks, calls tools, and answers (Yao et al. 2022, arXiv:2210.03629).

    tokenbus controller run react.py --max-tokens 500 --prompt $'Question: Is it wet in Oslo?\n' \
        --arg '{"tools": {"weather": {"city": {"type": "string"}}}}'

The argument is a JSON object:

- ``tools``: for each tool, the JSON schemas of its parameters
- ``turns``: the maximum number of calls (5)
- ``tokens``: the maximum number of tokens of a thought, of a call's arguments, and of the answer
  (60)
"""

import json

from tokenbus.workers.controller.python import Context, ControllerError


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or "tools" not in ctx.arg:
        raise ValueError("the argument needs tools, with the schemas of their parameters")
    tools, tokens = ctx.arg["tools"], ctx.arg.get("tokens", 60)
    actions = list(tools)
    actions.append("answer")
    for _ in range(ctx.arg.get("turns", 5)):
        await line(ctx, "Thought: ", tokens)
        await ctx.fixed("Action: ")
        name = await ctx.gen(choice=actions)
        await ctx.fixed(" ")
        if name == "answer":
            break
        schema = {
            "type": "object",
            "properties": tools[name],
            "required": list(tools[name]),
            "additionalProperties": False,
        }
        arguments = await ctx.gen(json_schema=schema, max_tokens=tokens)
        try:
            found = await ctx.call(name, **json.loads(arguments))
        except (ControllerError, ValueError) as error:
            found = f"error: {error}"
        await ctx.fixed(f"\nObservation: {json.dumps(found)}\n")
    else:
        await ctx.fixed("Action: answer ")
    await line(ctx, "", tokens)


async def line(ctx: Context, begin: str, tokens: int) -> None:
    """Generates one line, which begins with a text."""
    await ctx.fixed(begin)
    text = await ctx.gen(stop_at="\n", max_tokens=tokens)
    if not text.endswith("\n"):
        await ctx.fixed("\n")
