"""Programs as scripts in Python and JavaScript, with dialogues, tools and contexts."""

from __future__ import annotations

from tokenbus.protocol.scripts import marked_script

from ..clients import dialogues
from ..workers.controller.wasm.guests import SDK

TOOLS = """
def chaos_add(a: int, b: int) -> int:
    return a + b
"""
"""The tools of the system's tool worker."""
_TOOL_CALLS = b"""
async def main(ctx):
    total = 0
    for number in range(5):
        total = await added(ctx, total, number)
        await ctx.fixed(" %d " % total)
        await ctx.gen(max_tokens=6)


async def added(ctx, a, b):
    # The call fails if the tool worker or the broker dies meanwhile.
    while True:
        try:
            return await ctx.call("chaos_add", a=a, b=b)
        except ControllerError:
            pass
"""
_CONTEXTS = b"""
async def main(ctx):
    await ctx.gen(max_tokens=10)
    await ctx.save("chaos " + ctx.arg)
    await ctx.fixed(" and then ")
    await ctx.gen(max_tokens=10)
    if await ctx.spawn("import "):
        await ctx.gen(max_tokens=8)
        await ctx.stop()
    await ctx.open("chaos " + ctx.arg)
    await ctx.gen(max_tokens=10)
"""
_FORKS = b"""
async function main(ctx) {
  await ctx.fixed(" A name: ");
  const name = await ctx.gen({ regex: "[A-Z][a-z]{3,9}", maxTokens: 12 });
  const me = await ctx.fork(3);
  ctx.vars.set(`name ${me}`, name);
  await ctx.fixed(` ${me} `);
  await ctx.gen({ jsonSchema: { type: "array", items: { enum: [1, "two"] }, maxItems: 4 } });
  for (let each = 0; each < 3; each++) ctx.log(await ctx.waitVar(`name ${each}`));
}
"""
AICI = """
import pyaici.server as aici

async def main():
    await aici.FixedTokens("one ")
    for number in range(4):
        await aici.gen_text(regex="[a-z]{2,6} [0-9]{2}", store_var="n%d" % number)

aici.start(main())
"""
"""A script of AICI's ``pyctrl``, which is an argument of a request."""
INPUTS = ("one ", "two ", "three ", "end")
"""The inputs of a dialogue."""


def scripts() -> dict[str, bytes]:
    """The scripts that the requests name, by their tags."""
    best_of_n = (SDK / "programs/best_of_n.py").read_bytes()
    return {
        "tool-calls": marked_script(_TOOL_CALLS, "python"),
        "contexts": marked_script(_CONTEXTS, "python"),
        "forks": marked_script(_FORKS, "javascript"),
        "likeliest": marked_script(best_of_n, "python"),
        "dialogue": marked_script(dialogues.JAVASCRIPT, "javascript"),
    }
