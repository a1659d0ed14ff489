"""The algorithms of ``programs.py`` as asyncio clients of a server.

Each function has the algorithm of the program with the same name. Prompts, numbers of tokens and
constraints are the same too. Requests that do not depend on one another run at the same time. Tools
run in this process, and take hardly any time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _programs_doors import Door, Text, Wanted

RATINGS = ("sure", "likely", "unlikely", "impossible")


async def best_of_n(door: Door[Text], prompt: Text, n: int, tokens: int) -> Text:
    """Samples ``n`` completions. Returns the completion with the highest mean log-probability of a
    token."""
    wanted = Wanted(tokens, logprobs=True)
    found = await asyncio.gather(*(door.complete(prompt, wanted) for _ in range(n)))
    return max(found, key=lambda one: sum(one.logprobs) / len(one.logprobs)).text


async def beam_search(door: Door[Text], prompt: Text, width: int, tokens: int) -> Text:
    """Runs a beam search. Returns the most likely text."""
    beams = [(0.0, door.words.encode(""))]
    for step in range(tokens):
        wanted = Wanted(1, top=width)
        found = await asyncio.gather(*(door.complete(prompt + text, wanted) for _, text in beams))
        every = [
            (score + logprob, text + token)
            for (score, text), one in zip(beams, found, strict=True)
            for token, logprob in one.top
        ]
        beams = sorted(every, reverse=True)[: 1 if step == tokens - 1 else width]
    return beams[0][1]


async def tree_of_thoughts(
    door: Door[Text], prompt: Text, width: int, depth: int, keep: int, tokens: int
) -> Text:
    """Returns the best chain of thoughts, and the answer that follows it."""
    kept = [prompt]
    for level in range(depth):
        begin = f"Step {level + 1}: "
        begun = [_line(door, parent, begin, tokens) for parent in kept for _ in range(width)]
        thoughts = await asyncio.gather(*begun)
        ratings = await asyncio.gather(*(_rating(door, thought) for thought in thoughts))
        places = sorted(range(len(thoughts)), key=ratings.__getitem__)
        kept = [thoughts[place] for place in places[:keep]]
    return (await _line(door, kept[0], "Answer: ", tokens))[len(prompt) :]


async def _rating(door: Door[Text], text: Text) -> int:
    options = [f"{each} that this leads to the goal.)\n" for each in RATINGS]
    wanted = Wanted(200, choice=options)
    found = await door.complete(text + door.words.encode("(It is "), wanted)
    return RATINGS.index(door.words.decode(found.text).split(" ")[0])


async def _line(door: Door[Text], text: Text, begin: str, tokens: int) -> Text:
    """Returns the text with one more line: ``begin``, and then a completion."""
    text = text + door.words.encode(begin)
    found = await door.complete(text, Wanted(tokens, line=True))
    return text + found.text + door.words.encode("\n")


class _Line:
    """A node of the tree of ``tree_search``. A node is a line of text; compare
    ``programs/tree_search.py``."""

    def __init__(self, text: Any, parent: _Line | None = None) -> None:
        self.parent = parent
        self.text = text
        self.written = asyncio.Event()
        self.depth: int = parent.depth + 1 if parent else 0
        self.next: list[_Line] = []
        self.tries = 0
        self.sum = 0.0

    def promise(self) -> float:
        """The priority of the line in the search: the mean rating of the texts that contain the
        line, plus a bonus. The bonus shrinks when the number of tries grows."""
        return (self.sum + (self.parent.tries if self.parent else 0) ** 0.5) / self.tries

    def path(self) -> list[_Line]:
        """This line and its ancestors in the tree."""
        return [self, *(self.parent.path() if self.parent else ())]


async def tree_search(
    door: Door[Text],
    prompt: Text,
    verifier: Callable[[str], float],
    rollouts: int,
    parallel: int,
    width: int,
    depth: int,
    tokens: int,
) -> Text:
    """Runs a Monte Carlo tree search. Returns the text with the highest rating."""
    empty = door.words.encode("")
    root, best, best_rating = _Line(empty), _Line(empty), -1.0
    root.written.set()
    wanted = Wanted(tokens, line=True)

    async def grown(line: _Line) -> float:
        assert line.parent is not None
        await line.parent.written.wait()
        found = await door.complete(prompt + line.parent.text, wanted)
        line.text = line.parent.text + found.text
        line.written.set()
        return verifier(door.words.decode(line.text))

    for _ in range(0, rollouts, parallel):
        lines = []
        for _ in range(parallel):
            at = root
            while len(at.next) >= width and at.depth < depth - 1:
                at = max(at.next, key=_Line.promise)
            at.next.append(_Line(empty, at))
            lines.append(at.next[-1])
            for each in lines[-1].path():
                each.tries += 1
        for line, rating in zip(lines, await asyncio.gather(*map(grown, lines)), strict=True):
            if rating > best_rating:
                best, best_rating = line, rating
            for each in line.path():
                each.sum += rating
    return best.text


async def react(
    door: Door[Text],
    prompt: Text,
    tools: Mapping[str, Mapping[str, Any]],
    calls: Mapping[str, Callable[..., str]],
    turns: int,
    tokens: int,
) -> int:
    """Runs ReAct: the model thinks, calls tools and answers. Returns the number of calls."""
    words, text = door.words, prompt
    actions: Sequence[str] = [*tools, "answer"]
    for turn in range(turns):
        text = await _line(door, text, "Thought: ", tokens)
        text = text + words.encode("Action: ")
        chosen = await door.complete(text, Wanted(tokens, choice=actions))
        text = text + chosen.text + words.encode(" ")
        name = words.decode(chosen.text)
        if name == "answer":
            await _line(door, text, "", tokens)
            return turn
        schema = {
            "type": "object",
            "properties": tools[name],
            "required": list(tools[name]),
            "additionalProperties": False,
        }
        arguments = await door.complete(text, Wanted(tokens, schema=schema))
        seen = json.dumps(calls[name](**json.loads(words.decode(arguments.text))))
        text = text + arguments.text + words.encode(f"\nObservation: {seen}\n")
    await _line(door, text, "Action: answer ", tokens)
    return turns
