"""A dialogue in which a process of each role dies: the program receives each input once, and the
client sees the messages and tokens of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tokenbus.clients import Client, Stream
from tokenbus.protocol.scripts import marked_script

from ..clients.dialogues import PYTHON, next_message
from ..processes import Bus

pytestmark = pytest.mark.process

TEXTS = ("one ", "two ", "three ", "four ", "five ")


@pytest.fixture
def system(processes: None) -> Iterator[Bus]:
    with Bus(heartbeat_s=0.2, ping_s=0.3, expiry_s=4) as bus:
        bus.start_all_roles()
        with bus.client() as client:
            client.upload_controller(marked_script(PYTHON, "python"), "dialogue")
        yield bus


def begun(client: Client) -> Stream:
    return client.generate("Hello. ", controller="dialogue", temperature=0.8, seed=3)


def test_a_dialogue_goes_on_after_the_death_of_each_role(system: Bus) -> None:
    def replace_controller() -> None:
        system.others.pop(1).kill()
        system.start_other("controller")

    def replace_state() -> None:
        system.others.pop(0).kill()
        system.start_other("state")

    def replace_broker() -> None:
        system.broker.kill()
        system.start_broker()

    def replace_gpu() -> None:
        system.workers.pop(0).kill()
        system.start_worker()

    deaths: list[Callable[[], None]] = [
        replace_controller,
        replace_state,
        replace_broker,
        replace_gpu,
        lambda: None,
    ]
    with system.client() as client:
        undisturbed = begun(client)
        for text in TEXTS:
            next_message(undisturbed)
            undisturbed.send(text)
        undisturbed.send("end")
        [expected] = undisturbed.wait()

        stream = begun(client)
        for text, die in zip(TEXTS, deaths, strict=True):
            next_message(stream)
            die()
            stream.send(text)
        stream.send("end")
        [sequence] = stream.wait()
    assert (sequence.messages, sequence.tokens) == (expected.messages, expected.tokens)
    assert sequence.messages == [*(f"turn {i}" for i in range(len(TEXTS) + 1)), "ended"]
