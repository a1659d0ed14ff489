"""The store of modules has a table for each tenant, is shared by several processes, and checks
compiled forms."""

from __future__ import annotations

import fcntl
import hashlib
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wasmtime
from tokenbus.protocol.errors import RequestError, ServiceError, UnavailableError
from tokenbus.protocol.messages import Tagged
from tokenbus.workers.controller.guests.setup import Setup
from tokenbus.workers.controller.guests.table import ProcessTable
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.pool import Pool
from tokenbus.workers.controller.scripts.engines import Engine
from tokenbus.workers.controller.wasm import (
    compiled_modules,
    module_compiler,
    module_table,
    wasm_reader,
)
from tokenbus.workers.controller.wasm.module_compiler import Compiled, compile_module
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.store import ModuleStore
from tokenbus.workers.controller.wasm.wasm_reader import encode_u32

from ....processes import until

pytestmark = pytest.mark.process

LIMITS = Limits()
BOUND_S = 60.0
"""Maximum seconds that a test waits for another thread."""


def module(number: int = 0, more: str = "") -> bytes:
    """A module of the native ABI. Each number gives a different module."""
    calls = "".join(
        f'(func (export "tokenbus_{name}") (result i32) i32.const {number})'
        for name in ("abi_v1", "init_prompt", "pre_process", "mid_process", "post_process")
    )
    return bytes(
        wasmtime.wat2wasm(
            f"""(module (memory (export "memory") 1) (table 2 funcref)
              (global $count (mut i32) (i32.const {number})) {calls} {more}
              (func (export "tokenbus_grow") (param i32) (result i32) i32.const 0))"""
        )
    )


UNKNOWN = bytes(wasmtime.wat2wasm('(module (import "tokenbus" "open" (func)))'))


@pytest.fixture(scope="module")
def engine() -> wasmtime.Engine:
    return make_engine(LIMITS)


@pytest.fixture
def modules(tmp_path: Path, engine: wasmtime.Engine) -> ModuleStore:
    return ModuleStore(tmp_path / "store", LIMITS, engine)


def another(modules: ModuleStore, engine: wasmtime.Engine) -> ModuleStore:
    """Opens the store as another worker does."""
    return ModuleStore(modules._folder, LIMITS, engine)


# --- requests of clients --------------------------------------------------------------------------


def test_a_module_is_stored_under_its_hash_and_found_by_it_and_by_its_tag(
    modules: ModuleStore,
) -> None:
    wasm = module(1)
    stored = modules.put("anna", wasm, "best")
    assert stored.module == hashlib.sha256(wasm).hexdigest()
    assert (stored.tags, stored.size, stored.abi, stored.forks) == (
        ["best"],
        len(wasm),
        "native",
        True,
    )
    assert modules.resolve("anna", "best") == modules.resolve("anna", stored.module)
    assert modules.wasm(stored.module) == wasm
    assert modules.list("anna") == [stored]
    loaded = modules.load(stored.module)
    assert (loaded.abi, loaded.why_no_fork) == ("native", None)
    assert "tokenbus:global:0" in [export.name for export in loaded.module.exports]


def test_a_module_is_read_in_another_process_only(
    modules: ModuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a module may take a second, in which the worker's other threads would wait."""
    monkeypatch.setattr(wasm_reader.Reader, "byte", None)
    stored = modules.put("anna", module(1))
    assert modules.load(stored.module).abi == "native"
    with pytest.raises(RequestError, match="the module is not a controller") as caught:
        modules.put("anna", UNKNOWN)
    assert caught.value.path == "$.data"


def test_the_same_module_again_stays_as_it_was(modules: ModuleStore) -> None:
    first = modules.put("anna", module(), "a")
    again = modules.put("anna", module(), "b")
    assert again.uploaded == first.uploaded
    assert again.tags == ["a", "b"]
    assert len(modules.list("anna")) == 1


def test_a_tag_moves_from_module_to_module(modules: ModuleStore) -> None:
    one, two = (modules.put("anna", module(n)).module for n in (1, 2))
    modules.tag("anna", one, ["x", "y"])
    assert modules.tag("anna", two, ["x"]).tags == ["x"]
    assert modules.resolve("anna", "x") == two
    assert modules.resolve("anna", "y") == one
    assert modules.tag("anna", "x", ["y"]).tags == ["x", "y"]
    assert {m.module: m.tags for m in modules.list("anna")} == {one: [], two: ["x", "y"]}


def test_a_list_of_modules_reads_each_tag_once() -> None:
    reads = []

    class Tags(dict[str, str]):
        def items(self) -> Any:
            for item in super().items():
                reads.append(item)
                yield item

    entry = module_table.Entry(1, 1, 1.0, "native")
    names = [f"{number:064x}" for number in range(10)]
    tags = Tags((f"tag {number}", names[number % 10]) for number in range(50))
    table = module_table.Table("anna", dict.fromkeys(names, entry), tags)
    found = table.all_stored()
    assert len(reads) == 50
    assert [m.module for m in found] == names
    assert found[3].tags == ["tag 13", "tag 23", "tag 3", "tag 33", "tag 43"]


def test_a_module_says_what_compiling_it_took_and_who_tagged_it_when(
    modules: ModuleStore, engine: wasmtime.Engine
) -> None:
    stored = modules.put("anna", module(), "a", by="bert")
    [form] = (modules._folder / "compiled").glob(f"{stored.module}-*")
    assert 0 < stored.compiled_size < form.stat().st_size < stored.compiled_size + 100
    assert stored.compile_ms > 0
    again = modules.tag("anna", "a", ["b"])
    assert {tag: how.by for tag, how in again.tagged.items()} == {"a": "bert", "b": "anna"}
    assert again.tagged["a"] == stored.tagged["a"]
    assert stored.uploaded <= again.tagged["a"].at < again.tagged["b"].at
    assert again.compile_ms == stored.compile_ms
    assert another(modules, engine).list("anna") == [again]
    assert list(modules.delete("anna", "a").tagged) == ["a"]
    [left] = modules.list("anna")
    assert left.tagged == {"b": again.tagged["b"]}


def test_a_tag_of_a_store_that_did_not_keep_who_assigned_it_is_the_tenants(
    modules: ModuleStore,
) -> None:
    stored = modules.put("anna", module(), "a", by="bert")
    [file] = (modules._folder / "tenants").glob("*.json")
    index = msgspec.json.decode(file.read_bytes())
    del index["tagged"]
    file.write_bytes(msgspec.json.encode(index))
    [found] = modules.list("anna")
    assert found.tagged == {"a": Tagged(at=stored.uploaded, by="anna")}


def test_a_tag_is_dropped_alone_and_a_module_with_all_its_tags(modules: ModuleStore) -> None:
    stored = modules.put("anna", module(), "a")
    modules.tag("anna", "a", ["b", "c"])
    assert modules.delete("anna", "b").tags == ["b"]
    assert modules.list("anna")[0].tags == ["a", "c"]
    assert modules.delete("anna", stored.module).tags == ["a", "c"]
    assert modules.list("anna") == []
    for name in ("a", stored.module):
        with pytest.raises(RequestError, match="no module has been uploaded"):
            modules.resolve("anna", name)


def test_a_tenant_sees_and_names_only_its_own(modules: ModuleStore) -> None:
    stored = modules.put("anna", module(1), "mine")
    modules.put("", module(2), "other")
    assert [m.tags for m in modules.list("")] == [["other"]]
    for name in ("mine", stored.module):
        for act in (
            lambda n: modules.resolve("", n),
            lambda n: modules.tag("", n, ["t"]),
            lambda n: modules.delete("", n),
        ):
            with pytest.raises(RequestError) as caught:
                act(name)
            assert caught.value.code == "unknown_controller"
            assert "tags: other" in caught.value.message
            assert stored.module not in caught.value.message.replace(repr(name), "")


def test_contents_of_two_tenants_are_kept_until_neither_has_them(
    modules: ModuleStore, engine: wasmtime.Engine
) -> None:
    name = modules.put("anna", module()).module
    modules.put("ben", module())
    modules.delete("anna", name)
    assert another(modules, engine).load(modules.resolve("ben", name)).abi == "native"
    modules.delete("ben", name)
    assert sorted(f.name for f in modules._folder.rglob("*") if f.is_file()) == ["key", "lock"]
    with pytest.raises(RequestError, match="has been deleted"):
        another(modules, engine).load(name)


def test_an_unknown_name_is_answered_with_what_there_is(modules: ModuleStore) -> None:
    tags = [f"tag{i:02}" for i in range(module_table.SHOWN + 5)]
    first, *_ = [modules.put("anna", module(n)).module for n in range(3)]
    modules.tag("anna", first, tags)
    says = (
        r"^unknown controller 'x'; built in: choice, combination, .*, yacc; "
        r"tags: tag00, .*, tag19 and 5 more; "
        "modules without tags: 2"
    )
    with pytest.raises(RequestError, match=says) as caught:
        modules.resolve("anna", "x")
    assert (caught.value.code, caught.value.path) == ("unknown_controller", "$.controller")
    with pytest.raises(RequestError, match="'choice' is the name of a built-in controller"):
        modules.delete("", "choice")
    with pytest.raises(RequestError, match="unknown module 'x'; tags: tag00") as caught:
        modules.delete("anna", "x")
    assert caught.value.path == "$.module"


def test_an_unknown_name_is_answered_with_those_like_it_first(modules: ModuleStore) -> None:
    name = modules.put("anna", module()).module
    modules.tag("anna", name, ["aardvark", "best", "race"])
    with pytest.raises(RequestError, match="tags: race, aardvark, best"):
        modules.resolve("anna", "raec")


def test_the_answer_to_an_unknown_name_is_short_whatever_tags_there_are(
    modules: ModuleStore,
) -> None:
    name = modules.put("anna", module()).module
    modules.tag("anna", name, [f"{i:04}" * 60 for i in range(2000)])
    with pytest.raises(RequestError, match=" and 1999 more") as caught:
        modules.resolve("anna", "0001" * 64)
    assert len(caught.value.message) < 1000


def test_the_name_of_a_python_controller_is_answered_with_how_to_serve_it(
    modules: ModuleStore,
) -> None:
    says = (
        "unknown controller 'my.mod:Name'; a Python controller needs a worker: tokenbus controller"
    )
    with pytest.raises(RequestError, match=says):
        modules.resolve("anna", "my.mod:Name")


def test_an_id_may_be_named_by_its_first_8_characters(modules: ModuleStore) -> None:
    one, two = (modules.put("anna", module(n)).module for n in (1, 2))
    modules.tag("anna", one[:8], ["x"])
    assert modules.resolve("anna", "x") == modules.resolve("anna", one[:63]) == one
    for short in (one[:7], one[:8].upper(), one[1:20]):
        with pytest.raises(RequestError, match="unknown controller"):
            modules.resolve("anna", short)
    with pytest.raises(RequestError, match="unknown controller"):
        modules.resolve("ben", one[:8])
    assert modules.delete("anna", two[:8]).module == two
    other = modules.put("anna", module(3)).module
    modules.tag("anna", other, [one[:8]])
    assert modules.resolve("anna", one[:8]) == other, "a tag is preferred to the beginning of an id"


def test_the_beginning_of_two_ids_is_ambiguous_and_both_are_named(modules: ModuleStore) -> None:
    one, two = alike()
    ids = sorted(modules.put("anna", wasm).module for wasm in (one, two))
    with pytest.raises(RequestError, match=f"2 modules .*{ids[0]}, {ids[1]}") as caught:
        modules.resolve("anna", ids[0][:8])
    assert caught.value.code == "invalid_field"
    assert modules.delete("anna", ids[1]).module == ids[1]
    assert modules.resolve("anna", ids[0][:8]) == ids[0]


def alike() -> tuple[bytes, bytes]:
    """Two modules whose hashes have the same first 8 digits. About 2**16 modules are made until two
    of them have this property."""
    seen: dict[str, bytes] = {}
    start = module() + b"\0\5\1n"
    for number in count():
        wasm = start + number.to_bytes(3)  # The number is in a custom section.
        first = seen.setdefault(hashlib.sha256(wasm).hexdigest()[:8], wasm)
        if first is not wasm:
            return first, wasm
    raise AssertionError


# --- refused modules ------------------------------------------------------------------------------


def test_a_module_beyond_the_limit_is_refused_with_both_sizes(
    modules: ModuleStore, engine: wasmtime.Engine
) -> None:
    with pytest.raises(RequestError, match="50000000 bytes; the limit is 16777216") as caught:
        modules.put("anna", b"\0asm\1\0\0\0" + bytes(50_000_000 - 8))
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("wasm", "says"),
    [
        (b"#!/bin/sh", "not Wasm"),
        (b"\0asm\1\0\0\0", "not a controller"),
        (module(more="(func (result i32))"), r"not valid: .*offset .*type mismatch"),
        (module(more="(func (param i64) local.get 0 drop) (memory 1)"), "2 memories"),
    ],
)
def test_what_is_no_valid_controller_is_refused(
    modules: ModuleStore, wasm: bytes, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        modules.put("anna", wasm, "tag")
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message
    assert modules.list("anna") == []


@pytest.mark.parametrize("tag", ["", "a\nb", "0" * 64, "\ud800"])
def test_what_can_be_no_tag_is_refused(modules: ModuleStore, tag: str) -> None:
    name = modules.put("anna", module()).module
    for act in (
        lambda: modules.put("anna", module(), tag),
        lambda: modules.tag("anna", name, [tag]),
    ):
        with pytest.raises(RequestError, match="is not a valid tag"):
            act()


def test_a_tenant_has_room_for_so_many_modules_and_so_many_bytes(
    modules: ModuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.put("anna", module(1))
    monkeypatch.setattr(module_table, "MAX_MODULES", 1)
    with pytest.raises(RequestError, match="1 modules are stored, and no more are allowed"):
        modules.put("anna", module(2))
    assert modules.put("anna", module(1))
    assert modules.put("ben", module(2))
    monkeypatch.setattr(module_table, "MAX_MODULES", 10)
    size = modules._compiled._file(modules.list("anna")[0].module).stat().st_size
    monkeypatch.setattr(module_table, "MAX_BYTES", int(2.5 * size))
    assert modules.put("anna", module(3))
    with pytest.raises(RequestError, match="are allowed; delete modules first"):
        modules.put("anna", module(4))
    kept = {m.module for tenant in ("anna", "ben") for m in modules.list(tenant)}
    assert {f.name.split("-")[0] for f in (modules._folder / "compiled").glob("*-*")} == kept


def test_the_quota_of_a_key_is_named_and_says_when_to_try_again(modules: ModuleStore) -> None:
    first = modules.put("anna", module(1), upload_bytes=10**6)
    with pytest.raises(UnavailableError, match="the quota upload_bytes of this key") as caught:
        modules.put("anna", module(2), upload_bytes=len(module(2)) + 1)
    assert caught.value.code == "client_limit"
    assert caught.value.retry_after_s
    assert modules.put("ben", module(2))
    assert [m.module for m in modules.list("anna")] == [first.module]
    modules.delete("anna", first.module)
    assert modules.put("anna", module(2), upload_bytes=10**6)


def slow_module(loops: int) -> bytes:
    """A small module with loops over many locals, whose compilation takes very long."""
    variables = 2000
    body = bytearray(b"\x01" + encode_u32(variables) + b"\x7f")
    for i in range(loops):
        a, b, c = (encode_u32(i * k % variables) for k in (1, 7, 3))
        body += b"\x03\x40\x20" + a + b"\x41\x01\x6a\x21" + b + b"\x20" + c + b"\x0d\x00\x0b"
    body += b"\x0b"
    wasm = module(more="(func)")
    # ``body`` replaces the body of the empty function.
    at = wasm.index(b"\x02\x00\x0b")
    section = wasm.rindex(b"\x0a", 0, at)
    size = wasm[section + 1]
    content = wasm[section + 2 : section + 2 + size]
    content = content.replace(b"\x02\x00\x0b", encode_u32(len(body)) + bytes(body))
    return (
        wasm[:section] + b"\x0a" + encode_u32(len(content)) + content + wasm[section + 2 + size :]
    )


def test_a_module_that_compiles_for_too_long_is_refused(
    modules: ModuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.workers.controller.wasm.module_compiler.CPU_S", 1)
    with pytest.raises(RequestError, match="more than 1 s of CPU time"):
        modules.put("anna", slow_module(8000))
    assert modules.list("anna") == []


def test_a_third_module_waits_while_two_are_compiled(modules: ModuleStore) -> None:
    for _ in range(compiled_modules.AT_ONCE):
        assert modules._compiled._compiling.acquire("", 0.0)
    with pytest.raises(UnavailableError) as caught:
        modules.put("anna", module())
    assert caught.value.retry_after_s == 1.0


def test_the_answer_to_an_upload_says_why_a_module_cannot_fork(modules: ModuleStore) -> None:
    change = "(func (table.set 0 (i32.const 1) (ref.null func)))"
    stored = modules.put("anna", module(more=change))
    assert (stored.forks, stored.why_no_fork) == (True, "")
    stored = modules.put("anna", module(more=f'(data $d "x") (func (data.drop $d)) {change}'))
    assert not stored.forks
    assert "has data.drop, at byte" in stored.why_no_fork
    assert modules.list("anna")[0].why_no_fork == stored.why_no_fork
    assert modules.load(stored.module).why_no_fork == stored.why_no_fork


# --- compiled forms -------------------------------------------------------------------------------


def test_what_was_compiled_once_is_loaded_by_the_next_process(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = modules.put("anna", module(5)).module
    monkeypatch.setattr(compiled_modules, "compile_module", _never)
    loaded = another(modules, engine).load(name)
    assert run(engine, loaded.module) == 5
    assert another(modules, engine).put("ben", module(5)).module == name


@pytest.mark.parametrize("damage", ["flip a byte", "another module's", "cut it", "empty it"])
def test_a_compiled_form_that_was_changed_is_not_used(
    modules: ModuleStore, engine: wasmtime.Engine, damage: str
) -> None:
    name, other = (modules.put("anna", module(n)).module for n in (5, 6))
    file, foreign = (modules._compiled._file(n) for n in (name, other))
    content = bytearray(file.read_bytes())
    if damage == "flip a byte":
        content[len(content) // 2] ^= 1
    elif damage == "another module's":
        content = bytearray(foreign.read_bytes())
    else:
        content = content[: 100 if damage == "cut it" else 0]
    file.write_bytes(content)
    fresh = another(modules, engine)
    assert run(engine, fresh.load(name).module) == 5
    assert file.read_bytes() != content


def test_a_form_for_another_wasmtime_is_compiled_anew(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = modules.put("anna", module(5)).module
    monkeypatch.setattr(compiled_modules, "version", lambda package: "99.0")
    fresh = another(modules, engine)
    assert run(engine, fresh.load(name).module) == 5
    assert len(list((modules._folder / "compiled").glob("*-*"))) == 2
    fresh.delete("anna", name)
    assert not list((modules._folder / "compiled").glob("*-*"))


def test_an_upload_that_was_changed_on_disk_is_not_compiled(
    modules: ModuleStore, engine: wasmtime.Engine
) -> None:
    name = modules.put("anna", module(5)).module
    modules._compiled._file(name).unlink()
    modules._file(name).write_bytes(module(6))
    with pytest.raises(ServiceError, match="was changed"):
        another(modules, engine).load(name)


def test_the_folder_and_its_key_are_for_this_user_alone(modules: ModuleStore) -> None:
    modules.put("anna", module())
    folder = modules._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "compiled" / "key").stat().st_mode & 0o777 == 0o600


def test_memory_keeps_what_was_used_last(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [modules.put("anna", module(n)).module for n in range(4)]
    size = modules._compiled._file(names[0]).stat().st_size
    monkeypatch.setattr(compiled_modules, "KEPT_BYTES", int(2.5 * size))
    fresh = another(modules, engine)
    for name in (*names, names[2]):
        fresh.load(name)
    kept = fresh._compiled._kept
    assert [name for name in names if kept.get(name) is not None] == names[2:]
    assert kept.size < 2.5 * size


def test_the_modules_of_one_tenant_do_not_evict_those_of_another(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [modules.put("anna", module(n)).module for n in range(4)]
    size = modules._compiled._file(names[0]).stat().st_size
    monkeypatch.setattr(compiled_modules, "KEPT_BYTES", int(2.5 * size))
    fresh, pool = another(modules, engine), Pool(1)
    kept = fresh._compiled._kept

    def load(name: str) -> None:
        fresh.load(name)

    for tenant, name in zip(("anna", "bob", "bob", "bob"), names, strict=True):
        pool.submit([partial(load, name)], tenant=tenant)
        until(partial(kept.get, name), BOUND_S, "loaded")
    pool.close()
    assert [name for name in names if kept.get(name) is not None] == [names[0], names[3]]


def test_one_module_is_compiled_once_however_many_want_it(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = modules.put("anna", module(5)).module
    modules._compiled._file(name).unlink()
    fresh = another(modules, engine)
    compile_module, times = compiled_modules.compile_module, []

    def counted(wasm: bytes, limits: Limits) -> Compiled:
        times.append(1)
        return compile_module(wasm, limits)

    monkeypatch.setattr(compiled_modules, "compile_module", counted)
    threads = [threading.Thread(target=fresh.load, args=(name,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times == [1]


def test_an_interpreter_stays_when_a_tenant_deletes_a_module_with_its_bytes(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_modules, "engine", an_interpreter)
    modules.interpreter("python")
    modules.delete("mallory", modules.put("mallory", module(5)).module)
    monkeypatch.setattr(compiled_modules, "compile_interpreter", _never)
    assert run(engine, modules.interpreter("python").module) == 5
    assert run(engine, another(modules, engine).interpreter("python").module) == 5


def test_an_interpreter_does_not_wait_for_the_modules_of_tenants(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_modules, "engine", an_interpreter)
    monkeypatch.setattr(compiled_modules, "TURN_S", 0.0)
    for _ in range(compiled_modules.AT_ONCE):
        assert modules._compiled._compiling.acquire("", 0.0)
    assert run(engine, modules.interpreter("python").module) == 5


def test_streams_that_wait_for_an_interpreter_free_their_slots(
    modules: ModuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, ready = threading.Event(), threading.Event()

    def compile_slowly(wasm: bytes, limits: Limits) -> Compiled:
        compiling.set()
        assert ready.wait(BOUND_S)
        return compile_module(wasm, limits)

    monkeypatch.setattr(compiled_modules, "engine", an_interpreter)
    monkeypatch.setattr(compiled_modules, "compile_interpreter", compile_slowly)
    pool, started, done = Pool(2), threading.Semaphore(0), threading.Semaphore(0)

    def start() -> None:
        started.release()
        modules.interpreter("python")
        done.release()

    try:
        for at in range(4):
            pool.submit([start], tenant=f"tenant {at}")
            assert started.acquire(timeout=BOUND_S)
        assert compiling.wait(BOUND_S)
        ready.set()
        for _ in range(4):
            assert done.acquire(timeout=BOUND_S)
    finally:
        pool.close()


def test_a_tenant_does_not_take_all_places_to_compile(
    modules: ModuleStore, engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the worker of another machine has compiled the modules, streams compile them."""
    owners = {module(at): owner for at, owner in enumerate(["ann", "ann", "ann", "ben"])}
    names = {wasm: modules.put(owner, wasm).module for wasm, owner in owners.items()}
    for name in names.values():
        modules._compiled._file(name).unlink()
    fresh = another(modules, engine)
    began, ready = queue.SimpleQueue[str](), threading.Event()

    def compile_slowly(wasm: bytes, limits: Limits) -> Compiled:
        began.put(owners[wasm])
        assert ready.wait(BOUND_S)
        return compile_module(wasm, limits)

    monkeypatch.setattr(compiled_modules, "compile_module", compile_slowly)

    def load(module: str) -> None:
        fresh.load(module)

    pool = Pool(8)
    try:
        *of_ann, of_ben = (partial(load, names[wasm]) for wasm in owners)
        pool.submit(of_ann, hands=3, tenant="ann")
        until(lambda: pool.waiting_jobs == 3, BOUND_S, "all modules of ann are waited for")
        pool.submit([of_ben], tenant="ben")
        assert [began.get(timeout=BOUND_S) for _ in range(2)] == ["ann", "ben"]
        ready.set()
        assert [began.get(timeout=BOUND_S) for _ in range(2)] == ["ann", "ann"]
    finally:
        ready.set()
        pool.close()


# --- several processes ----------------------------------------------------------------------------

WRITERS, TAGS = 4, 25
TAG_MANY = """
import sys
from pathlib import Path
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.store import ModuleStore

folder, name, number, count = sys.argv[1:]
modules = ModuleStore(Path(folder), Limits(), make_engine(Limits()))
for i in range(int(count)):
    modules.tag("anna", name, [f"{number}-{i}"])
"""


def test_processes_that_tag_at_the_same_time_lose_no_tag(modules: ModuleStore) -> None:
    name = modules.put("anna", module()).module
    command = [sys.executable, "-c", TAG_MANY, str(modules._folder), name]
    writers = [subprocess.Popen([*command, str(n), str(TAGS)]) for n in range(WRITERS)]
    assert [writer.wait(300) for writer in writers] == [0] * WRITERS
    [stored] = modules.list("anna")
    assert len(stored.tags) == WRITERS * TAGS


def test_what_a_dead_writer_left_is_removed_and_what_one_writes_is_not(
    modules: ModuleStore, engine: wasmtime.Engine
) -> None:
    left = [modules._folder / "modules" / f".new-{n}" for n in "ab"]
    for file in left:
        file.write_bytes(b"half")
    with left[1].open("rb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        another(modules, engine)
    assert [file.exists() for file in left] == [False, True]


def test_another_stack_limit_is_another_engine_of_the_same_modules(
    modules: ModuleStore,
) -> None:
    name = modules.put("anna", module(5)).module
    limits = replace(LIMITS, stack_bytes=64 * 1024)
    other = make_engine(limits)
    assert run(other, ModuleStore(modules._folder, limits, other).load(name).module) == 5


def run(engine: wasmtime.Engine, module: wasmtime.Module) -> int:
    """Calls the export ``tokenbus_abi_v1`` of a module; returns the result."""
    instance_store = wasmtime.Store(engine)
    instance_store.set_epoch_deadline(10)
    exports = wasmtime.Instance(instance_store, module, []).exports(instance_store)
    function = exports["tokenbus_abi_v1"]
    assert isinstance(function, wasmtime.Func)
    result: int = function(instance_store)
    return result


def an_interpreter(language: str) -> Engine:
    """Replaces the interpreters of scripts by a module that compiles quickly."""
    return Engine(hashlib.sha256(module(5)).hexdigest(), module(5))


def _never(wasm: bytes, limits: Limits) -> bytes:
    raise AssertionError("the module was compiled again")


def test_files_in_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "queue", "random", "wasmtime"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert compile_module(module(), LIMITS).code
    table = ProcessTable(Setup(LIMITS, []), 1)
    try:
        table.missing_layers()
    finally:
        table.close()


def test_the_reason_for_a_refusal_is_bounded_and_may_have_any_characters(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """A surrogate, which UTF-8 cannot encode, is escaped with six characters."""
    assert module_compiler._refused("\ud800" + "x" * 5000) == module_compiler._REFUSED
    assert capsysbinary.readouterr().err == b"\\ud800" + b"x" * (module_compiler._MAX_REASON - 1)
