"""Stage 4 of ``gpu_check.py``: checks a small model's tokens with forks, splices, masks and drafts.

The engine may wait for the device only to read the tokens of a step. The stage fails if the engine
waits for another reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from _gpu_reference import Reference
from _gpu_world import Texts, World, greedy, no_waiting, no_warnings, random_prompts, run_to_end
from tokenbus.clients import Client
from tokenbus.inprocess import InProcess
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine.engine import Engine, PendingStep
from tokenbus.workers.gpu.model.loader import LoadedModel

LENGTHS = (1, 2, 15, 16, 17, 64, 255, 256, 257, 600)
DRY_LENGTHS = (1, 16, 17, 64, 257)
NEW = 24
EVEN, ODD = 0x55555555, 0xAAAAAAAA
REGEX = "[a-z]{3}( [a-z]{3}){4}"


def run(world: World) -> None:
    """Runs the scenarios with a small model, and requests under a constraint."""
    loaded = world.small()
    checks = Checks(world, loaded)
    scenarios: dict[str, Callable[[], None]] = {
        "generate": checks.generate,
        "prefixes_and_chunks": checks.prefixes_and_chunks,
        "forks": checks.forks,
        "splices": checks.splices,
        "masks": checks.masks,
        "deferred_and_suspended": checks.deferred_and_suspended,
        "drafts": checks.drafts,
        "draft_model": checks.draft_model,
    }
    for name, scenario in scenarios.items():
        seconds = world.timed(scenario)
        world.record(name, seconds)
    world.record("controllers", world.timed(lambda: _controllers(world)))


class Checks:
    """The scenarios of one model."""

    def __init__(self, world: World, loaded: LoadedModel) -> None:
        self._world, self._loaded = world, loaded
        self._reference = Reference(world, loaded)
        self._engine = world.engine(loaded)
        vocab = loaded.vocab_size
        self._prompts = [
            random_prompts(n, 1, n, vocab)[0] for n in (DRY_LENGTHS if world.dry else LENGTHS)
        ]

    def generate(self) -> None:
        """Compares the tokens of a batch with those of transformers' ``generate``. The prompts have
        different lengths."""
        self._add_all()
        got = self._run()
        same = 0
        for i, prompt in enumerate(self._prompts):
            wanted = self._reference.generate(prompt, NEW)
            same += self._reference.check_same(f"prompt {i}", prompt, wanted, got[i, 0])
        self._world.record("sequences_like_generate", same, of=len(self._prompts))

    def prefixes_and_chunks(self) -> None:
        """Checks prompts with a cached prefix, and prompts whose prefill takes several steps."""
        long = random_prompts(9, 1, 900, self._loaded.vocab_size)[0]
        engine = self._world.engine(self._loaded, max_num_batched_tokens=128)
        for i in range(3):
            engine.add(i, long[: 900 - i], greedy(NEW))
            got = self._run(engine=engine)
            self._reference.check_greedy(f"prefix {i}", long[: 900 - i], got[i, 0])
        hits = engine.stats()["prefix_hit_tokens"]
        self._world.expect(hits > 0, "no prompt had a cached prefix")

    def forks(self) -> None:
        """Checks that each token of a forked greedy sequence is the most likely token. Also checks
        that the two forks of a sampled sequence differ."""
        for i, prompt in enumerate(self._prompts):
            sampled = Sampling(max_tokens=NEW, temperature=1.0, ignore_eos=True)
            self._engine.add(i, prompt, greedy(NEW) if i % 2 == 0 else sampled)
        forked: set[int] = set()

        def decide(step: PendingStep, got: Texts) -> None:
            for request, seq in step.ready:
                if request not in forked and len(got.get((request, seq), ())) >= request % 3:
                    self._engine.fork(request, seq, 2)
                    forked.add(request)

        got = self._run(decide)
        for i, prompt in enumerate(self._prompts):
            texts = [got[i, seq] for seq in range(3)]
            lengths = [len(text) for text in texts]
            # The outputs of the forks do not include the tokens before the fork.
            shared = NEW - min(lengths)
            full = [texts[0][: NEW - n] + text for n, text in zip(lengths, texts, strict=True)]
            self._world.expect(shared <= 3, f"fork {i}: {lengths} tokens")
            if i % 2 == 0:
                for seq, text in enumerate(full):
                    self._reference.check_greedy(f"fork {i}.{seq}", prompt, text)
            else:
                self._world.expect(full[1] != full[2], f"fork {i}: the forks are equal")

    def splices(self) -> None:
        """Checks splices. A splice removes tokens and appends others. After it, the sequence must
        continue with the most likely tokens."""
        self._add_all()
        added, done = [5, 6, 7], set[int]()

        def decide(step: PendingStep, got: Texts) -> None:
            for request, seq in step.ready:
                if request not in done and len(got.get((request, seq), ())) == 4:
                    self._engine.splice(request, seq, 2, added)
                    done.add(request)

        got = self._run(decide)
        places = [0, 1, *range(5, NEW)]
        for i, prompt in enumerate(self._prompts):
            text = got[i, 0]
            self._world.expect(text[2:5] == added, f"splice {i}: {text[:6]}")
            self._reference.check_greedy(f"splice {i}", prompt, text, places)

    def masks(self) -> None:
        """Checks masks that alternately allow only even and only odd token ids. The last third of
        each sequence has no masks."""
        self._add_all()
        words = [np.full(self._engine.mask_words, w, dtype=np.uint32) for w in (EVEN, ODD)]
        masked = 2 * NEW // 3

        def decide(step: PendingStep, got: Texts) -> None:
            for request, seq in step.ready:
                count = len(got.get((request, seq), ()))
                if count < masked:
                    self._engine.set_mask(request, seq, words[count % 2])

        got = self._run(decide)
        every = torch.ones(self._loaded.vocab_size, dtype=torch.bool)
        parity = torch.arange(self._loaded.vocab_size) % 2
        allowed = [parity == i % 2 if i < masked else every for i in range(NEW)]
        for i, prompt in enumerate(self._prompts):
            self._reference.check_greedy(f"masks {i}", prompt, got[i, 0], allowed=allowed)

    def deferred_and_suspended(self) -> None:
        """Checks sequences that leave the batch and rejoin it."""
        self._add_all()
        engine, left = self._engine, dict.fromkeys(range(len(self._prompts)), 3)
        difference: list[tuple[int, int, bool]] = []

        def decide(step: PendingStep, got: Texts) -> None:
            for request, seq, deferred in difference:
                (engine.reschedule if deferred else engine.resume)(request, seq)
            difference.clear()
            for request, seq in list(step.ready)[1:]:
                if left[request] and (len(got.get((request, seq), ())) + request) % 5 == 0:
                    left[request] -= 1
                    deferred = request % 2 == 0
                    (engine.defer if deferred else engine.suspend)(request, seq)
                    difference.append((request, seq, deferred))

        got = self._run(decide)
        for i, prompt in enumerate(self._prompts):
            self._world.expect(len(got[i, 0]) == NEW, f"sequence {i}: {len(got[i, 0])} tokens")
            self._reference.check_greedy(f"deferred {i}", prompt, got[i, 0])

    def drafts(self) -> None:
        """Checks the drafts of repetitive texts. These drafts are copied from the earlier text of
        the sequence."""
        engine = self._world.engine(self._loaded, speculation=True, max_num_seqs=8)
        self._check_drafts("drafts", engine)

    def draft_model(self) -> None:
        """Checks drafts of a draft model. The model is its own draft model."""
        config = {"speculation": True, "max_num_seqs": 8}
        engine = self._world.engine(self._loaded, draft_model=self._loaded, **config)
        model = engine._speculation._model
        assert model is not None
        # The engine does not use a draft model that is as large as the model. So the draft model's
        # cost is set to that of a small model. Drafts from earlier text are turned off.
        model.forward_cost = 0.01
        engine._speculation._worthwhile = lambda sequences, rows: []  # type: ignore[method-assign]
        accepted = self._check_drafts("draft model", engine)
        self._world.expect(accepted > 0, "no token of the draft model was accepted")

    def _check_drafts(self, what: str, engine: Engine) -> float:
        prompts = [p * 6 for p in random_prompts(3, 4, 10, self._loaded.vocab_size)]
        for i, prompt in enumerate(prompts):
            engine.add(i, prompt, greedy(2 * NEW))
        got = self._run(engine=engine)
        for i, prompt in enumerate(prompts):
            self._reference.check_greedy(f"{what} {i}", prompt, got[i, 0])
        metrics = engine.metrics()
        drafted = metrics["spec_decode_num_draft_tokens"]
        accepted = metrics["spec_decode_num_accepted_tokens"]
        assert isinstance(accepted, int | float)
        self._world.record(f"{what}_accepted", accepted, of=drafted)
        self._world.expect(bool(drafted), f"{what}: no tokens were drafted")
        return accepted

    def _add_all(self) -> None:
        for i, prompt in enumerate(self._prompts):
            self._engine.add(i, prompt, greedy(NEW))

    def _run(
        self,
        decide: Callable[[PendingStep, Texts], None] = lambda step, got: None,
        engine: Engine | None = None,
    ) -> Texts:
        """Runs all requests to their ends. A warning is recorded as a fault. An implicit wait for
        the device raises RuntimeError."""
        with no_warnings(self._world), no_waiting(self._world):
            return run_to_end(engine or self._engine, decide)


def _controllers(world: World) -> None:
    """Checks requests under a constraint through a bus in this process."""
    settings = msgspec.structs.replace(
        Settings(), device=world.device.type, kv_cache_bytes=world.cache_bytes, max_running=32
    )
    options = {"max_tokens": 40, "controller": "regex", "controller_arg": REGEX}
    with (
        InProcess(settings, controllers=True) as system,
        Client(system.address) as client,
        no_warnings(world),
        no_waiting(world),
    ):
        streams = [client.generate(f"The {i} ", **options) for i in range(8)]  # type: ignore[arg-type]
        texts = [stream.text() for stream in streams]
    for text in texts:
        world.expect(re.fullmatch(REGEX, text) is not None, f"does not match the regex: {text!r}")
