"""``/v1/models`` where the tokenizer of one model cannot be read."""

from __future__ import annotations

import httpx

from ...processes import Bus
from .stepped import WAIT_S, stepped_worker


def test_a_tokenizer_that_cannot_be_read_leaves_the_list_of_models_whole(processes: None) -> None:
    with Bus() as bus:
        back = f"ipc://{bus.folder}/back.sock"
        with (
            stepped_worker(back, 1),
            stepped_worker(back, 1, "unreadable", tokenizer="{"),
        ):
            bus.wait_for_models("stepped")
            bus.wait_for_models("unreadable")
            gateway = bus.start_gateway()
            answer = httpx.get(f"{gateway.url}/v1/models", timeout=WAIT_S)
            assert answer.status_code == 200
            assert [model["id"] for model in answer.json()["data"]] == ["stepped", "unreadable"]
            one = httpx.get(f"{gateway.url}/v1/models/unreadable", timeout=WAIT_S)
            assert one.json()["max_model_len"] == 2**20
            body = {"model": "unreadable", "prompt": "x"}
            refused = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=WAIT_S)
            assert refused.status_code == 502
            assert "'unreadable' cannot be read" in refused.json()["error"]["message"]
