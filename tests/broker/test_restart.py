"""A restarted broker, with real client sessions and leases, and simulated workers. There are no
sockets: tests pass frames and times."""

from __future__ import annotations

import pytest
from msgspec import msgpack
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import (
    Header,
    encode_header,
)
from tokenbus.protocol.messages import Msg, Token
from tokenbus.protocol.worker_messages import (
    Start,
    VocabularyName,
)

from ..worlds.restarted_broker import (
    ClientPeer,
    GpuWorker,
    Running,
    World,
    begun,
    steps,
)


def expected(length: int = 8) -> list[int | None]:
    return [100 + i for i in range(length)]


def test_a_stream_continues_under_the_next_broker() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    # Without a broker, the worker computes two tokens. The message with the first token is lost.
    steps(world, gpu, 2)
    world.start()
    world.pass_time(4.0)
    assert client.tokens[call] == expected(5)
    steps(world, gpu, 3)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1
    assert world.broker is not None
    assert world.broker.drained


def test_a_stream_that_ended_while_there_was_no_broker_is_delivered() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    steps(world, gpu, 5)
    world.start()
    world.pass_time(4.0)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1


def test_a_stream_that_ends_before_its_client_is_back_is_delivered() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    gpu.running[next(iter(gpu.running))].length = 4
    gpu.step()
    world.run(gpu)
    world.pass_time(4.0)
    assert client.tokens[call] == expected(4)
    assert client.ends == {call: None}


def test_an_attach_waits_for_the_worker_that_has_the_stream() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(20.0, client)
    assert client.said[-1] == "PING"
    assert "ATTACH" in client.said
    assert call not in client.ends
    world.pass_time(4.0)
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_stream_that_no_worker_reports_is_sent_again_and_no_entry_delivered_twice() -> None:
    world = World(recover_s=10.0)
    gpu, client = GpuWorker(world), ClientPeer(world)
    world.run()
    call = client.generate(retry_s=60)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.remove(gpu)
    world.start()
    world.pass_time(5.0)
    assert "GENERATE" not in client.said[client.said.index("GENERATE") + 1 :]
    other = GpuWorker(world, "other")
    world.pass_time(8.0)
    steps(world, other, 8)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_request_without_an_entry_is_sent_again_at_once() -> None:
    world = World()
    client = ClientPeer(world)
    gpu = GpuWorker(world)
    world.run()
    call = client.generate(retry_s=60)
    world.run()
    world.kill()
    world.start()
    other = GpuWorker(world, "other")
    world.pass_time(5.0, client, other)
    assert client.said.count("GENERATE") == 2
    world.pass_time(5.0)
    # The first worker drops its copy of the stream.
    assert gpu.running == {}
    steps(world, other, 8)
    assert client.tokens[call] == expected()


def test_a_stream_without_an_attach_ends_after_the_time_for_recovery() -> None:
    world, gpu, client = begun(recover_s=10.0)
    world.kill()
    world.remove(client)
    world.start()
    world.pass_time(5.0)
    assert len(gpu.running) == 1
    world.pass_time(8.0)
    assert gpu.running == {}
    assert world.broker is not None
    assert world.broker.drained
    assert len(world.broker.state.sessions) == 0


def test_a_cancelled_stream_is_not_adopted() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(4.0, client)
    client.session.cancel(call)
    world.pass_time(4.0)
    assert gpu.running == {}


def test_a_session_is_not_given_to_another_key() -> None:
    world = World()
    gpu, client = GpuWorker(world), ClientPeer(world, key="a")
    world.run()
    client.generate(retry_s=0)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.start()
    client.key = "b"
    world.pass_time(4.0)
    steps(world, gpu, 1)
    [call] = client.tokens
    assert client.tokens[call] == expected(3)
    assert world.broker is not None
    [adopted] = world.broker.state.requests.values()
    assert adopted.session.token == ""


def test_a_stream_that_is_reported_after_the_time_for_recovery_is_dropped() -> None:
    world, gpu, client = begun(recover_s=10.0)
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(11.0, client)
    assert client.ends[call].code == "connection_lost"
    world.pass_time(4.0)
    assert gpu.running == {}


def test_a_client_without_recover_gets_a_new_session() -> None:
    world, _, client = begun()
    token = client.session._token
    world.kill()
    world.remove(client)
    world.start()
    assert world.broker is not None
    hello = msgpack.encode({"session": token, "encodings": ["msgpack"]})
    [answer] = world.broker.on_client(b"\0old", [b"HELLO", hello], world.now)
    welcome = msgpack.decode(answer.frames[1])
    assert welcome["session"] != token
    assert "resumed" not in welcome
    assert "recovering" not in welcome


def moved_away(gpu: GpuWorker, other: GpuWorker) -> None:
    """Gives ``other`` a copy of the streams of ``gpu``, without their last two entries."""
    for request, one in gpu.running.items():
        other.running[request] = Running(
            one.header, one.stream_id, one.frames, one.length, one.sent[:-2]
        )


def test_the_worker_with_more_entries_keeps_a_stream_that_two_workers_have() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    stale = GpuWorker(world, "stale")
    world.kill()
    moved_away(gpu, stale)
    world.start()
    world.pass_time(2.0, stale)
    world.pass_time(4.0)
    assert stale.running == {}
    stale.step()
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_an_attach_beyond_the_reported_entries_waits_for_a_worker_that_has_them() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    stale = GpuWorker(world, "stale")
    world.kill()
    moved_away(gpu, stale)
    world.start()
    world.pass_time(4.0, stale, client)
    steps(world, stale, 3)
    assert client.tokens[call] == expected(3)
    world.pass_time(4.0)
    assert stale.running == {}
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_worker_does_not_get_a_moved_stream_back_even_with_more_entries() -> None:
    """In the earlier copy, the entries of several sequences may be in another order. So the number
    of entries that the client has received does not apply to this copy."""
    for first in ("gpu", "stale"):
        world, stale, client = begun(sent=2)
        [call] = client.tokens
        gpu = GpuWorker(world, "gpu2")
        world.run()
        world.remove(stale)
        world.run()
        steps(world, gpu, 1)
        assert client.tokens[call] == expected(3)
        world.kill()
        # The earlier worker connects again, with tokens that it computed without a connection.
        world.peers.append(stale)
        stale.out = stale.lease.connected(world.now)
        [running] = stale.running.values()
        running.sent += [
            Token(token=99, stream_id=running.stream_id, logprob=-1.0, finish_reason=None, pos=p)
            for p in range(2, 6)
        ]
        world.start()
        order = (gpu, stale) if first == "gpu" else (stale, gpu)
        for peer in order:
            world.run(peer, client)
        world.pass_time(4.0)
        assert stale.running == {}
        steps(world, gpu, 5)
        assert client.tokens[call] == expected()
        assert client.ends == {call: None}


def test_tokens_of_a_stream_that_its_worker_must_drop_do_not_reach_the_client() -> None:
    """The worker computes until it handles the broker's message to drop the stream. The client has
    attached to the copy of the other worker."""
    for stale_first in (True, False):
        world, gpu, client = begun()
        [call] = client.tokens
        stale = GpuWorker(world, "stale")
        stale.drops = False
        world.kill()
        moved_away(gpu, stale)
        world.start()
        for peer in (stale, gpu) if stale_first else (gpu, stale):
            world.run(peer)
        world.pass_time(4.0)
        assert client.tokens[call] == expected(3)
        assert stale.running
        steps(world, stale, 3)
        steps(world, gpu, 5)
        assert client.tokens[call] == expected()
        assert client.ends == {call: None}


def test_an_adopted_stream_moves_with_all_of_its_entries() -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    steps(world, gpu, 1)
    world.start()
    world.pass_time(4.0)
    steps(world, gpu, 1)
    other = GpuWorker(world, "other")
    world.run()
    world.remove(gpu)
    world.run()
    steps(world, other, 3)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def reconnect(world: World, gpu: GpuWorker) -> None:
    """Gives a worker a new connection, on which it has not registered yet."""
    assert world.broker is not None
    gone = gpu.id
    gpu.connections += 1
    world._route(world.broker.on_gone(gpu.side, gone, world.now))
    gpu.out = gpu.lease.connected(world.now)


def sent_twice(world: World, gpu: GpuWorker, by_another: bool) -> None:
    """After a restart of the broker, a worker that was cut off registers again with its stream,
    while the stream's client is not connected. The broker requests the JOURNAL, and then sends
    GENERATE to this worker. The worker has not handled the GENERATE yet. ``by_another``: whether
    another worker has run the stream in the meantime."""
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    other = GpuWorker(world, "other")
    if by_another:
        world.run(gpu, other)
    reconnect(world, gpu)
    if by_another:
        other.step()
        world.run(other)
    world.remove(other)
    gpu.takes = 1
    world.run(gpu)
    assert b"GENERATE" in [frames[0] for frames in gpu.held]


@pytest.mark.parametrize("by_another", [False, True])
def test_tokens_of_an_attempt_that_was_replaced_are_not_kept(by_another: bool) -> None:
    world, gpu, client = begun()
    [call] = client.tokens
    sent_twice(world, gpu, by_another)
    gpu.step()
    world.run(gpu)
    gpu.catch_up()
    for _ in range(2):
        gpu.step()
        world.run(gpu)
    last = GpuWorker(world, "last")
    world.run(last)
    world.remove(gpu)
    world.pass_time(4.0)
    steps(world, last, 8)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_the_end_of_an_attempt_that_was_replaced_ends_nothing() -> None:
    world, gpu, client = begun(length=4)
    [call] = client.tokens
    sent_twice(world, gpu, False)
    gpu.step()
    world.run(gpu)
    assert world.broker is not None
    assert len(world.broker.state.requests) == 1
    gpu.catch_up()
    world.pass_time(4.0)
    steps(world, gpu, 1)
    assert client.tokens[call] == expected(4)
    assert client.ends == {call: None}
    assert world.broker.drained


def test_the_controller_of_an_attempt_that_was_replaced_does_not_start() -> None:
    world = World()
    gpu, client = GpuWorker(world), ClientPeer(world)
    controller = GpuWorker(world, "controller", role="controller")
    world.run()
    client.generate(controller="mine", retry_s=0)
    world.run()
    steps(world, gpu, 3)
    sent_twice(world, gpu, False)
    [request] = gpu.running

    def start(attempt: int) -> None:
        body = Start(
            controller="mine",
            prompt=[1],
            max_tokens=8,
            model="m",
            vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
            attempt=attempt,
        )
        gpu.out.append([b"START", encode_header(request), encode_body(body, "msgpack")])

    start(1)
    world.pass_time(4.0)
    gpu.catch_up()
    start(2)
    world.pass_time(4.0)
    started = [body for kind, _, body in controller.got if kind == b"START"]
    assert [decode_as(Start, body[0], "msgpack").attempt for body in started] == [2]


def test_a_stream_that_its_worker_dropped_and_received_again_is_delivered() -> None:
    """After the worker has dropped the earlier attempt, each message of the new attempt reaches the
    client."""
    world, gpu, client = begun()
    [call] = client.tokens
    sent_twice(world, gpu, True)
    world.pass_time(3.0)
    gpu.catch_up()
    world.run()
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert client.said.count("GENERATE") == 1
    assert world.broker is not None
    [worker] = world.broker.state.workers.values()
    assert not worker.fences


def test_a_worker_that_does_not_confirm_a_revoked_attempt_is_lost() -> None:
    """The worker still sends heartbeats. Until the broker treats it as lost, the request does not
    move to another worker."""
    world, gpu, client = begun(hung_step_s=20.0)
    [call] = client.tokens
    sent_twice(world, gpu, True)
    other = GpuWorker(world, "another")
    world.pass_time(15.0)
    assert not other.running
    world.pass_time(10.0)
    steps(world, other, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}


def test_a_broker_that_was_stopped_does_not_count_the_time_against_a_revocation() -> None:
    """The worker's CLAIMED may have arrived while the broker was stopped. The broker reads it only
    after the tick."""
    world, gpu, client = begun(hung_step_s=5.0)
    [call] = client.tokens
    sent_twice(world, gpu, True)
    assert world.broker is not None
    lost = world.broker.state.counters.workers_lost
    world.now += 6.0
    world.pass_time(1.0)
    gpu.catch_up()
    world.run()
    steps(world, gpu, 5)
    assert client.tokens[call] == expected()
    assert client.ends == {call: None}
    assert world.broker.state.counters.workers_lost == lost


def test_variables_stay_until_the_time_for_adoption_is_over() -> None:
    world, gpu, _ = begun(length=800, recover_s=10.0)
    state = GpuWorker(world, "state", role="state")
    [request] = gpu.running
    for number in (request, 7):
        state.running[number] = Running(Header(number), 0, [], 1)
    world.kill()
    world.start()
    world.pass_time(2.0, state)
    assert set(state.running) == {request, 7}
    world.pass_time(4.0)
    assert set(state.running) == {request, 7}
    world.pass_time(8.0)
    assert set(state.running) == {request}


def test_a_controller_starts_again_when_its_worker_and_the_client_are_back() -> None:
    world = World()
    gpu, client, controller = _begun_again(world)
    world.pass_time(1.0, gpu, client)
    _starts_when_both_are_back(world, gpu, client, controller)


def test_a_controller_starts_even_if_its_client_is_back_after_the_limit_of_waiting() -> None:
    world = World(move_wait_s=1.0)
    gpu, client, controller = _begun_again(world)
    world.pass_time(2.0, gpu, controller)
    _starts_when_both_are_back(world, gpu, client, controller)


def _begun_again(world: World) -> tuple[GpuWorker, ClientPeer, GpuWorker]:
    """A stream whose GPU worker requests the controller again, after the broker was restarted."""
    gpu, client = GpuWorker(world), ClientPeer(world)
    controller = GpuWorker(world, "controller", role="controller")
    world.run()
    client.generate(controller="mine", retry_s=0)
    world.run()
    steps(world, gpu, 3)
    world.kill()
    world.start()
    world.pass_time(2.0, gpu)
    [request] = gpu.running
    start = Start(
        controller="mine",
        prompt=[1],
        max_tokens=8,
        model="m",
        vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
    )
    gpu.out.append([b"START", encode_header(request), encode_body(start, "msgpack")])
    controller.got.clear()
    return gpu, client, controller


def _starts_when_both_are_back(
    world: World, gpu: GpuWorker, client: ClientPeer, controller: GpuWorker
) -> None:
    world.pass_time(2.0)
    assert [kind for kind, _, _ in controller.got if kind == b"START"] == [b"START"]
    steps(world, gpu, 5)
    [call] = client.tokens
    assert client.tokens[call] == expected()


def test_the_answers_to_two_attaches_give_each_token_once() -> None:
    """The client has sent one ATTACH on each of two connections, and receives both answers on the
    second."""
    world, gpu, client = begun()
    [call] = client.tokens
    world.kill()
    world.start()
    world.pass_time(4.0, gpu, client)
    waiting, call.attaching = call.received, True
    steps(world, gpu, 1)
    for frames in gpu_answers(gpu, waiting), gpu_answers(gpu, waiting):
        for message in frames:
            client.session.on_frames(message, world.now)
    client.take()
    assert client.tokens[call] == expected(len(gpu_sent(gpu)))


def gpu_sent(gpu: GpuWorker) -> list[Token]:
    [one] = gpu.running.values()
    return one.sent


def gpu_answers(gpu: GpuWorker, received: int) -> list[list[bytes]]:
    """The messages with which the broker forwards the worker's answer to an ATTACH."""
    [one] = gpu.running.values()
    answer = Msg(stream_id=one.stream_id, attached=received, moves=one.moves)
    missed = encode_body(one.sent[received:], "msgpack")
    return [[b"MSG", encode_body(answer, "msgpack")], [b"TOKEN", missed]]
