"""Generates random answers under the masks of ``structural``, with drafts and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec
from tokenbus.clients.gateway.answer_forms import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    MISTRAL_SPACED_LIST,
    Family,
    Function,
    Wanted,
    structure_of,
)
from tokenbus.protocol.structure import Structure
from tokenbus.workers.controller.interface import Action, Constraint, Program, TakesDrafts
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..played import BYTES, EOS
from .llguidance_streams import host

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 30}, "days": {"enum": [7, 12]}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("weather", PLACE), Function("wet", {**PLACE, "required": []})]
FAMILIES: dict[str, Family] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral, list": MISTRAL_LIST,
    "mistral, spaced list": MISTRAL_SPACED_LIST,
    "mistral": MISTRAL,
    "deepseek, fenced": DEEPSEEK_FENCED,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}
SPECIAL_NAMES = {
    "mistral, list": ["[TOOL_CALLS]"],
    "mistral, spaced list": ["[TOOL_CALLS]"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "harmony": [
        f"<|{name}|>"
        for name in ("start", "end", "message", "channel", "constrain", "return", "call")
    ],
}
"""The markers that are special tokens in a family's vocabulary. All other markers are text."""


def vocabulary_for(family: str, structure: Structure) -> TokenizerVocabulary:
    """A vocabulary of single bytes, markers, pieces of markers, and words. Some tokens also have
    text before or after a marker."""
    names = SPECIAL_NAMES.get(family, [])
    tokens = [*BYTES]
    for tag in structure.tags:
        for text in (tag.begin[: tag.trigger or None], tag.end):
            if text and not any(name in text for name in names):
                pieces = [text, text[:-1], text[-3:], text[1:], text[:3], text[3:7]]
                pieces += ["x" + text, text + "\n", text + "\n{", text + " y", text[:-1] + "!"]
                tokens += [piece.encode() for piece in pieces if piece]
    tokens += [b'{"', b'": "', b'"}', b'"}}', b"place", b"hello", b" ", b"days", b"we", b"\n\n"]
    tokens = list(dict.fromkeys(tokens))
    special = {name: len(tokens) + i for i, name in enumerate(names)}
    tokens += [b""] * len(names)
    return TokenizerVocabulary.from_tokens(tokens, [EOS], f"{family} {len(tokens)}", special)


def wants(family: str) -> Iterator[Wanted]:
    """Structures of answers: with thinking, with calls, and with both."""
    yield Wanted(FUNCTIONS)
    yield Wanted(FUNCTIONS, None)
    if family not in ("llama",):
        yield Wanted(FUNCTIONS, thinking="first", max_thinking_tokens=12)
        yield Wanted(FUNCTIONS, None, thinking="first", max_thinking_tokens=8)
    if family not in ("llama", "harmony"):
        yield Wanted(FUNCTIONS, parallel=False, thinking="inside", max_thinking_tokens=6)


DRAFT = 6
"""The number of tokens of a draft."""


class Walk:
    """One random answer under the masks. Each token depends on the seed, the position in the
    answer, and the mask."""

    def __init__(
        self, program: Program, family: str, wanted: Wanted, seed: int, max_tokens: int = 400
    ) -> None:
        self.structure = structure_of(FAMILIES[family], wanted)
        self.vocabulary = vocabulary_for(family, self.structure)
        self.names = {number: name for name, number in self.vocabulary.special.items()}
        arg = msgspec.json.encode(self.structure)
        made = program.start(host(arg, self.vocabulary, 0, max_tokens))
        assert isinstance(made, Constraint)
        self.controller = made
        self.tokens: list[int] = []
        self.drafted = 0
        """The number of accepted tokens of drafts."""
        self._seed = seed
        size = 4 * -(-self.vocabulary.size // 32)
        self._mask = memoryview(bytearray(size))
        self._along = [memoryview(bytearray(size)) for _ in range(DRAFT)]

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The texts and the special tokens of the answer; True: a special token."""
        pieces: list[tuple[str, bool]] = []
        data = b""
        for token in self.tokens:
            if token in self.names:
                pieces += [(data.decode("utf-8", "replace"), False), (self.names[token], True)]
                data = b""
            else:
                data += self.vocabulary.token(token)
        return [piece for piece in (*pieces, (data.decode("utf-8", "replace"), False)) if piece[0]]

    @property
    def text(self) -> str:
        """The answer, with the names of its special tokens."""
        return "".join(piece for piece, _ in self.pieces)

    def run(self, guess: Sequence[int] = ()) -> str:
        """Continues to the end of the answer; returns how its text ended. ``guess``: the tokens
        from which drafts are taken."""
        while self.step(guess):
            pass
        return self.controller.text_end()

    def step(self, guess: Sequence[int] = ()) -> bool:
        """Runs one round; returns whether another round follows."""
        answer = self.controller.mid_process((0,), self._mask)
        if answer.action is Action.STOP:
            return False
        if answer.action is Action.SPLICE:
            tokens, back = list(answer.tokens), answer.backtrack
        else:
            tokens, back = self._verified(self._draft(guess)), 0
        del self.tokens[len(self.tokens) - back :]
        self.controller.post_process(tokens, back)
        ended = EOS in tokens
        self.tokens += tokens[:-1] if ended else tokens
        return not ended

    def _draft(self, guess: Sequence[int]) -> list[int]:
        """The tokens of ``guess`` that come next. Sometimes one of them is replaced by a random
        token."""
        at = len(self.tokens)
        draft = list(guess[at : at + DRAFT])
        rng = random.Random(f"{self._seed} draft {at}")
        if draft and rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = rng.randrange(self.vocabulary.size)
        return draft

    def _verified(self, draft: Sequence[int]) -> list[int]:
        """The tokens of a step that verifies a draft: the draft's tokens up to the first that
        sampling would not choose, and one sampled token."""
        masks = [self._mask]
        if draft:
            assert isinstance(self.controller, TakesDrafts)
            masks += self._along[: self.controller.masks_along(draft, self._along)]
        chosen: list[int] = []
        for number, mask in enumerate(masks):
            chosen.append(self._chosen(len(self.tokens) + number, mask))
            if number == len(masks) - 1 or chosen[-1] != draft[number]:
                break
            self.drafted += 1
        return chosen

    def _chosen(self, at: int, mask: memoryview) -> int:
        """A random token of the mask. Long and special tokens are preferred, so that parts begin
        and end. Bytes beyond ASCII are avoided, because they might leave a character incomplete."""
        rng = random.Random(f"{self._seed} {at}")
        bits = int.from_bytes(mask, "little")
        allowed = [t for t in range(self.vocabulary.size) if bits >> t & 1]
        plain = [t for t in allowed if not 129 <= t <= 256]
        long = [t for t in plain if t > 256]
        if long and rng.random() < 0.85:
            return rng.choice(long)
        return rng.choice([t for t in plain if t >= 33 or t == EOS] or plain or allowed)
