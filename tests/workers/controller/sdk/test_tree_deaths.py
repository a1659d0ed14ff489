"""A tree of thoughts during which a worker of each role is killed: every sequence has the tokens of
an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenbus.clients import Client, Stream
from tokenbus.protocol.scripts import marked_script

from ....processes import Bus
from ..wasm.guests import SDK

pytestmark = pytest.mark.process

TREE = {"width": 3, "depth": 3, "keep": 2, "tokens": 40}


@pytest.fixture
def system(processes: None) -> Iterator[Bus]:
    with Bus(heartbeat_s=0.2, ping_s=0.3, expiry_s=4) as bus:
        bus.start_all_roles()
        yield bus


def begun(client: Client) -> Stream:
    script = (SDK / "programs/tree_of_thoughts.py").read_bytes()
    module = client.upload_controller(marked_script(script, "python")).module
    return client.generate(
        "A plan:\n",
        controller=module,
        controller_arg=TREE,
        temperature=0.8,
        seed=5,
        max_tokens=500,
    )


def ended(stream: Stream) -> dict[int, tuple[list[int], str]]:
    """The tokens and the logs of all sequences."""
    sequences = stream.wait()
    assert {(s.error, s.finish_reason) for s in sequences} == {(None, "controller")}
    return {s.seq: (s.tokens, s.logs) for s in sequences}


def test_a_tree_is_the_same_after_the_death_of_each_worker(system: Bus) -> None:
    def replace_controller() -> None:
        system.others.pop(1).kill()
        system.start_other("controller")

    def replace_gpu() -> None:
        system.workers.pop(0).kill()
        system.start_worker()

    def replace_state() -> None:
        system.others.pop(0).kill()
        system.start_other("state")

    with system.client() as client:
        expected = ended(begun(client))
        assert len(expected) == 3 + 2 * 2 + 2 * 2
        assert any("the best thought is" in logs for _, logs in expected.values())

        stream = begun(client)
        entries = iter(stream)
        for replace in (replace_controller, replace_gpu, replace_state):
            for _ in range(10):
                next(entries)
            replace()
            assert any(one.finish_reason is None for one in stream.sequences)
        assert ended(stream) == expected
