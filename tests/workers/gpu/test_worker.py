"""A GPU worker in a whole system: models on demand, drain, and streams that a client resumes."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenbus.clients import RequestError, System

from ...processes import Bus
from . import shapes

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for shape in ("llama", "gpt2"):
        shapes.make(shape).save_pretrained(folder / shape)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def on_demand(processes: None, folder: Path) -> Iterator[Bus]:
    """A worker that loads one model at a time, on demand."""
    with Bus(model="auto", allow=f"{folder}/*,embedded", max_models=1) as bus:
        bus.start_worker()
        bus.wait_for_models()
        yield bus


@pytest.fixture(scope="module")
def paths(processes: None, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Bus]:
    """A worker that may load models in the folder ``allowed``, also through a link to this
    folder."""
    for name in ("allowed", "evil"):
        shutil.copytree(folder / "llama", folder / name / "good")
    shutil.copytree(folder / "llama", folder / "evil", dirs_exist_ok=True)
    (folder / "allowed" / "link").symlink_to(folder / "evil")
    known = tmp_path_factory.mktemp("links") / "known"
    known.symlink_to(folder / "allowed")
    with Bus(model="auto", allow=f"{folder}/allowed/*,{known}/*", max_models=1) as bus:
        bus.start_worker()
        bus.wait_for_models()
        yield bus


def test_models_are_loaded_on_demand_and_the_least_recently_used_is_evicted(
    on_demand: Bus, folder: Path
) -> None:
    with on_demand.client() as client:
        for name in (str(folder / "llama"), str(folder / "gpt2"), "embedded"):
            notices: list[System] = []
            stream = client.generate(
                [5, 6], model=name, max_tokens=3, ignore_eos=True, on_system=notices.append
            )
            assert len(stream.tokens()) == 3
            loading = [n for n in notices if n.event == "loading"]
            assert loading
            assert all(n.model == name for n in loading)
            parts = [n.progress or 0.0 for n in loading]
            assert parts == sorted(parts)
            [worker] = client.status().workers
            assert worker.models == [name]


def test_a_model_beyond_the_allow_list_is_refused_by_name(on_demand: Bus) -> None:
    with on_demand.client() as client, pytest.raises(RequestError, match="gpt-9") as caught:
        client.generate([5], model="gpt-9").wait()
    assert caught.value.code == "unknown_model"


@pytest.mark.parametrize("name", ["allowed/../evil", "allowed/link", "allowed/link/../evil"])
def test_no_path_leads_out_of_the_folder_of_the_allow_list(
    paths: Bus, folder: Path, name: str
) -> None:
    with paths.client() as client:
        with pytest.raises(RequestError, match="allow-list") as caught:
            client.generate([5], model=f"{folder}/{name}").wait()
        assert caught.value.code == "unknown_model"
        with pytest.raises(RequestError, match="allow-list"):
            client.model_info(f"{folder}/{name}")


def test_paths_within_the_folder_of_the_allow_list_are_loaded(paths: Bus, folder: Path) -> None:
    with paths.client() as client:
        for name in ("allowed/good", "allowed/../allowed/good"):
            stream = client.generate([5], model=f"{folder}/{name}", max_tokens=1, ignore_eos=True)
            assert len(stream.tokens()) == 1


def test_a_model_that_cannot_be_loaded_is_reported_and_the_worker_continues(
    on_demand: Bus, folder: Path
) -> None:
    with on_demand.client() as client:
        with pytest.raises(RequestError, match="broken") as caught:
            client.generate([5], model=str(folder / "broken")).wait()
        assert caught.value.code == "model_load_failed"
        stream = client.generate([5], model="embedded", max_tokens=3, ignore_eos=True)
        assert len(stream.tokens()) == 3


def test_a_model_without_a_tokenizer_takes_ids_only(on_demand: Bus, folder: Path) -> None:
    with on_demand.client() as client:
        with pytest.raises(RequestError, match="no tokenizer"):
            client.generate("text", model=str(folder / "llama")).wait()
        with pytest.raises(RequestError, match="no tokenizer"):
            client.generate([5], model=str(folder / "llama"), stop=["x"]).wait()


@pytest.mark.process
def test_a_draining_worker_finishes_its_streams_and_takes_no_new_ones() -> None:
    with Bus() as bus:
        old = bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client() as client:
            stream = client.generate([5], max_tokens=900, ignore_eos=True, retry_s=0)
            entries = iter(stream)
            next(entries)
            bus.start_worker()
            old.send(signal.SIGTERM)
            for _ in entries:
                pass
            assert len(stream.tokens()) == 900
            assert old.wait() == 0
            bus.workers.remove(old)
            # On a busy machine, the stream may have ended before the signal arrived.
            assert re.search(r"draining [01] streams", old.log)
            assert len(client.generate([5], max_tokens=3, ignore_eos=True).tokens()) == 3


def _dealer(bus: Bus) -> Any:
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 300_000)
    socket.connect(bus.front)
    return socket


def _send(socket: Any, message_type: bytes, body: Any) -> None:
    socket.send_multipart([message_type, msgspec.json.encode(body)])


def _hear(socket: Any, message_type: bytes) -> Any:
    while True:
        frames = socket.recv_multipart()
        if frames[0] == message_type:
            return msgspec.json.decode(frames[1])


def test_a_stream_is_picked_up_again_on_a_new_connection(bus: Bus) -> None:
    request = {"stream_id": 1, "prompt": [5, 6], "max_tokens": 900, "ignore_eos": True}
    for _ in range(20):
        old = _dealer(bus)
        _send(old, b"HELLO", {})
        session = _hear(old, b"WELCOME")["session"]
        _send(old, b"GENERATE", request)
        got: list[int] = []
        while len(got) < 20:
            got += [e["token"] for e in _hear(old, b"TOKEN")]
        old.close(0)
        new = _dealer(bus)
        _send(new, b"HELLO", {"session": session})
        welcome = _hear(new, b"WELCOME")
        assert welcome["resumed"]
        if welcome["streams"]:
            break
        # The stream has ended before the broker noticed that its client had left.
        new.close(0)
    assert welcome["streams"] == [1]
    _send(new, b"ATTACH", {"stream_id": 1, "received": len(got)})
    while True:
        frames = new.recv_multipart()
        if frames[0] == b"MSG":
            break
    assert msgspec.json.decode(frames[1])["attached"] == len(got)
    over = False
    while not over:
        entries = _hear(new, b"TOKEN")
        got += [e["token"] for e in entries]
        over = entries[-1]["finish_reason"] is not None
    with bus.client() as client:
        assert got == client.generate([5, 6], max_tokens=900, ignore_eos=True).tokens()
    new.close(0)
