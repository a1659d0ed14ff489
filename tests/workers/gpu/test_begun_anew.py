"""A sequence that begins anew with another prompt or a context has the tokens of a request with
this prompt, also after a move."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import msgpack
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.tenants import Tenant
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.contexts import SavedTokens
from tokenbus.workers.controller.python import Context, ScriptProgram
from tokenbus.workers.controller.python.script import Script
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.state.durable import DurableVariables
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from .controlled import Workers, check_nothing_is_left
from .moved import give, merged, same_entries
from .moved import transcript as transcript_of

pytestmark = pytest.mark.usefixtures("no_waiting")

PROMPT = "def add(a, b):\n    " * 4
OTHER = "class Tree:\n    def "


def tokens_of(loaded: LoadedModel, text: str) -> list[int]:
    tokens: list[int] = loaded.tokenizer.encode(text)
    return tokens


def run(engine: Engine, request: int) -> list[int]:
    """Runs a request to its end; returns the tokens that its client then has."""
    tokens: list[int] = []
    while engine.alive(request, 0):
        for output in engine.step():
            del tokens[len(tokens) - output.backtrack :]
            tokens += [output.token] if output.token is not None else []
    return tokens


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_sequence_begins_anew_before_and_after_its_prompt_is_computed(
    embedded: LoadedModel, overlap: bool, steps: int
) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**22, overlap=overlap))
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    other = tokens_of(embedded, OTHER)
    engine.add(1, other, sampling)
    wanted = run(engine, 1)
    engine.add(2, tokens_of(embedded, PROMPT), sampling, text=True)
    seen = [output for _ in range(steps) for output in engine.step()]
    engine.begin_anew(2, 0, other)
    found = run(engine, 2)
    assert found[-9:] == wanted
    assert len(found) == 9
    assert not seen or seen[0].prompt == []
    assert engine.stats()["kv_blocks_used"] == 0


def test_a_prompt_that_is_not_valid_ends_the_sequence(embedded: LoadedModel) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**22))
    engine.add(1, [5], Sampling(max_tokens=9))
    engine.begin_anew(1, 0, [1] * 5000)
    [end] = engine.step()
    assert (end.finish_reason, end.code) == ("error", "prompt_too_long")
    assert "its new prompt is not valid: the request needs at least 5001" in (end.error or "")


async def spawns(ctx: Context) -> None:
    """Spawns a sequence, which spawns another one. The original sequence continues."""
    await ctx.gen(max_tokens=3)
    if await ctx.spawn(OTHER):
        await ctx.fixed("insert")
        await ctx.gen(max_tokens=3)
        if await ctx.spawn("import "):
            ctx.log(ctx.text(ctx.prompt))
    await ctx.gen(max_tokens=4)


class Spawning(Workers):
    """A request whose program is ``spawns``, or another script."""

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        storage: VariableStorage,
        script: Script = spawns,
    ) -> None:
        loop = Loop(folder, loaded, overlap=False)
        super().__init__(loop, storage, Random(0), program=ScriptProgram(script))


BODY = {"prompt": PROMPT, "max_tokens": 30, "controller": "c", "ignore_eos": True}


def tokens_in(messages: list[list[Token]], seq: int) -> list[int]:
    """The tokens of a sequence that the client has, without the tokens before the sequence's
    fork."""
    tokens: list[int] = []
    for entry in (e for message in messages for e in message if e.seq == seq):
        tokens = [] if entry.prompt else tokens
        tokens += [entry.token] if entry.token is not None else []
    return tokens


def test_a_stream_with_spawned_sequences_moves_after_any_message(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    storage = VariableStorage()
    whole = Spawning(tmp_path, embedded, storage)
    give(whole.loop, b"GENERATE", BODY, 0)
    wanted = whole.finish()
    begun = [e for message in wanted for e in message if e.prompt]
    assert [e.prompt for e in begun] == [tokens_of(embedded, each) for each in (OTHER, "import ")]
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**22))
    last = begun[-1].seq
    engine.add(1, tokens_of(embedded, "import "), Sampling(max_tokens=4, ignore_eos=True))
    assert tokens_in(wanted, last) == run(engine, 1)
    for cut in range(0, len(wanted), 3):
        second = Spawning(tmp_path, embedded, storage)
        give(second.loop, b"GENERATE", BODY, Flag.MOVED, transcript_of(wanted[:cut]))
        got = [*wanted[:cut], *second.finish()]
        same_entries(merged(got), merged(wanted), embedded, BODY)
        check_nothing_is_left(second.loop)


def test_lost_controllers_are_started_again_before_and_after_a_sequence_begins_anew(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    whole = Spawning(tmp_path, embedded, VariableStorage())
    give(whole.loop, b"GENERATE", BODY, 0)
    wanted = whole.finish()
    for turns in range(1, 30, 6):
        second = Spawning(tmp_path, embedded, VariableStorage())
        give(second.loop, b"GENERATE", BODY, 0)
        for _ in range(turns):
            second.turn()
        second.lose_controllers()
        same_entries(merged(second.finish()), merged(wanted), embedded, BODY)
        check_nothing_is_left(second.loop)


# --- contexts -------------------------------------------------------------------------------------


async def opens(ctx: Context) -> None:
    """Continues a context, and saves it again, so that a replay may not open it again."""
    await ctx.gen(max_tokens=2)
    await ctx.open("chat")
    await ctx.gen(max_tokens=18)
    await ctx.save("chat", pin_s=60)
    await ctx.gen(max_tokens=3)


class State(VariableStorage):
    """The variables and contexts of a state worker, for the requests of one tenant."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.durable = DurableVariables(folder)

    def apply(self, op: Variable) -> VariableAnswer:
        [answer] = self.durable.apply([(op, encode_body(op, "msgpack"))], [Tenant("a")])
        return answer


def test_a_stream_that_moves_replays_the_context_that_its_program_has_opened(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    state = State(tmp_path / "state")
    words = SavedTokens(
        embedded.fingerprint,
        embedded.vocab_size,
        np.array(tokens_of(embedded, OTHER), "<u4").tobytes(),
    )
    state.apply(Variable(99, 1, 1, "save", "chat", msgpack.encode(words)))
    whole = Spawning(tmp_path, embedded, state, opens)
    give(whole.loop, b"GENERATE", BODY, 0)
    wanted = whole.finish()
    [begun] = [e for message in wanted for e in message if e.prompt]
    assert begun.prompt == tokens_of(embedded, OTHER)
    blocks = whole.loop.worker._models.engines["m"]._blocks
    pinned = len(blocks._pins)
    assert pinned == (len(begun.prompt) + 17) // blocks.block_size
    for cut in range(0, len(wanted), 3):
        second = Spawning(tmp_path, embedded, state, opens)
        give(second.loop, b"GENERATE", BODY, Flag.MOVED, transcript_of(wanted[:cut]))
        same_entries(merged([*wanted[:cut], *second.finish()]), merged(wanted), embedded, BODY)
        check_nothing_is_left(second.loop)
    state.durable.close()
