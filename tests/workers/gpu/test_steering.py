"""Forks, splices, suspensions and masks give the same tokens as plain requests, and leave no
block."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model

from ...counts import rounds
from ...worlds.engine_client import (
    GREEDY,
    LENGTH,
    PROMPT,
    SEEDED,
    ClientView,
    alone,
    only,
    run,
)
from .shapes import tiny_model

STEPS = rounds(700, 50_000)


@pytest.fixture
def engine(embedded: LoadedModel, overlap: bool) -> Engine:
    return Engine(embedded, EngineConfig(kv_cache_bytes=32 * 2**20, overlap=overlap))


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_of_a_greedy_sequence_gets_the_same_tokens(
    engine: Engine, embedded: LoadedModel
) -> None:
    wanted = alone(embedded, PROMPT, GREEDY)
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    for _ in range(7):
        client.take(engine.step())
    assert engine.fork(1, 0, 3) == [1, 2, 3]
    run(engine, client)
    assert client.tokens == dict.fromkeys(range(4), wanted)
    assert engine.stats()["kv_blocks_used"] == 0


def test_forks_of_a_sampled_sequence_are_sampled_independently(
    engine: Engine, embedded: LoadedModel
) -> None:
    engine.add(1, PROMPT, SEEDED)
    client = ClientView()
    for _ in range(7):
        client.take(engine.step())
    engine.fork(1, 0, 3)
    run(engine, client)
    assert len({tuple(t) for t in client.tokens.values()}) == 4
    assert len({tuple(t[:7]) for t in client.tokens.values()}) == 1
    assert client.tokens[0] == alone(embedded, PROMPT, SEEDED), "the forks have changed the parent"


def test_forks_between_begin_and_finish_share_the_logits_and_need_no_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(1, PROMPT, SEEDED)
    client = ClientView()
    step = engine.begin()
    assert step.ready == [(1, 0)]
    assert step.logits is not None
    rows = len(step.logits)
    engine.fork(1, 0, 7)
    assert len(step.ready) == 8
    assert len(step.logits) == rows
    client.take(engine.finish(step).as_outputs())
    assert [len(t) for t in client.tokens.values()] == [1] * 8
    run(engine, client)
    assert len({tuple(t) for t in client.tokens.values()}) > 4


def test_forks_of_forks(engine: Engine, embedded: LoadedModel) -> None:
    wanted = alone(embedded, PROMPT, GREEDY)
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    for seq in range(4):
        client.take(engine.step())
        assert engine.fork(1, seq, 1) == [seq + 1]
    run(engine, client)
    assert set(client.reasons.values()) == {"length"}
    assert client.tokens == dict.fromkeys(range(5), wanted)


def test_too_many_forks_end_the_sequence_and_nothing_else(
    engine: Engine, embedded: LoadedModel
) -> None:
    engine.add(1, PROMPT, GREEDY)
    engine.add(2, PROMPT[:20], GREEDY)
    outputs = engine.step()
    assert engine.fork(1, 0, 128) == []
    while engine.has_work:
        outputs += engine.step()
    [end] = [o for o in outputs if o.request == 1 and o.finish_reason]
    assert "128 are allowed" in (end.error or "")
    other = [o.token for o in outputs if o.request == 2]
    assert other == alone(embedded, PROMPT[:20], GREEDY)
    assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("numbers", [[0], [-1], [2, 2]])
def test_forks_cannot_take_ids_that_are_in_use(engine: Engine, numbers: list[int]) -> None:
    engine.add(1, PROMPT, GREEDY)
    outputs = engine.step()
    with pytest.raises(RequestError, match="cannot be numbered"):
        engine.fork(1, 0, len(numbers), numbers)
    while engine.has_work:
        outputs += engine.step()
    assert {o.seq for o in outputs} == {0}
    assert engine.stats()["kv_blocks_used"] == 0


# --- splices --------------------------------------------------------------------------------------


def test_what_follows_a_splice_is_what_follows_that_text(
    engine: Engine, embedded: LoadedModel
) -> None:
    forced = [100, 200, 300, 400, 500]
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    for _ in range(6):
        client.take(engine.step())
    kept = client.tokens[0][:4]
    engine.splice(1, 0, 2, forced)
    run(engine, client)
    head = [*kept, *forced]
    assert client.tokens[0][: len(head)] == head
    rest = Sampling(max_tokens=LENGTH - len(head), ignore_eos=True)
    assert client.tokens[0][len(head) :] == alone(embedded, PROMPT + head, rest)


@pytest.mark.parametrize(("drop", "forced"), [(0, [7]), (3, []), (1, [9] * 20), (6, [8])])
def test_splices_of_every_kind(
    engine: Engine, embedded: LoadedModel, drop: int, forced: list[int]
) -> None:
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    engine.add(1, PROMPT, sampling)
    client = ClientView()
    for _ in range(6):
        client.take(engine.step())
    head = [*client.tokens[0][: 6 - drop], *forced]
    engine.splice(1, 0, drop, forced)
    run(engine, client)
    rest = Sampling(max_tokens=30 - len(head), ignore_eos=True)
    assert client.tokens[0] == head + alone(embedded, PROMPT + head, rest)


def test_a_seeded_splice_gives_the_same_tokens_alone_and_in_a_batch(
    embedded: LoadedModel, overlap: bool
) -> None:
    def spliced(others: int) -> list[int]:
        config = EngineConfig(
            kv_cache_bytes=32 * 2**20,
            max_num_batched_tokens=40 if others else 2048,
            overlap=overlap,
        )
        engine = Engine(embedded, config)
        engine.add(0, PROMPT, SEEDED, priority=1)
        for number in range(1, others + 1):
            engine.add(number, PROMPT[: 5 * number], SEEDED)
        mine: list[TokenOutput] = []
        while sum(o.token is not None for o in mine) < 6:
            mine += [o for o in engine.step() if o.request == 0]
        engine.splice(0, 0, 2, [100, 200, 300])
        while engine.has_work:
            mine += [o for o in engine.step() if o.request == 0]
        client = ClientView()
        client.take(mine)
        return client.tokens[0]

    assert spliced(0) == spliced(5)


def test_a_splice_between_begin_and_finish_replaces_the_sampling(
    engine: Engine, embedded: LoadedModel
) -> None:
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    step = engine.begin()
    engine.splice(1, 0, 0, [100, 200])
    assert step.ready == []
    client.take(engine.finish(step).as_outputs())
    assert client.tokens[0] == [100, 200]
    run(engine, client)
    rest = Sampling(max_tokens=LENGTH - 2, ignore_eos=True)
    assert client.tokens[0][2:] == alone(embedded, [*PROMPT, 100, 200], rest)


def test_the_text_of_a_spliced_sequence_is_that_of_its_tokens(engine: Engine) -> None:
    tokenizer = engine.loaded.tokenizer
    prompt = tokenizer.encode("def f(x):\n")
    engine.add(1, prompt, GREEDY, text=True)
    client = ClientView()
    for _ in range(5):
        client.take(engine.step())
    engine.splice(1, 0, 3, tokenizer.encode("    return é + x"))
    run(engine, client)
    assert "".join(client.texts[0]) == tokenizer.decode(client.tokens[0])


def test_the_text_of_a_fork_that_drops_a_healed_token_begins_after_the_prompt(
    engine: Engine,
) -> None:
    """With token healing, the generated tokens repeat the end of the prompt."""
    tokenizer = engine.loaded.tokenizer
    *prompt, healed = tokenizer.encode("def f(x):\n    return")
    engine.add(1, prompt, GREEDY, text=True, healed=engine.healed([*prompt, healed]))
    client = ClientView()
    client.take(engine.step())
    engine.fork(1, 0, 1)
    for seq in (0, 1):
        engine.splice(1, seq, 1, [healed, *tokenizer.encode(" é")])
    run(engine, client)
    for seq in (0, 1):
        assert "".join(client.texts[seq]) == tokenizer.decode(client.tokens[seq][1:])


def test_a_splice_ends_the_sequence_at_its_stop_and_at_its_length(engine: Engine) -> None:
    tokenizer = engine.loaded.tokenizer
    stop = Sampling(max_tokens=30, ignore_eos=True, stop=["END"])
    engine.add(1, PROMPT, stop, text=True)
    client = ClientView()
    client.take(engine.step())
    engine.splice(1, 0, 0, tokenizer.encode("some END of it"))
    run(engine, client)
    assert client.reasons[0] == "stop"
    assert "".join(client.texts[0]).endswith("some ")
    engine.add(2, PROMPT, Sampling(max_tokens=4, ignore_eos=True))
    client = ClientView()
    client.take(engine.step())
    engine.splice(2, 0, 0, [7] * 50)
    run(engine, client)
    assert client.reasons[0] == "length"
    assert client.tokens[0][1:] == [7] * 3


@pytest.mark.parametrize(("drop", "tokens", "says"), [(9, [], "9 tokens"), (0, [9999], "9999")])
def test_a_splice_that_is_not_valid_ends_its_sequence_with_a_clear_error(
    engine: Engine, drop: int, tokens: list[int], says: str
) -> None:
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    client.take(engine.step())
    engine.splice(1, 0, drop, tokens)
    run(engine, client)
    assert client.reasons[0] == "error"
    assert says in client.errors[0]
    assert engine.stats()["kv_blocks_used"] == 0


# --- masks, suspension, deferred sequences --------------------------------------------------------


def test_a_mask_holds_for_one_token(engine: Engine) -> None:
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    engine.set_mask(1, 0, only(4096, 77))
    client.take(engine.step())
    client.take(engine.step())
    assert client.tokens[0][0] == 77
    assert client.tokens[0][1] != 77


def test_an_empty_mask_ends_its_sequence_only(engine: Engine, embedded: LoadedModel) -> None:
    engine.add(1, PROMPT, GREEDY)
    engine.add(2, PROMPT[:9], GREEDY)
    engine.set_mask(1, 0, only(4096))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    [end] = [o for o in outputs if o.request == 1]
    assert "forbid all tokens" in (end.error or "")
    assert [o.token for o in outputs if o.request == 2] == alone(embedded, PROMPT[:9], GREEDY)


def test_a_mask_of_the_wrong_size_is_refused(engine: Engine) -> None:
    engine.add(1, PROMPT, GREEDY)
    with pytest.raises(RequestError, match=r"expected \(128,\)"):
        engine.set_mask(1, 0, np.zeros(3, dtype=np.uint32))
    with pytest.raises(RequestError, match="no live sequence"):
        engine.set_mask(9, 0, None)


def test_a_suspended_sequence_is_not_scheduled_and_continues_with_the_same_tokens(
    engine: Engine, embedded: LoadedModel
) -> None:
    for when in ("between steps", "between halves"):
        engine.add(1, PROMPT, SEEDED)
        engine.add(2, PROMPT[:9], GREEDY)
        client, other = ClientView(), ClientView()

        def sort(
            outputs: list[TokenOutput], client: ClientView = client, other: ClientView = other
        ) -> None:
            client.take([o for o in outputs if o.request == 1])
            other.take([o for o in outputs if o.request == 2])

        for _ in range(5):
            sort(engine.step())
        step = engine.begin()
        if when == "between halves":
            engine.suspend(1, 0)
        sort(engine.finish(step).as_outputs())
        engine.suspend(1, 0)
        count = len(client.tokens[0])
        for _ in range(4):
            sort(engine.step())
        assert len(client.tokens[0]) == count
        assert engine.stats()["suspended"] == 1
        engine.resume(1, 0)
        while engine.has_work:
            sort(engine.step())
        assert client.tokens[0] == alone(embedded, PROMPT, SEEDED)
        assert other.tokens[0] == alone(embedded, PROMPT[:9], GREEDY)


def test_there_is_no_work_while_every_sequence_is_suspended(engine: Engine) -> None:
    engine.add(1, PROMPT, GREEDY)
    engine.step()
    engine.suspend(1, 0)
    assert not engine.has_work
    assert engine.abort(1)[0].finish_reason == "cancelled"
    assert engine.stats()["kv_blocks_used"] == 0


def test_deferring_delays_that_sequence_only(engine: Engine, embedded: LoadedModel) -> None:
    engine.add(1, PROMPT, SEEDED)
    engine.add(2, PROMPT[:9], GREEDY)
    outputs: list[TokenOutput] = []
    deferred_at = -1
    for number in itertools.count():
        step = engine.begin()
        if (1, 0) in step.ready:
            if deferred_at < 0:
                engine.defer(1, 0)
            deferred_at = number if deferred_at < 0 else -1
        outputs += engine.finish(step)
        if not engine.has_requests:
            break
        if deferred_at >= 0 and number - deferred_at == 2:
            engine.reschedule(1, 0)
    mine = [o.token for o in outputs if o.request == 1]
    assert mine == alone(embedded, PROMPT, SEEDED)
    order = [o.request for o in outputs]
    assert order.index(1) < LENGTH - 1
    assert [o.token for o in outputs if o.request == 2] == alone(embedded, PROMPT[:9], GREEDY)


def test_forks_without_a_slot_can_be_deferred_too(embedded: LoadedModel, overlap: bool) -> None:
    config = EngineConfig(kv_cache_bytes=32 * 2**20, max_num_seqs=2, overlap=overlap)
    engine = Engine(embedded, config)
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    step = engine.begin()
    engine.fork(1, 0, 4)
    for seq in range(1, 5):
        engine.defer(1, seq)
    client.take(engine.finish(step).as_outputs())
    client.take(engine.step())
    for seq in range(1, 5):
        engine.reschedule(1, seq)
    run(engine, client)
    assert client.tokens == {seq: alone(embedded, PROMPT, GREEDY) for seq in range(5)}


def test_aborting_reports_forks_before_their_ends(engine: Engine) -> None:
    engine.add(1, PROMPT, GREEDY)
    engine.step()
    engine.fork(1, 0, 2)
    outputs = engine.abort(1)
    assert [(o.seq, o.parent) for o in outputs if o.parent is not None] == [(1, 0), (2, 0)]
    assert [o.seq for o in outputs[2:] if o.finish_reason == "cancelled"] == [0, 1, 2]
    assert not engine.has_work
    engine.add(2, PROMPT, GREEDY)
    with pytest.raises(RequestError, match="expected at least 1"):
        engine.fork(2, 0, 0)


def test_ending_one_sequence_leaves_its_forks(engine: Engine) -> None:
    engine.add(1, PROMPT, GREEDY)
    client = ClientView()
    client.take(engine.step())
    engine.fork(1, 0, 1)
    engine.end(1, 0)
    run(engine, client)
    assert client.reasons == {0: "controller", 1: "length"}


# --- long random load -----------------------------------------------------------------------------


def _tiny(overlap: bool) -> Engine:
    loaded = wrap_model("tiny", tiny_model())
    block = 16 * 2 * 8 * 4
    return Engine(
        loaded,
        EngineConfig(
            kv_cache_bytes=40 * block,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            max_forks=20,
            overlap=overlap,
        ),
    )


def _random_operation(engine: Engine, rng: random.Random, live: list[tuple[int, int]]) -> None:
    """Applies a random operation to a live sequence. The operation may be invalid."""
    request, seq = rng.choice(live)
    kind = rng.randrange(8)
    if kind == 0:
        engine.fork(request, seq, rng.choice([1, 1, 2, 30]))
    elif kind == 1:
        engine.splice(request, seq, rng.randrange(3), [rng.randrange(64)] * rng.randrange(1, 20))
    elif kind == 2:
        engine.suspend(request, seq)
    elif kind == 3:
        engine.abort(request)
    elif kind == 4:
        engine.set_mask(request, seq, only(64, *rng.sample(range(64), rng.randrange(4))))
    elif kind == 5:
        engine.end(request, seq)
    elif kind == 6:
        engine.defer(request, seq)
    else:
        engine.resume(request, seq)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Uses one thread, because the tensors are too small for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_steps_of_random_load_leak_nothing_and_starve_no_sequence(overlap: bool) -> None:
    engine = _tiny(overlap)
    rng = random.Random(1)
    arrived: dict[int, int] = {}
    waited = 0
    request = 0
    for number in range(STEPS):
        if rng.random() < 0.25 and len(engine._live.requests) < 24:
            request += 1
            prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 120))]
            sampling = Sampling(max_tokens=rng.randrange(1, 40), temperature=1.0, seed=request)
            engine.add(request, prompt, sampling, priority=rng.randrange(2), client=request % 3)
            arrived[request] = number
        step = engine.begin()
        for _ in range(rng.randrange(2)):
            live = [(r, s) for r, held in engine._live.requests.items() for s in held]
            if live:
                _random_operation(engine, rng, live)
        engine.finish(step)
        if number % 50 == 0:
            _resume_all(engine)
            for key in [key for key in arrived if key not in engine._live.requests]:
                waited = max(waited, number - arrived.pop(key))
    for _ in range(2000):
        _resume_all(engine)
        if not engine.has_work:
            break
        engine.step()
    assert not engine._live.requests
    assert engine.stats()["kv_blocks_used"] == 0
    assert request > STEPS // 50
    assert waited < rounds(1000, 5000), "a sequence waited for too long"


def _resume_all(engine: Engine) -> None:
    for sequence in list(engine._scheduler.suspended):
        engine.resume(sequence.request, sequence.seq)
    for request, held in engine._live.requests.items():
        for seq in held:
            engine.reschedule(request, seq)
