"""The operator pauses a model and updates its weights over HTTP and with ``tokenbus weights``."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenbus.clients import RequestError
from tokenbus.clients.cli.main import main
from tokenbus.clients.gateway.rollouts.refused import REFUSED
from tokenbus.clients.gateway.users.keys import OPERATOR, hash_of, new_key
from tokenbus.clients.operator import Operator
from tokenbus.protocol.scripts import marked_script

from ...processes import Bus, Gateway
from ...websocket import connect
from ...workers.gpu.changed_weights import write_embedded

pytestmark = pytest.mark.process

WAIT_S = 300.0
"""Time limit of a wait, in seconds. Only a hang reaches this limit."""
ORDINARY, TRAINER = new_key(), new_key()
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/pause", {}),
    ("/resume", {}),
    ("/update_weights", {"folder": "/weights"}),
    ("/pause_generation", {}),
    ("/continue_generation", {}),
    ("/update_weights_from_disk", {"model_path": "/weights"}),
    ("/abort_request", {"abort_all": True}),
]
STOPPING = b"""
async def main(ctx):
    await ctx.fork(2)
    await ctx.gen(max_tokens=int(ctx.arg))
    await ctx.receive()
    await ctx.gen()
"""
"""A program whose argument is a number of tokens, after which each sequence waits for an input."""


class Trainer:
    """A bus with two GPU workers, and two gateways that accept the operator's requests."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self.local = bus.start_gateway(operator_over_http=True)
        """A gateway without API keys."""
        keys = folder / "api-keys"
        lines = f"ann {hash_of(ORDINARY)}\nann {hash_of(TRAINER)} {OPERATOR}\n"
        keys.write_text(lines)
        self.guarded = bus.start_gateway(api_keys=keys)
        """A gateway with two API keys of one holder: an ordinary key and an operator's key."""

    def weights(self, seed: int) -> str:
        """Writes other weights to a folder that the workers may read; returns the folder's path."""
        return write_embedded(self.folder / "weights" / str(seed), seed)

    @property
    def loaded(self) -> str:
        """The hash of the weights that the workers were started with."""
        with self.bus.client() as client:
            return client.model_info().path.weights

    @property
    def versions(self) -> list[int]:
        """The version of the weights of each worker."""
        with self.bus.client() as client:
            workers = client.status().workers
            return [w.paths["embedded"].version for w in workers if w.role == "gpu"]


@pytest.fixture(scope="module")
def trainer(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "weights").mkdir()
    with Bus(recover_s=0.1, allow=f"{folder}/weights/*") as bus:
        for _ in range(2):
            bus.start_worker()
        bus.wait_for_models("embedded", workers=2)
        yield Trainer(bus, folder)


def post(gateway: Gateway, path: str, body: object = None, **options: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, timeout=WAIT_S, **options)


def get(gateway: Gateway, path: str) -> Any:
    return httpx.get(gateway.url + path, timeout=WAIT_S).json()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def events(response: httpx.Response) -> Iterator[Any]:
    """The answers in the events of a stream."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@contextlib.contextmanager
def frozen(trainer: Trainer, path: str, mode: str) -> Iterator[Iterator[Any]]:
    """Starts a stream, pauses the model, and yields the answers of the stream. If the stream has
    ended before the pause, another stream is started."""
    url, paused = trainer.local.url, False
    sampling = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    while not paused:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=WAIT_S) as response:
            answers = events(response)
            next(answers)
            post(trainer.local, path, {"mode": mode}).raise_for_status()
            with trainer.bus.client() as client:
                paused = client.status().streams == 1
            if paused:
                yield answers
        if not paused:
            post(trainer.local, "/resume").raise_for_status()


def test_a_stream_continues_with_weights_that_two_workers_change_together(trainer: Trainer) -> None:
    gateway, folder, loaded = trainer.local, trainer.weights(1), trainer.loaded
    assert get(gateway, "/get_weight_version")["weight_version"] == loaded
    with frozen(trainer, "/pause", "keep") as answers:
        assert get(gateway, "/is_paused") == {"is_paused": True}
        done = post(gateway, "/update_weights", {"folder": folder}).json()
        assert trainer.versions == [1, 1]
        expected = {"status": "updated", "version": 1, "workers": 2, "streams": 1}
        assert {name: done[name] for name in expected} == expected
        assert post(gateway, "/resume").json()["status"] == "resumed"
        *_, last = answers
    assert get(gateway, "/is_paused") == {"is_paused": False}
    info = last["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 1000}
    assert [span.get("version", 0) for span in info["spans"]] == [0, 1]
    assert [span["weights"] for span in info["spans"]] == [loaded, done["weights"]]
    assert info["weight_version"] == "1"


def test_a_folder_that_cannot_be_read_changes_nothing(trainer: Trainer) -> None:
    before = trainer.versions
    missing = str(trainer.folder / "weights" / "none")
    for path, body in (
        ("/update_weights", {"folder": missing}),
        ("/update_weights_from_disk", {"model_path": missing}),
    ):
        answer = post(trainer.local, path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith("no worker has new weights, because ")
        assert missing in error["message"]
    assert answer.json()["success"] is False
    assert trainer.versions == before


def test_sglang_s_trainers_update_from_disk(trainer: Trainer) -> None:
    gateway, folder = trainer.local, trainer.weights(2)
    version = str(max(trainer.versions) + 3)
    body = {
        "model_path": folder,
        "weight_version": version,
        "abort_all_requests": True,
        "load_format": None,
    }
    with frozen(trainer, "/pause_generation", "in_place") as answers:
        assert httpx.get(f"{gateway.url}/flush_cache", timeout=WAIT_S).status_code == 200
        done = post(gateway, "/update_weights_from_disk", body).json()
        *_, last = answers
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert (done["success"], done["num_paused_requests"]) == (True, 1)
    assert get(gateway, "/is_paused") == {"is_paused": True}
    assert post(gateway, "/continue_generation", {}).json()["status"] == "ok"
    prompt = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    info = post(gateway, "/generate", prompt).json()["meta_info"]
    for found in (info, get(gateway, "/model_info"), get(gateway, "/get_weight_version")):
        assert found["weight_version"] == version
    wrong = post(gateway, "/update_weights_from_disk", body | {"weight_version": "step-9"})
    assert wrong.status_code == 400
    assert "expected a whole number" in wrong.json()["message"]


def test_an_update_that_aborts_streams_ends_its_own_pause(trainer: Trainer) -> None:
    missing = str(trainer.folder / "weights" / "none")
    for folder, status in ((trainer.weights(3), 200), (missing, 400)):
        body = {"model_path": folder, "abort_all_requests": True}
        assert post(trainer.local, "/update_weights_from_disk", body).status_code == status
        assert get(trainer.local, "/is_paused") == {"is_paused": False}


def test_all_streams_of_a_paused_model_are_aborted(trainer: Trainer) -> None:
    with frozen(trainer, "/pause", "keep") as answers:
        refused = post(trainer.local, "/abort_request", {"rid": "gen-1"})
        assert refused.status_code == 400
        assert "close its connection" in refused.json()["error"]["message"]
        done = post(trainer.local, "/abort_request", {"rid": "", "abort_all": True})
        assert done.json()["message"].endswith(", 1 streams")
        *_, last = answers
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"]
    assert get(trainer.local, "/is_paused") == {"is_paused": True}
    post(trainer.local, "/resume").raise_for_status()


def test_an_abort_ends_its_own_pause(trainer: Trainer) -> None:
    post(trainer.local, "/abort_request", {"abort_all": True}).raise_for_status()
    assert get(trainer.local, "/is_paused") == {"is_paused": False}


def test_an_abort_that_a_worker_does_not_answer_in_time_ends_its_own_pause(
    trainer: Trainer,
) -> None:
    worker = trainer.bus.workers[0]
    worker.send(signal.SIGSTOP)
    try:
        for body in ({"timeout_s": 0.5}, {"timeout_s": 0.5, "model": "embedded"}):
            late = post(trainer.local, "/abort_request", {"abort_all": True, **body})
            assert late.json()["error"]["code"] == "timeout"
            assert get(trainer.local, "/is_paused") == {"is_paused": False}
    finally:
        worker.send(signal.SIGCONT)


@pytest.mark.parametrize("path", REFUSED)
def test_pickled_tensors_are_refused_with_the_alternative(gateway: Gateway, path: str) -> None:
    pickled = {"serialized_named_tensors": ["gASVAAAAAA=="]}
    answer = post(gateway, path, pickled)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported"
    assert error["message"].startswith(f"{path} is not supported: ")
    assert "/update_weights_from_disk" in error["message"] or "/pause_gen" in error["message"]


def test_a_program_sets_the_position_at_which_the_weights_change(trainer: Trainer) -> None:
    for role in ("controller", "state"):
        trainer.bus.start_other(role)
    trainer.bus.wait_for_roles("controller", "state")
    runs = []
    with trainer.bus.client() as client:
        module = client.upload_controller(marked_script(STOPPING, "python")).module
        for _ in range(2):
            Operator(client).update_weights(trainer.weights(5))
            stream = client.generate(
                [5, 6, 7], controller=module, controller_arg="6", max_tokens=12, temperature=1.0,
                seed=3, logit_bias={0: -100.0},
            )  # fmt: skip
            for _ in stream:
                if sum(one.waiting > 0 for one in stream.sequences) == 2:
                    break
            Operator(client).update_weights(trainer.weights(6))
            for _ in range(2):
                stream.send("")
            found = stream.wait()
            runs.append([(one.seq, one.tokens, one.logprobs) for one in found])
            assert [(len(one.tokens), one.exact) for one in found] == [(12, True)] * 2
            assert [[start for start, _ in one.spans] for one in found] == [[0, 6]] * 2
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("query", "body", "mode"),
    [
        ("", None, "abort"),
        ("?mode=keep&clear_cache=false", None, "keep"),
        ("?wait_for_inflight_requests=True", None, "wait"),
        ("", {}, "keep"),
        ("", {"mode": "wait"}, "wait"),
    ],
)
def test_a_pause_without_a_body_is_vllm_s(
    trainer: Trainer, query: str, body: object, mode: str
) -> None:
    assert post(trainer.local, "/pause" + query, body).json()["workers"] == 2
    with trainer.bus.client() as client:
        assert client.status().paused == {"embedded": mode}
    post(trainer.local, "/resume").raise_for_status()


def test_a_wrong_mode_is_refused_with_the_valid_ones(trainer: Trainer) -> None:
    said = "expected 'abort' or 'keep' or 'wait', not 'now'"
    with (
        trainer.bus.client() as client,
        pytest.raises(RequestError, match=f"{said} at \\$.mode"),
    ):
        Operator(client).pause(mode="now")  # type: ignore[arg-type]
    for path, body in (("/pause", {"mode": "now"}), ("/pause?mode=now", None)):
        answer = post(trainer.local, path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"mode: {said}"
    update = {"folder": "/weights", "mode": "now"}
    error = post(trainer.local, "/update_weights", update).json()["error"]
    assert error["message"] == "mode: expected 'keep' or 'recompute', not 'now'"
    assert get(trainer.local, "/is_paused") == {"is_paused": False}


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_only_an_api_key_of_the_operator_may_change_a_model(
    trainer: Trainer, path: str, body: dict[str, Any]
) -> None:
    gateway = trainer.guarded
    refused = post(gateway, path, body, headers=bearer(ORDINARY))
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert error["code"] == "not_allowed"
    assert "'tokenbus api-key NAME --operator'" in error["message"]
    accepted = post(gateway, path, body, headers=bearer(TRAINER))
    assert accepted.status_code == (400 if "/weights" in body.values() else 200)
    post(gateway, "/resume", headers=bearer(TRAINER)).raise_for_status()


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_without_api_keys_the_operator_s_requests_must_be_turned_on(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    refused = post(gateway, path, body)
    assert refused.status_code == 403
    assert "--operator-over-http" in refused.json()["error"]["message"]


def test_a_page_without_an_api_key_may_not_pause(trainer: Trainer) -> None:
    gateway = trainer.local
    assert post(gateway, "/pause", {}, headers={"origin": gateway.url}).status_code == 403


def test_a_tunnel_never_sends_the_operator_s_messages(trainer: Trainer) -> None:
    """The messages are refused even if the gateway's session or the API key is the operator's."""
    local, guarded = trainer.local, trainer.guarded
    post(local, "/resume").raise_for_status()
    post(guarded, "/resume", headers=bearer(TRAINER)).raise_for_status()
    for gateway, headers in (
        (local, {}),
        (guarded, bearer(ORDINARY)),
        (guarded, bearer(TRAINER)),
    ):
        with connect(gateway.ws_url, additional_headers=headers) as websocket:
            websocket.send("HELLO {}")
            assert str(websocket.recv(WAIT_S)).startswith("WELCOME")
            for kind in ("PAUSE", "RESUME", "UPDATE_WEIGHTS", "WEIGHTS"):
                websocket.send(f'{kind} {{"stream_id": 1, "folder": "/weights"}}')
                answered, _, error = str(websocket.recv(WAIT_S)).partition(" ")
                assert (answered, json.loads(error)["code"]) == ("ERROR", "not_allowed")


def test_commands_pause_and_update(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    front = ["--front", trainer.bus.front, "--timeout", str(WAIT_S)]
    version = max(trainer.versions) + 1

    def said(*words: str) -> str:
        assert main(["weights", *words, *front]) == 0
        return capsys.readouterr().out

    head = f"embedded, version {version}, 2 workers: 0 streams"
    old = f"embedded, version {version - 1}, 2 workers: 0 streams"
    assert said("pause") == f"{old} stopped\n"
    assert main(["status", *front[:2]]) == 0
    assert "embedded is paused (keep)\n" in capsys.readouterr().out
    line = said("update", "embedded", trainer.weights(4), "--mode", "keep")
    assert line.startswith(f"{head} continued; steps stopped for ")
    assert json.loads(said("resume", "embedded", "--json"))["version"] == version
    assert trainer.versions == [version, version]
    assert main(["weights", "update", "embedded", "/nowhere", *front]) == 4
    assert "no worker has new weights" in capsys.readouterr().err


def test_the_example_of_a_trainer_changes_both_workers(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.chdir(root)
    monkeypatch.setenv("TOKENBUS_FRONT", trainer.bus.front)
    import _rollouts_example  # type: ignore[import-not-found]

    monkeypatch.setattr(_rollouts_example, "STEPS", 2)
    before = max(trainer.versions)
    _rollouts_example.main()
    assert trainer.versions == [before + 2, before + 2]
    shown = capsys.readouterr().out
    assert f"version {before + 1}: reward " in shown
    assert shown.count(" ms, workers: 2\n") == 2
