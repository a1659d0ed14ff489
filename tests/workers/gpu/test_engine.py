"""The engine in a process: preemption, prefixes, ends of sequences, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET, convert
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model, wrap_model

from . import shapes


@pytest.fixture
def engine(embedded: LoadedModel, overlap: bool) -> Engine:
    return Engine(embedded, EngineConfig(kv_cache_bytes=64 * 2**20, overlap=overlap))


def run(engine: Engine) -> list[TokenOutput]:
    """Runs steps until the engine has no work."""
    outputs: list[TokenOutput] = []
    for _ in range(100_000):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine still has work")


def tokens(outputs: Sequence[TokenOutput], request: int, seq: int = 0) -> list[int]:
    mine = [o for o in outputs if o.request == request and o.seq == seq and o.token is not None]
    assert [o.pos for o in mine] == list(range(len(mine)))
    return [o.token for o in mine if o.token is not None]


def encode(engine: Engine, text: str) -> list[int]:
    ids: list[int] = engine.loaded.tokenizer.encode(text)
    return ids


def test_the_same_tokens_with_preemption_and_small_chunks(
    embedded: LoadedModel, overlap: bool
) -> None:
    prompts = shapes.prompts(12, 200, 4096)
    sampling = Sampling(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True)

    def all_of(config: EngineConfig) -> tuple[list[list[int]], dict[str, float]]:
        engine = Engine(embedded, config)
        for i, prompt in enumerate(prompts):
            engine.add(i, prompt, sampling)
        outputs = run(engine)
        assert engine.stats()["kv_blocks_used"] == 0
        return [tokens(outputs, i) for i in range(len(prompts))], engine.stats()

    roomy, calm = all_of(EngineConfig(kv_cache_bytes=64 * 2**20))
    block_bytes = 64 * 2**20 // (calm["kv_blocks"] + 1)
    tight, stats = all_of(
        EngineConfig(
            kv_cache_bytes=int(17 * block_bytes),
            max_num_batched_tokens=48,
            max_num_seqs=12,
            overlap=overlap,
        )
    )
    assert calm["preemptions"] == 0
    assert stats["preemptions"] > 0
    assert tight == roomy


def test_a_preempted_score_reports_each_token_once(embedded: LoadedModel, overlap: bool) -> None:
    scored = [5 + 7 * i % 300 for i in range(700)]
    roomy = Engine(embedded, EngineConfig(kv_cache_bytes=64 * 2**20))
    roomy.score(0, [1, 2, 3], scored)
    block_bytes = 64 * 2**20 // (roomy.stats()["kv_blocks"] + 1)
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=int(46 * block_bytes), overlap=overlap))
    engine.score(0, [1, 2, 3], scored)
    found = engine.step()
    # The forks share the prompt, and then need more blocks than are left.
    sampling = Sampling(max_tokens=80, n=16, ignore_eos=True, temperature=1.0, seed=1)
    engine.add(1, [4] * 15, sampling, priority=1)
    found += run(engine)
    mine = [o for o in found if o.request == 0]
    assert engine.stats()["preemptions"] > 0
    assert [(o.pos, o.token) for o in mine] == list(enumerate(scored))
    assert [o.logprob for o in mine] == pytest.approx([o.logprob for o in run(roomy)], abs=1e-4)
    assert engine.stats()["kv_blocks_used"] == 0


def test_a_client_with_all_slots_gives_one_to_another_client(
    embedded: LoadedModel, overlap: bool
) -> None:
    prompts = shapes.prompts(6, 60, 4096)
    long = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    short = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)

    def make(max_num_seqs: int) -> Engine:
        config = EngineConfig(kv_cache_bytes=64 * 2**20, max_num_seqs=max_num_seqs, overlap=overlap)
        return Engine(embedded, config)

    engine = make(4)
    for number, prompt in enumerate(prompts[:5]):
        engine.add(number, prompt, long, client=1)
    outputs = [output for _ in range(8) for output in engine.step()]
    engine.add(5, prompts[5], short, client=2)
    outputs += run(engine)
    ends = [output.request for output in outputs if output.finish_reason is not None]
    assert ends[0] == 5
    assert sorted(ends) == list(range(6))
    assert engine.stats()["preemptions"] >= 1
    roomy = make(8)
    for number, prompt in enumerate(prompts):
        roomy.add(number, prompt, short if number == 5 else long)
    alone = run(roomy)
    for number, prompt in enumerate(prompts):
        wanted, got = tokens(alone, number), tokens(outputs, number)
        assert shapes.same_tokens(embedded.model, prompt, wanted, got)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {5: float("nan")}),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("nan")),
    ],
)
def test_a_parameter_that_is_not_a_number_is_refused(
    engine: Engine, field: str, value: object
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add(1, [5, 6], convert({field: value}, Sampling))
    assert (caught.value.code, caught.value.path) == (Code.INVALID_FIELD, f"$.{field}")
    assert caught.value.message == f"{field} has the value NaN; expected a number"
    assert not engine.has_requests


def test_a_prefix_that_was_seen_is_not_computed_again(engine: Engine) -> None:
    prompt = shapes.prompts(10, 300, 4096)[9]
    engine.add(1, prompt, Sampling(max_tokens=5, ignore_eos=True))
    first = tokens(run(engine), 1)
    assert engine.stats()["prefix_hit_tokens"] == 0
    engine.add(2, prompt, Sampling(max_tokens=5, ignore_eos=True))
    assert tokens(run(engine), 2) == first
    assert engine.stats()["prefix_hit_tokens"] >= 280


def test_it_ends_at_max_tokens_at_a_stop_token_and_at_the_context(engine: Engine) -> None:
    prompt = encode(engine, "def add(a, b):\n")
    engine.add(1, prompt, Sampling(max_tokens=6, ignore_eos=True))
    outputs = run(engine)
    assert len(tokens(outputs, 1)) == 6
    assert outputs[-1].finish_reason == "length"
    second = tokens(outputs, 1)[1]
    engine.add(2, prompt, Sampling(max_tokens=6, stop=[second], ignore_eos=True))
    outputs = run(engine)
    assert outputs[-1].finish_reason == "stop"
    assert tokens(outputs, 2)[-1] == second
    longest = engine.max_length
    engine.add(3, [5] * (longest - 2), Sampling(max_tokens=50, ignore_eos=True))
    outputs = run(engine)
    assert len(tokens(outputs, 3)) == 2
    assert outputs[-1].finish_reason == "length"


def test_the_models_own_end_of_sequence_ends_it_unless_ignored(engine: Engine) -> None:
    [eos] = engine.loaded.eos_token_ids
    force = {eos: 100.0}
    engine.add(1, [5, 6], Sampling(max_tokens=4, logit_bias=force), text=True)
    outputs = run(engine)
    assert [(o.token, o.finish_reason, o.text) for o in outputs] == [(eos, "stop", "")]
    engine.add(2, [5, 6], Sampling(max_tokens=4, logit_bias=force, ignore_eos=True))
    assert tokens(run(engine), 2) == [eos] * 4


def test_a_stop_string_is_found_across_token_borders(engine: Engine) -> None:
    prompt = encode(engine, "class Stack:\n")
    engine.add(1, prompt, Sampling(max_tokens=40, ignore_eos=True), text=True)
    whole = "".join(o.text or "" for o in run(engine))
    assert len(whole) > 20
    for start in (3, 7, 12):
        stop = whole[start : start + 4]
        engine.add(2, prompt, Sampling(max_tokens=40, stop=[stop], ignore_eos=True), text=True)
        outputs = run(engine)
        assert "".join(o.text or "" for o in outputs) == whole[: whole.index(stop)]
        assert outputs[-1].finish_reason == "stop"


def test_an_aborted_request_gives_its_blocks_back(engine: Engine) -> None:
    engine.add(1, [5] * 100, Sampling(max_tokens=500, n=3, temperature=1.0, ignore_eos=True))
    engine.add(2, [6] * 50, Sampling(max_tokens=5, ignore_eos=True))
    for _ in range(3):
        engine.step()
    ended = engine.abort(1)
    assert [(o.seq, o.finish_reason) for o in ended] == [(s, "cancelled") for s in range(3)]
    assert len([o for o in run(engine) if o.request == 2]) >= 1
    assert engine.stats()["kv_blocks_used"] == 0
    assert engine.abort(1) == []


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "path"),
    [
        ([], {}, Code.EMPTY_PROMPT, "$.prompt"),
        ([5] * 1024, {}, Code.PROMPT_TOO_LONG, "$.prompt"),
        ([5, 4096], {}, Code.TOKEN_OUT_OF_RANGE, "$.prompt[1]"),
        ([5], {"logit_bias": {9999: 1.0}}, Code.TOKEN_OUT_OF_RANGE, "$.logit_bias[0]"),
        ([5], {"stop": [9999]}, Code.TOKEN_OUT_OF_RANGE, "$.stop[0]"),
    ],
)
def test_a_wrong_request_is_refused_and_changes_nothing(
    engine: Engine, prompt: list[int], fields: dict[str, Any], code: Code, path: str
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.add(1, prompt, Sampling(**fields))
    assert (caught.value.code, caught.value.path) == (code, path)
    assert not engine.has_work


def test_a_sequence_whose_logits_are_nan_ends_alone(overlap: bool) -> None:
    model = shapes.make("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    config = EngineConfig(kv_cache_bytes=8 * 2**20, overlap=overlap)
    engine = Engine(wrap_model("broken", model), config)
    engine.add(1, [5, 6, 7], Sampling(max_tokens=5, ignore_eos=True))
    engine.add(2, [5, 13, 7], Sampling(max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    assert len(tokens(outputs, 1)) == 5
    [end] = [o for o in outputs if o.request == 2]
    assert end.finish_reason == "error"
    assert "NaN" in (end.error or "")
    assert engine.stats()["kv_blocks_used"] == 0
    # The block with NaN values has been cleared.
    for number in range(3, 40):
        engine.add(number, [5, 6, 7], Sampling(max_tokens=5, ignore_eos=True))
    again = run(engine)
    assert all(o.error is None for o in again)


def test_a_forward_that_raises_ends_only_the_sequence_that_causes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine._runner.launch

    def launch_or_fail(packed: Any, drawn: Any = None) -> Any:
        forward = real(packed, drawn)
        broken = engine._live.find(2, 0)
        written = set((packed.slot_mapping // 16).tolist())
        if broken is not None and written & set(broken.block_table.blocks):
            forward.work.wait()
            forward.work.error = RuntimeError("out of memory")
        return forward

    monkeypatch.setattr(engine._runner, "launch", launch_or_fail)
    for number in (1, 2, 3):
        engine.add(number, [5, 6, number], Sampling(max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    assert len(tokens(outputs, 1)) == len(tokens(outputs, 3)) == 5
    [end] = [o for o in outputs if o.request == 2]
    assert end.error == "the model failed: out of memory"


def test_a_row_that_cannot_be_sampled_ends_only_its_sequence(engine: Engine) -> None:
    def broken() -> list[TokenOutput]:
        for number in (1, 2, 3):
            engine.add(number, [5, 6, number], Sampling(max_tokens=5, ignore_eos=True))
        step = engine.begin()
        # The mask has the right size, but is not an array of words, so the sampler cannot unpack
        # it.
        engine._live.named(2, 0).mask = np.full(128, None)
        return [*engine.finish(step), *run(engine)]

    outputs = broken()
    assert len(tokens(outputs, 1)) == len(tokens(outputs, 3)) == 5
    [end] = [o for o in outputs if o.request == 2]
    assert (end.finish_reason, end.token) == ("error", None)
    assert (end.error or "").startswith("sampling failed: ")
    assert engine.stats()["kv_blocks_used"] == 0


def test_any_top_k_that_a_request_may_carry_is_sampled(engine: Engine) -> None:
    for number, top_k in ((1, engine.loaded.vocab_size), (2, 2**64 - 1)):
        sampling = Sampling(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True, top_k=top_k)
        engine.add(number, [5, 6], sampling)
    outputs = run(engine)
    assert tokens(outputs, 2) == tokens(outputs, 1)


def test_a_text_that_cannot_be_decoded_ends_only_its_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        sampling = Sampling(max_tokens=5, ignore_eos=True)
        engine.add(number, [5, 6, number], sampling, text=True)
    engine.score(4, [5, 6], [7, 8], text=True)

    def broken(token: int) -> Any:
        raise ValueError("no such byte")

    for number in (2, 4):
        text = engine._live.requests[number][0].text
        monkeypatch.setattr(text, "push", broken)
    outputs = run(engine)
    assert len(tokens(outputs, 1)) == len(tokens(outputs, 3)) == 5
    ends = {o.request: o for o in outputs if o.request in (2, 4)}
    assert [ends[n].error for n in (2, 4)] == ["decoding its text failed: no such byte"] * 2
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0


TEXTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    # With such a temperature, some tokens contain only a part of a character.
    {"temperature": 9.0, "seed": 5, "max_tokens": 150},
    {"temperature": 1.5, "seed": 6, "n": 3, "stop": ["a", "e "], "ignore_eos": False},
    {"temperature": 1.5, "seed": 7, "n": 2, "stop": ["nowhere in it"]},
]


def test_text_in_columns_is_that_of_outputs(engine: Engine) -> None:
    for number, options in enumerate(TEXTS):
        for request, more in ((number, {}), (100 + number, {"top_logprobs": 1})):
            sampling = Sampling(**{"max_tokens": 40, "ignore_eos": True} | options | more)
            engine.add(request, encode(engine, "def add(a, b):"), sampling, text=True)
    # The stop string needs the text, although the client requests none.
    prompt = encode(engine, "def add(a, b):\n    return")
    engine.add(50, prompt, Sampling(max_tokens=40, stop=["\n"], ignore_eos=True))
    rows: list[TokenOutput] = []
    found: dict[tuple[int, int], list[Any]] = {}
    while engine.has_work:
        outputs = engine.finish(engine.begin())
        if outputs.columns is not None:
            rows += outputs.columns
        for o in outputs:
            entry = (o.token, o.pos, o.text, o.finish_reason, o.stop, o.shortened)
            found.setdefault((o.request, o.seq), []).append(entry)
    assert {row.request for row in rows} == {*range(len(TEXTS)), 50}
    assert all((row.text is UNSET) == (row.request == 50) for row in rows)
    for number, options in enumerate(TEXTS):
        for seq in range(options.get("n", 1)):
            assert found[number, seq] == found[100 + number, seq]
            text = "".join(text or "" for _, _, text, *_ in found[number, seq])
            sampled = [token for token, *_ in found[number, seq]]
            if found[number, seq][-1][3] == "length":
                assert text == engine.loaded.tokenizer.decode(sampled, skip_special_tokens=True)
    assert any("\ufffd" in (row.text or "") for row in rows)
    assert [found[2, seq][-1][3] for seq in range(3)].count("stop") > 0
    assert found[50, 0][-1][3:5] == ("stop", "\n")


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_model(str(tmp_path))
