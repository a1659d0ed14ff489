"""``POST /generate``: token ids in, token ids and log-probabilities out, in SGLang's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenbus.clients import Client, GeneratedSequence

from ...processes import Bus, Gateway

pytestmark = pytest.mark.process

IDS = [12, 7, 300, 41, 5]
GREEDY = {"temperature": 0, "max_new_tokens": 6}
RANDOM = {"temperature": 0.9, "top_p": 0.8, "sampling_seed": 5, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def bus_client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=300) as client:
        yield client


def post(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/generate", json={**body, "stream": True})
    *parts, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(part) for part in parts]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    meta = {k: v for k, v in answer["meta_info"].items() if k not in ("id", "e2e_latency")}
    meta.pop("cached_tokens")
    return {"text": answer["text"], "output_ids": answer["output_ids"], **meta}


def generated(client: Client, **options: Any) -> GeneratedSequence:
    [sequence] = client.generate(IDS, text=True, **options).wait()
    return sequence


def test_token_ids_are_continued(http: httpx.Client, bus_client: Client) -> None:
    wanted = generated(bus_client, max_tokens=6)
    answer = post(http, input_ids=IDS, sampling_params=GREEDY, rid="mine")
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (wanted.text, wanted.tokens)
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), 6)
    [(first, span)] = wanted.spans
    assert meta["spans"] == [{"first": first, "weights": span.weights, "exact": span.exact}]
    assert meta["weight_version"] == span.weights
    assert meta["tokenbus"] == {"exact": wanted.exact}
    assert "output_token_logprobs" not in meta


def test_the_log_probabilities_are_those_of_the_bus(http: httpx.Client, bus_client: Client) -> None:
    wanted = generated(
        bus_client,
        max_tokens=6,
        temperature=0.9,
        top_p=0.8,
        seed=5,
        top_logprobs=2,
        processed_logprobs=True,
        kept=True,
    )
    answer = post(
        http,
        input_ids=IDS,
        sampling_params=RANDOM,
        return_logprob=True,
        top_logprobs_num=2,
        processed_logprobs=True,
        kept=True,
    )
    meta = answer["meta_info"]
    pairs = zip(wanted.logprobs, wanted.tokens, strict=True)
    assert meta["output_token_logprobs"] == [[logprob, token, None] for logprob, token in pairs]
    tops = [sorted(top.items(), key=lambda one: -one[1])[:2] for top in wanted.top_logprobs]
    assert meta["output_top_logprobs"] == [[[p, t, None] for t, p in top] for top in tops]
    assert meta["output_processed_logprobs"] == wanted.processed_logprobs
    assert meta["output_kept"] == wanted.kept
    assert all(t in kept for t, kept in zip(wanted.tokens, wanted.kept, strict=True) if kept)  # type: ignore[operator]
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("start", [0, 3])
def test_the_prompt_has_log_probabilities_from_a_position_on(
    http: httpx.Client, bus_client: Client, start: int
) -> None:
    scores = bus_client.score(IDS[:1], IDS[1:])
    answer = post(
        http,
        input_ids=IDS,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=start,
        return_text_in_logprobs=True,
    )
    found = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in found] == IDS[start:]
    assert [p for p, _, _ in found] == [None, *scores.logprobs][start:]
    assert all(isinstance(text, str) for _, _, text in found)
    assert answer["output_ids"] == []


def test_a_log_probability_has_the_bits_of_a_score(http: httpx.Client, bus_client: Client) -> None:
    answer = post(http, input_ids=IDS, sampling_params=RANDOM, return_logprob=True)
    found = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    scores = bus_client.score(IDS, answer["output_ids"])
    assert answer["meta_info"]["tokenbus"]["exact"]
    assert found == scores.logprobs


def test_a_list_of_prompts_has_a_list_of_answers(http: httpx.Client) -> None:
    given = [IDS, IDS[:2]]
    params = [RANDOM, {**GREEDY, "n": 2}]
    together = post(http, input_ids=given, sampling_params=params, rid=["a", "b"])
    assert [one["meta_info"]["id"] for one in together] == ["a", "b", "b"]
    alone = post(http, input_ids=IDS, sampling_params=RANDOM)
    assert without_times(together[0]) == without_times(alone)
    assert together[1]["output_ids"] == together[2]["output_ids"]
    texts = post(http, text=["def f(", "x = "], sampling_params=GREEDY)
    assert len(texts) == 2


@pytest.mark.parametrize("stop", ["length", "stop"])
def test_a_stream_ends_with_the_whole_answer(http: httpx.Client, stop: str) -> None:
    params: dict[str, Any] = {**RANDOM, "max_new_tokens": 12}
    whole = post(http, input_ids=IDS, sampling_params=params, return_logprob=True)
    if stop == "stop":
        params["stop_token_ids"] = [whole["output_ids"][4]]
        whole = post(http, input_ids=IDS, sampling_params=params, return_logprob=True)
        matched = {"type": "stop", "matched": whole["output_ids"][-1]}
        assert whole["meta_info"]["finish_reason"] == matched
    found = events(http, input_ids=IDS, sampling_params=params, return_logprob=True)
    assert without_times(found[-1]) == without_times(whole)
    for one in found:
        count = len(one["output_ids"])
        assert one["output_ids"] == whole["output_ids"][:count]
        assert len(one["meta_info"]["output_token_logprobs"]) == count
        assert (one["meta_info"]["finish_reason"] is None) == (one is not found[-1])


def test_a_stream_of_several_prompts_numbers_its_answers(http: httpx.Client) -> None:
    params = {**GREEDY, "n": 2}
    whole = post(http, input_ids=[IDS, IDS[:2]], sampling_params=params)
    last = {e["index"]: e for e in events(http, input_ids=[IDS, IDS[:2]], sampling_params=params)}
    assert [without_times(last[i]) for i in range(4)] == [without_times(one) for one in whole]


def test_a_text_has_a_minimum_of_new_tokens(http: httpx.Client) -> None:
    text = "def add(a, b):\n    return a + b\n"
    ends = post(http, text=text, sampling_params=GREEDY)["output_ids"]
    assert len(ends) == 1
    params = {**GREEDY, "min_new_tokens": 6, "stop_token_ids": [199]}
    longer = post(http, text=text, sampling_params=params)["output_ids"]
    assert len(longer) == 6
    assert not {199, *ends} & set(longer)


def test_a_constraint_holds(http: httpx.Client) -> None:
    params = {"temperature": 1, "max_new_tokens": 20, "regex": "(yes|no)"}
    answer = post(http, text="Is it?", sampling_params=params, kept=True)
    assert answer["text"] in ("yes", "no")
    assert answer["meta_info"]["tokenbus"]["constraint"] == "regex"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input_ids", "give one of input_ids and text; neither is given"),
        ({"text": "a", "input_ids": [1]}, "input_ids", "both are given"),
        ({"input_ids": [1, [2]]}, "input_ids", "a list of different kinds"),
        ({"input_ids": [[1], 2]}, "input_ids", "a list of different kinds"),
        ({"text": "a", "image_data": "x"}, "image_data", "image_data is not supported"),
        ({"text": ["a", "b"], "rid": ["c"]}, "rid", "rid has 1 elements; expected 2"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}},
            "sampling_params.min_new_tokens",
            "min_new_tokens is 3; expected at most max_new_tokens, which is 2",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
            "at least 0",
        ),
        ({"input_ids": [9] * 5000}, "input_ids", "takes at most 1024"),
    ],
)
def test_a_wrong_body_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
