"""Programs that hold a dialogue with their client, in each language of scripts."""

from __future__ import annotations

from collections.abc import Iterable

from tokenbus.clients import Stream

PYTHON = b"""
async def main(ctx):
    turn = 0
    while True:
        ctx.send("turn %d" % turn)
        text = await ctx.receive()
        if text == "end":
            break
        await ctx.fixed(text)
        await ctx.gen(max_tokens=3)
        turn += 1
    ctx.send("ended")
"""
JAVASCRIPT = b"""
async function main(ctx) {
  for (let turn = 0; ; turn++) {
    ctx.send(`turn ${turn}`);
    const text = await ctx.receive();
    if (text === "end") break;
    await ctx.fixed(text);
    await ctx.gen({ maxTokens: 3 });
  }
  ctx.send("ended");
}
"""
SCRIPTS = {"python": PYTHON, "javascript": JAVASCRIPT}
TURNS = ("one ", "two ", "three ")
MESSAGES = ["turn 0", "turn 1", "turn 2", "turn 3", "ended"]


def next_message(stream: Stream) -> str:
    """Reads the stream up to the next message of its program."""
    for entry in stream:
        if entry.messages:
            [message] = entry.messages
            return message
    raise AssertionError("the stream ended without a message")


def answered(stream: Stream, texts: Iterable[str]) -> list[str]:
    """The messages of a program that receives one text after each."""
    messages = []
    for text in texts:
        messages.append(next_message(stream))
        stream.send(text)
    stream.wait()
    return messages
