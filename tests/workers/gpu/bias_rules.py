"""A rule of biases, masks, splices and forks, and controllers in C, in Python and for AICI that
follow it. Tests compute the expected logits from the rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
import wasmtime
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.python import (
    Controller,
    Decision,
    PythonProgram,
    fork,
    go_on,
    sample,
    splice,
)
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.wasm_binary import with_exported_globals

from ..controller.played import engine
from ..controller.wasm.aici_guests import puppet
from ..controller.wasm.guests import compile_guest

VOCAB = 64
SPLICED = (7, 8)
"""The tokens that a splice appends. A splice drops one token first."""
INF = float("inf")


@dataclass(frozen=True)
class Rule:
    """The decisions of a controller. They follow from the number of generated tokens, the last
    token and the number of the sequence."""

    num: int
    """Number of tokens with a small bias; two more tokens are forbidden or preferred. ``VOCAB``:
    the bias is dense."""
    masked: int
    """1: most rounds have a mask; 0: no round has one."""
    splice_at: int
    """The number of generated tokens at which the controller splices; 0: never."""
    fork_at: int
    """The number of generated tokens at which the controller forks; 0: never."""

    @classmethod
    def drawn(cls, rng: Random) -> Rule:
        """A random rule."""
        return cls(
            rng.choice([1, 6, VOCAB]),
            rng.randrange(2),
            rng.choice([0, rng.randrange(1, 16)]),
            rng.choice([0, rng.randrange(1, 16)]),
        )

    @property
    def arg(self) -> str:
        """The rule as the argument of the controllers in C and Python."""
        return f"{self.num} {self.masked} {self.splice_at} {self.fork_at}"

    def bias(self, length: int, last: int, seq: int) -> dict[int, float] | None:
        """The bias values by token; None: this round has no bias."""
        if length % 5 == 3:
            return None
        values = {(last * 3 + i * 7) % VOCAB: (i * 5 % 17 - 8) / 8 for i in range(self.num)}
        values[(last + 2) % VOCAB] = -INF
        values[favourite(last, seq)] = 9.0
        return values

    def mask(self, length: int, last: int, seq: int) -> set[int] | None:
        """The allowed tokens; None: this round has no mask."""
        if not self.masked or length % 4 == 2:
            return None
        own = favourite(last, seq)
        return {t for t in range(VOCAB) if (t + last) % 3 or t == own}


def favourite(last: int, seq: int) -> int:
    """The likeliest token after ``last``. The text repeats itself, so that the engine has
    drafts."""
    return 10 + (last + 1 + seq) % 5


class Biased(Controller):
    """A controller in Python that follows a rule."""

    takes_drafts = True

    def __init__(self) -> None:
        self.rule = Rule(*map(int, str(self.arg).split()))
        self.length, self.last, self.forked = 0, 0, False

    def init_prompt(self, prompt: list[int]) -> None:
        self.last = prompt[-1]

    def pre_process(self) -> Decision:
        if self.length != self.rule.fork_at or self.forked or not self.length:
            return go_on()
        self.forked = True
        return fork(2)

    def mid_process(self, fork_group: list[int]) -> Decision:
        rule, state = self.rule, (self.length, self.last, self.seq)
        if self.length and self.length == rule.splice_at:
            return splice(1, list(SPLICED))
        bias = rule.bias(*state)
        if bias is not None and rule.num == VOCAB:
            return sample(rule.mask(*state), [bias.get(t, 0.0) for t in range(VOCAB)])
        return sample(rule.mask(*state), bias)

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        self.length += len(tokens) - backtrack
        self.last = tokens[-1]
        return go_on()


GUEST = r"""
#include "tokenbus.h"

static uint32_t num, masked, splice_at, fork_at, length, last, forked;
static tb_bias *bias;
static uint32_t *mask;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    uint32_t *into[] = {&num, &masked, &splice_at, &fork_at}, place = 0;
    for (uint32_t i = 0; i < arg_len; i++) {
        if (arg[i] == ' ') place++;
        else *into[place] = *into[place] * 10 + (uint32_t)(arg[i] - '0');
    }
    last = prompt[n - 1];
    bias = tb_bias_new();
    mask = tb_mask_new();
    tb_take_drafts();
}

tb_answer tb_pre_process(void) {
    if (!length || length != fork_at || forked) return tb_go_on();
    forked = 1;
    return tb_fork(2);
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    static const uint32_t spliced[] = {7, 8};
    uint32_t size = tb_vocab_size(), own = 10 + (last + 1 + tb_seq_id()) % 5;
    (void)fork_group, (void)n;
    if (length && length == splice_at) return tb_splice(1, spliced, 2);
    tb_mask_clear_all(mask);
    for (uint32_t t = 0; t < size; t++)
        if ((t + last) % 3 || t == own) tb_mask_set(mask, t);
    const uint32_t *under = !masked || length % 4 == 2 ? 0 : mask;
    if (length % 5 == 3) return tb_sample(under);
    tb_bias_clear(bias);
    if (num == size) tb_bias_values(bias);
    for (uint32_t i = 0; i < num; i++)
        tb_bias_set(bias, (last * 3 + i * 7) % size, ((float)(i * 5 % 17) - 8) / 8);
    tb_bias_set(bias, (last + 2) % size, -__builtin_inff());
    tb_bias_set(bias, own, 9);
    return tb_sample_bias(under, bias);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    length += n - backtrack;
    last = tokens[n - 1];
    return tb_go_on();
}
"""


class ByLength(Rule):
    """A rule whose decisions depend only on the length, for the AICI guest ``puppet.c``. Its masks
    allow one token."""

    def bias(self, length: int, last: int, seq: int) -> dict[int, float] | None:
        return super().bias(length, 0, 0)

    def mask(self, length: int, last: int, seq: int) -> set[int] | None:
        return super().mask(length, 0, 0) and {favourite(0, 0)}

    @property
    def arg(self) -> str:
        """The lines for the AICI guest ``puppet.c``."""
        lines = []
        for length in range(64):
            if length and length == self.fork_at:
                lines.append('pre = {"attention_masks":[[],[]],"suspend":false,"ff_tokens":[]}')
            if length and length == self.splice_at:
                ids = json.dumps(SPLICED)
                lines.append(f'mid = {{"Splice":{{"backtrack":2,"ff_tokens":{ids}}}}}')
                continue
            if self.mask(length, 0, 0):
                lines.append(f"mid mask {favourite(0, 0)}")
            values = self.bias(length, 0, 0)
            if values is None:
                lines.append('mid = {"SampleWithBias":{}}')
                continue
            every = [None if v == -INF else v for v in (values.get(t, 0) for t in range(VOCAB))]
            lines.append(f'mid = {{"SampleWithBias":{{"bias":{json.dumps(every)}}}}}')
        return "\n".join(lines)


@cache
def _module(wasm: bytes) -> wasmtime.Module:
    return wasmtime.Module(engine, with_exported_globals(wasm))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "c": lambda: NativeProgram(engine, _module(compile_guest(GUEST))),
    "python": lambda: PythonProgram(Biased),
    "aici": lambda: AiciProgram(engine, _module(puppet())),
}
RULES: dict[str, type[Rule]] = {"c": Rule, "python": Rule, "aici": ByLength}


def bent(logits: np.ndarray, values: dict[int, float] | None) -> np.ndarray:
    """Logits with a bias added."""
    added = np.array([(values or {}).get(t, 0.0) for t in range(VOCAB)], dtype=np.float32)
    return logits + added


def words(allowed: set[int] | None) -> np.ndarray | None:
    """The mask that allows these tokens; None: no mask."""
    if allowed is None:
        return None
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
