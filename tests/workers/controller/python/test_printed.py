"""``print`` and ``sys.stderr`` of a Python controller write only to the log of its sequence."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import Context, Controller, Decision, sample, stop
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import Script

from .runs import play_class, play_script


def play(program: type[Controller] | Script, **how: Any) -> dict[int, str]:
    """The logs of a program that runs as in a worker."""
    with captured():
        run = play_class if isinstance(program, type) else play_script
        return run(program, **how).logs  # type: ignore[arg-type]


class Printer(Controller):
    """Prints in each call."""

    def __init__(self) -> None:
        print("init", end=";")

    def init_prompt(self, prompt: list[int]) -> None:
        print("prompt", len(prompt), end=";", file=sys.stderr)

    def mid_process(self, fork_group: list[int]) -> Decision:
        sys.stdout.buffer.write(b"mid;")
        sys.stdout.flush()
        return sample([5])

    def post_process(self, tokens: list[int], backtrack: int) -> Decision:
        print(tokens, file=sys.stderr, flush=True)
        return stop()


def test_the_output_of_each_call_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert play(Printer) == {0: "init;prompt 0;mid;[5]\n"}
    assert capsys.readouterr() == ("", "")


def test_text_that_is_not_unicode_is_in_the_log() -> None:
    class Odd(Controller):
        def pre_process(self) -> Decision:
            print("\ud800")
            return stop()

    assert play(Odd) == {0: "\\ud800\n"}


def test_output_outside_of_a_call_goes_where_it_went_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with captured():
        print("of the worker")
        print("too", file=sys.stderr)
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.flush()
    assert capsys.readouterr() == ("of the worker\nbytes\n", "too\n")


def test_other_threads_and_other_sequences_have_their_own_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = threading.Barrier(2, timeout=60)

    class Meeting(Controller):
        """Two instances of this class are in a call at the same time."""

        def pre_process(self) -> Decision:
            print("before", self.arg)
            both.wait()
            print("after", self.arg)
            both.wait()
            return stop()

    class Starting(Controller):
        """Starts a thread that prints."""

        def pre_process(self) -> Decision:
            thread = threading.Thread(target=print, args=("of a thread",))
            thread.start()
            thread.join()
            print("of the call")
            return stop()

    logs: dict[str, str] = {}

    def meet(arg: str) -> None:
        logs[arg] = play(Meeting, arg=arg.encode())[0]

    threads = [threading.Thread(target=meet, args=(arg,)) for arg in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert logs == {arg: f"before {arg}\nafter {arg}\n" for arg in "ab"}
    assert play(Starting) == {0: "of the call\n"}
    assert capsys.readouterr().out == "of a thread\n"


def test_output_is_bounded_as_a_guest_s_log_is() -> None:
    class Long(Controller):
        def pre_process(self) -> Decision:
            print("x" * 1000)
            return stop()

    assert play(Long, limits=Limits(log_bytes=10)) == {
        0: "x" * 10 + "\n[991 more bytes of log were dropped]\n"
    }


async def forking(ctx: Context) -> None:
    print("once")
    place = await ctx.fork(2)
    print("in", place)


def test_a_script_that_is_replayed_for_a_fork_prints_nothing_twice() -> None:
    assert play(forking) == {0: "once\nin 0\n", 1: "in 1\n"}


def test_a_worker_that_ends_leaves_the_streams_to_the_others() -> None:
    with captured():
        play(Printer)
        assert play_class(Printer).logs[0], "the outer worker logs nothing"


def test_the_streams_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenbus.workers.controller.python.printed._uses", 0)
    usual = io.StringIO()
    monkeypatch.setattr(sys, "stdout", usual)
    with captured():
        assert sys.stdout is not usual
    assert sys.stdout is usual
