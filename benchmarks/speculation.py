"""Compares the times of decoding with and without drafts, for repetitive and unrepetitive texts.

The model is a Llama with 21 million parameters. Its layers are random. Its output layer is fitted
so that the model continues each prompt with a given text: source code with replaced names, records
in JSON, or prose. Each run has a new session, except in ``same_session``. Everything runs in one
process, and sampling is greedy. Runs without and with drafts take turns, and must have equal tokens
and ends. ``logprob_difference`` is the largest difference of their log-probabilities.
"""

from __future__ import annotations

import inspect
import re
import statistics
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _models import llama
from _report import arguments, report
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import load_model, wrap_model

TEXTS = Path(__file__).parent / "texts"
BATCH = 32
TURNS = 4
"""In a round, a text runs this number of times without and with drafts. The two take turns in
running first, because the machine's speed changes within the half second of a run."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""The shape of the draft model. Its output layer is fitted to the prose only."""
RENAMED = {"chunks": "pieces", "cur_line": "current", "cur_len": "size", "width": "columns"}
Text = tuple[list[int], list[int]]
"""A prompt, and the tokens that follow it."""


def texts(new: int) -> dict[str, Text]:
    """The texts by name, tokenized by the embedded model's tokenizer. ``new`` tokens follow each
    prompt."""
    tokenizer = load_model("embedded").tokenizer

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False).input_ids
        return ids

    source = inspect.getsource(textwrap.TextWrapper._wrap_chunks)
    edited = re.sub("|".join(RENAMED), lambda found: RENAMED[found[0]], source)
    rows = (TEXTS / "records.json").read_text().splitlines(keepends=True)
    prose = (TEXTS / "harbour.txt").read_text()
    half = prose.index("\n", len(prose) // 4)
    return {
        "code": (tokens(f"{source}\n# The same, with better names:\n"), tokens(edited)[:new]),
        "json": (tokens("".join(rows[:4])), tokens("".join(rows[4:]))[:new]),
        "prose": (tokens(prose[:half]), tokens(prose[half:])[:new]),
    }


def writer(wanted: Sequence[Text], **shape: int) -> Any:
    """A Llama that continues each prompt with its text. Its output layer is fitted to the states of
    the last layer by multi-class hinge regression. ``shape``: values that differ from the default
    shape."""
    model = llama(initializer_range=0.1, **shape)
    states, labels = [], []
    with torch.inference_mode():
        for prompt, text in wanted:
            ids = torch.tensor([*prompt, *text])
            hidden = model.model(ids.unsqueeze(0)).last_hidden_state[0]
            states.append(hidden[len(prompt) - 1 : -1])
            labels.append(ids[len(prompt) :])
    state = torch.cat(states).clone()
    classes, label = torch.cat(labels).unique(return_inverse=True)
    weight = torch.zeros(len(classes), state.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.05)
    # The padding adds a column of zeros: the scores of all tokens without a row in ``weight``.
    for _ in range(1000):
        scores = torch.nn.functional.pad(state @ weight.T, (0, 1))
        loss = torch.nn.functional.multi_margin_loss(scores, label, margin=2.0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not loss.item():
            break
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[classes] = weight
    return model


class Side:
    """An engine with or without drafts. ``run`` generates several texts together."""

    def __init__(self, loaded: Any, speculation: bool, draft_model: Any = None) -> None:
        config = EngineConfig(kv_cache_bytes=512 * 2**20, speculation=speculation)
        self.engine = Engine(loaded, config, draft_model)
        self._next = 0

    def run(
        self, wanted: Sequence[Text], session: int | None
    ) -> tuple[float, dict[int, list[TokenOutput]]]:
        """The seconds of a run, and the outputs of each text. ``session``: None for a new
        session."""
        first = self._next
        client = 1 + first if session is None else session
        for prompt, text in wanted:
            sampling = Sampling(max_tokens=len(text), ignore_eos=True)
            self.engine.add(self._next, prompt, sampling, client=client)
            self._next += 1
        found: dict[int, list[TokenOutput]] = {i: [] for i in range(len(wanted))}
        started = time.perf_counter()
        steps = []
        while self.engine.has_work:
            steps.append(self.engine.step())
        seconds = time.perf_counter() - started
        for outputs in steps:
            for output in outputs:
                found[output.request - first].append(output)
        return seconds, found


def check(plain: dict[int, list[TokenOutput]], drafted: dict[int, list[TokenOutput]]) -> float:
    """The largest difference between a token's log-probabilities in both runs. Fails if tokens or
    ends differ."""
    difference = 0.0
    for i, expected in plain.items():
        found = drafted[i]
        assert [o.token for o in found] == [o.token for o in expected]
        assert [o.finish_reason for o in found] == [o.finish_reason for o in expected]
        pairs = zip(expected, found, strict=True)
        difference = max(difference, *(abs((a.logprob or 0) - (b.logprob or 0)) for a, b in pairs))
    return difference


def main() -> None:
    """Measures and reports."""
    given = arguments(__doc__)
    rounds, new = (2, 120) if given.quick else (5, 360)
    wanted = texts(new)
    loaded = wrap_model("writer", writer(list(wanted.values())))
    sides = [Side(loaded, False), Side(loaded, True)]
    small = wrap_model("small", writer([wanted["prose"]], **SMALL))
    with_model = Side(loaded, True, small)
    mixed = [(prompt, text[: new // 3]) for prompt, text in wanted.values()]
    loads = {name: [text] for name, text in wanted.items()}
    loads["same_session"] = [wanted["code"]]
    loads["batch32"] = [mixed[i % len(mixed)] for i in range(BATCH)]
    loads["batch32_repetitive"] = [mixed[i % 2] for i in range(BATCH)]
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in loads}
    loads["draft_model"] = [wanted["prose"]]
    seconds["draft_model"] = []
    difference = 0.0
    for number in range(rounds + 1):
        for name, load in loads.items():
            session = 0 if name == "same_session" else None
            both = sides if name != "draft_model" else [sides[0], with_model]
            sums = [0.0, 0.0]
            for turn in range(TURNS if len(load) == 1 else 1):
                found: dict[int, dict[int, list[TokenOutput]]] = {}
                for i in (0, 1) if turn % 2 == 0 else (1, 0):
                    took, found[i] = both[i].run(load, session)
                    sums[i] += took
                difference = max(difference, check(found[0], found[1]))
                if len(load) == 1:
                    assert [o.token for o in found[0][0]] == load[0][1]
            # The first round fills the prefix cache.
            if number:
                seconds[name].append(tuple(sums))

    def speedup(*names: str) -> float:
        """The ratio of the time without drafts to the time with drafts; the median of the
        rounds."""
        each = zip(*(seconds[name] for name in names), strict=True)
        sums = [[sum(side) for side in zip(*times, strict=True)] for times in each]
        return statistics.median(off / on for off, on in sums)

    metrics = sides[1].engine.metrics()
    drafted = float(metrics["spec_decode_num_draft_tokens"])  # type: ignore[arg-type]
    accepted = float(metrics["spec_decode_num_accepted_tokens"])  # type: ignore[arg-type]
    results = {
        "repetitive_speedup": speedup("code", "json"),
        "code_speedup": speedup("code"),
        "json_speedup": speedup("json"),
        "same_session_speedup": speedup("same_session"),
        "unrepetitive_speedup": speedup("prose"),
        "draft_model_speedup": speedup("draft_model"),
        "batch32_speedup": speedup("batch32"),
        "batch32_repetitive_speedup": speedup("batch32_repetitive"),
        "accepted_of_drafted": accepted / drafted,
        "logprob_difference": difference,
    }
    notes = {
        "repetitive_speedup": "speedup for the code edit and JSON, one stream; at least 2",
        "same_session_speedup": "speedup for the code edit in the session of an earlier run",
        "unrepetitive_speedup": "speedup for prose, one stream; at least 0.97",
        "draft_model_speedup": "speedup for prose with a draft model of a third of the weights",
        "batch32_speedup": "speedup for all three texts, 32 streams; at least 1",
        "logprob_difference": "largest difference of log-probabilities; at most 1e-4",
    }
    report(results, notes, given.json)


if __name__ == "__main__":
    main()
