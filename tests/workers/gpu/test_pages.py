"""A worker's report of the pages in its KV cache equals the content of its blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenbus.protocol.bodies import encode_body, pack_tokens
from tokenbus.protocol.messages import Generate
from tokenbus.protocol.pages import (
    KEY_BYTES,
    PAGE_TOKENS,
    first_key,
    join_keys,
    page_keys,
    split_keys,
)
from tokenbus.protocol.worker_messages import Pages, Registered
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.engine.block_manager import BlockManager, BlockTable
from tokenbus.workers.gpu.engine.pages import PageLog
from tokenbus.workers.gpu.model.loader import load_model

from ...worlds.gpu_worker_loop import Loop


def _keys(tokens: list[int]) -> list[bytes]:
    return list(page_keys(first_key("m"), pack_tokens(tokens), 99))


def _write(blocks: BlockManager, table: BlockTable, tokens: list[int], start: int) -> None:
    assert blocks.reserve(table, start, len(tokens)) is not None
    blocks.commit(table, tokens, len(tokens))


@pytest.mark.parametrize("block_size", [16, 256])
def test_full_pages_come_and_go_with_their_blocks(block_size: int) -> None:
    log = PageLog("m", block_size)
    per_page = PAGE_TOKENS // block_size
    blocks = BlockManager(4 * per_page + 1, block_size, log)
    first = [n % 251 for n in range(2 * PAGE_TOKENS + 7)]
    table = BlockTable()
    _write(blocks, table, first, 0)
    assert log.take() == (_keys(first), [])
    blocks.free(table)
    assert not log.changed
    other = [n % 241 for n in range(3 * PAGE_TOKENS)]
    _write(blocks, BlockTable(), other, 0)
    came, went = log.take()
    assert came == _keys(other)
    # The last pages of a prefix are evicted first.
    assert went == _keys(first)[1:]
    assert sorted(log.every()) == sorted([*_keys(other), *_keys(first)[:1]])


def test_a_page_that_came_and_went_between_two_reports_is_in_none() -> None:
    log = PageLog("m", 256)
    blocks = BlockManager(2, 256, log)
    table = BlockTable()
    _write(blocks, table, [1] * 256, 0)
    blocks.discard(table)
    assert log.take() == ([], [])


@pytest.mark.parametrize("seed", range(4))
def test_the_reports_add_up_to_the_pages_that_a_request_would_find(seed: int) -> None:
    rng = random.Random(seed)
    log = PageLog("m", 16)
    blocks = BlockManager(120, 16, log)
    held: list[tuple[BlockTable, list[int]]] = []
    known: set[bytes] = set()
    prompts: list[list[int]] = []
    for _ in range(60):
        what = rng.random()
        if held and what < 0.3:
            blocks.free(held.pop(rng.randrange(len(held)))[0])
        elif held and what < 0.5:
            table, tokens = rng.choice(held)
            at = rng.randrange(len(tokens))
            child = blocks.fork(table, at), tokens[:at]
            held.append(child)
        elif held and what < 0.7:
            table, tokens = rng.choice(held)
            at = rng.randrange(len(tokens))
            blocks.truncate(table, at)
            del tokens[at:]
            more = [rng.randrange(2)] * rng.randrange(1, 300)
            if blocks.reserve(table, at, at + len(more)) is not None:
                tokens += more
                blocks.commit(table, tokens, len(tokens))
        else:
            tokens = [rng.randrange(2)] * 256 + [rng.randrange(2)] * rng.randrange(1, 400)
            table = BlockTable()
            hit = blocks.match(table, tokens, len(tokens) - 1)
            if blocks.reserve(table, hit, len(tokens)) is None:
                blocks.free(table)
                continue
            blocks.commit(table, tokens, len(tokens))
            held.append((table, list(tokens)))
            prompts.append(list(tokens))
        for table, tokens in held:
            if not tokens:
                blocks.free(table)
        held = [(table, tokens) for table, tokens in held if tokens]
        came, went = log.take()
        assert not known & set(came)
        assert known >= set(went)
        known = (known | set(came)) - set(went)
        for tokens in prompts:
            table = BlockTable()
            hit = blocks.match(table, tokens, len(tokens))
            blocks.free(table)
            assert not log.changed
            found = _keys(tokens[:hit])
            assert set(found[-1:]) <= known
    assert sorted(known) == sorted(log.every())


def test_a_worker_reports_its_pages_and_all_of_them_after_a_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    monkeypatch.setattr(module, "PAGES_EVERY_S", 0.0)
    loop = Loop(tmp_path, load_model("embedded"))
    prompt = [5 + n % 90 for n in range(PAGE_TOKENS + 20)]
    body = Generate(stream_id=1, model="m", prompt=prompt, max_tokens=2, ignore_eos=True)
    loop.give(b"GENERATE", encode_body(body, "msgpack"), 1, 101)
    while len(loop.sent(b"TOKEN")) < 2:
        assert not loop.sent(b"ERROR")
        loop.turn()
        loop.worker._report_pages()
    wanted = list(page_keys(first_key("embedded"), pack_tokens(prompt), 9))
    reset, report = loop.sent(b"PAGES")[0], loop.sent(b"PAGES")[-1]
    assert reset[2] == encode_body(Pages(reset=True), "msgpack")
    assert split_keys(report[3]) == wanted
    answer = Registered(worker=1, heartbeat_s=1.0, expiry_s=5.0)
    loop.give(b"REGISTERED", answer)
    loop.turn()
    loop.worker._report_pages()
    last = loop.sent(b"PAGES")[-1]
    assert last[2] == encode_body(Pages(reset=True), "msgpack")
    assert last[3] == join_keys(wanted)
    loop.worker._report_pages()
    assert loop.sent(b"PAGES")[-1] is last


def test_what_is_left_over_behind_the_last_key_is_dropped() -> None:
    assert split_keys(b"12345678" * 2 + b"123") == [b"12345678"] * 2
    assert split_keys(b"1234567") == []
    assert KEY_BYTES == 8
