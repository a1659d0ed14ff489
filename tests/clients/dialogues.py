"""A program that holds a dialogue with its client, as a script in each language and in C."""

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
C_SOURCE = r"""
#include "tokenbus.h"

static tb_bytes text;
static uint32_t turn, room = 1;
static bool asked;

tb_answer tb_pre_process(void) {
    if (!room) return tb_go_on();
    if (!asked) {
        char question[16] = "turn 0";
        question[5] += turn;
        tb_send(question, 6);
        asked = true;
    }
    if (!tb_receive(&text)) return tb_suspend();
    if (text.len == 3 && !memcmp(text.data, "end", 3)) {
        tb_send("ended", 5);
        return tb_stop();
    }
    asked = false, turn += 1, room = 0;
    tb_tokens tokens = tb_tokenize(text.data, text.len);
    return tb_append(tokens.ids, tokens.n);
}

tb_answer tb_mid_process(const uint32_t *group, uint32_t n) {
    (void)group, (void)n;
    room = 1;
    return tb_sample(0);
}
"""
SCRIPTS = {"python": PYTHON, "javascript": JAVASCRIPT}
TURNS = ("one ", "two ", "three ")
MESSAGES = ["turn 0", "turn 1", "turn 2", "turn 3", "ended"]


def next_message(stream: Stream) -> str:
    """Reads the stream up to the program's next message, and returns the message."""
    for entry in stream:
        if entry.messages:
            [message] = entry.messages
            return message
    raise AssertionError("the stream ended without a message")


def answered(stream: Stream, texts: Iterable[str]) -> list[str]:
    """Answers each message of a program with the next text, and returns the messages."""
    messages = []
    for text in texts:
        messages.append(next_message(stream))
        stream.send(text)
    stream.wait()
    return messages
