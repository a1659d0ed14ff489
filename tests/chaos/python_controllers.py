"""Python controllers that the workers of the system serve."""

from __future__ import annotations

import tokenbus.workers.controller.python as tb


class Alternating(tb.Controller):
    """Allows words and numbers in turn, replaces the first four repeated pairs of tokens, and logs
    each round."""

    tokenbus_name = "alternating"

    def __init__(self) -> None:
        vocabulary = self.host.vocabulary
        self.digits = tb.TokenSet.where(vocabulary, bytes.isdigit)
        self.words = tb.TokenSet.where(vocabulary, lambda token: token.strip().isalpha())
        self.generated: list[int] = []
        self.dropped = 0
        self.most = int(str(self.arg))

    def pre_process(self) -> tb.Decision:
        return tb.stop() if len(self.generated) >= self.most else tb.go_on()

    def mid_process(self, fork_group: list[int]) -> tb.Decision:
        ids = self.generated
        if self.dropped < 4 and len(ids) > 4 and ids[-1] == ids[-3]:
            self.dropped += 1
            again = self.host.vocabulary.tokenize(f" again {self.dropped},".encode())
            return tb.splice(2, again)
        return tb.sample(self.digits if len(ids) % 2 else self.words)

    def post_process(self, tokens: list[int], backtrack: int) -> tb.Decision:
        del self.generated[len(self.generated) - backtrack :]
        self.generated += tokens
        self.log(len(self.generated), repr(self.text(tokens)), backtrack)
        return tb.go_on()


class Pair(tb.Controller):
    """Has two sequences. The second waits for the text that the first writes, and repeats it."""

    tokenbus_name = "pair"

    def __init__(self) -> None:
        self.forked = self.listens = self.heard = False
        self.spoken: list[int] = []

    def pre_process(self) -> tb.Decision:
        if not self.forked:
            self.forked = True
            return tb.fork(2)
        if not self.listens:
            return tb.stop() if len(self.spoken) >= 12 else tb.go_on()
        if self.heard:
            return tb.go_on() if len(self.spoken) < 40 else tb.stop()
        word = self.vars.get("word")
        if word is None:
            return tb.suspend()
        self.heard = True
        self.log("heard", repr(word))
        return tb.append(self.host.vocabulary.tokenize(word.encode()))

    def mid_process(self, fork_group: list[int]) -> tb.Decision:
        if len(fork_group) > 1 and fork_group[1] == self.seq:
            self.listens = True
            return tb.append(self.host.vocabulary.tokenize(b" # the other:"))
        return tb.sample()

    def post_process(self, tokens: list[int], backtrack: int) -> tb.Decision:
        if self.listens and not self.heard:
            return tb.go_on()
        self.spoken += tokens
        if not self.listens and len(self.spoken) == 12:
            self.vars["word"] = self.text(self.spoken)
        return tb.go_on()


async def survey(ctx: tb.Context) -> None:
    """Generates several answers in a sequence, backtracks if the age is odd, and writes two of the
    answers to a variable."""
    await ctx.fixed(" name: ")
    name = await ctx.gen(regex="[A-Z][a-z]{3,9}")
    place = ctx.label()
    age = await ctx.gen(regex=", aged [1-9][0-9]?")
    if int(age.rpartition(" ")[2]) % 2:
        ctx.log("odd:", age)
        await ctx.fixed(", of an even age", following=place)
    mood = await ctx.gen(choice=[" is glad", " is sad", " sleeps"])
    ctx.vars["survey"] = f"{name}{mood}"
    await ctx.fixed(". ")
    entry = await ctx.gen(
        json_schema={
            "type": "object",
            "properties": {
                "place": {"enum": ["Bern", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        }
    )
    ctx.log("entry:", entry)
    await ctx.gen(max_tokens=40)


async def meeting(ctx: tb.Context) -> None:
    """Has three sequences that wait for each other three times and read each other's variables."""
    count = 3
    index = await ctx.fork(count)
    await ctx.fixed(f" {('first', 'second', 'third')[index]}:")
    for turn in range(3):
        text = await ctx.gen(regex="[a-z ]{8,16}\\.", max_tokens=16)
        ctx.vars[f"said {turn} {index}"] = text
        for other in range(count):
            heard = await ctx.wait_var(f"said {turn} {other}")
            if other != index:
                ctx.log(turn, other, repr(heard))
        await ctx.fixed(" and ")


survey.tokenbus_name = "survey"  # type: ignore[attr-defined]
meeting.tokenbus_name = "meeting"  # type: ignore[attr-defined]

SERVED = ("Alternating", "Pair", "survey", "meeting")
"""The names of the controllers that each worker of the kind ``python`` serves."""
