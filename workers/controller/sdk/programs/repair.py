"""Repair in place: only the fields that a validator rejects are generated again.

    tokenbus controller run repair.py --max-tokens 500 --temperature 0.8 \
        --prompt $'A trip to Oslo\n' \
        --arg '{"fields": {"start": "[0-9]+ May", "end": "[0-9]+ May"}, "validator": "trip"}'

The argument is a JSON object:

- ``fields``: the regular expression of each field
- ``validator``: a tool that gets the fields by name, and returns the names of those that are wrong
- ``tries``: the maximum number of checks (5)

The text has a line for each field. The program drops the text from the first wrong field on. It
then generates the wrong fields again, and appends the other fields unchanged.
"""

from tokenbus.workers.controller.python import Context, Label


async def main(ctx: Context) -> None:
    if not isinstance(ctx.arg, dict) or not {"fields", "validator"} <= set(ctx.arg):
        raise ValueError("the argument needs fields and validator, the name of a tool")
    fields = ctx.arg["fields"]
    names, wrong = list(fields), list(fields)
    labels: dict[str, Label] = {}
    values: dict[str, str] = {}
    for tries in range(ctx.arg.get("tries", 5)):
        first = names.index(wrong[0])
        for name in names[first:]:
            back = {"following": labels[name]} if name == wrong[0] and tries else {}
            if not back:
                labels[name] = ctx.label()
            await ctx.fixed(f"{name}: ", **back)
            if name in wrong:
                values[name] = await ctx.gen(regex=fields[name], max_tokens=40)
            else:
                await ctx.fixed(values[name])
            await ctx.fixed("\n")
        found = await ctx.call(ctx.arg["validator"], **values)
        wrong = [name for name in names if name in found]
        if not wrong:
            break
    ctx.log(f"{tries + 1} checks; wrong: {wrong}")
