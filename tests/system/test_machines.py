"""Controller workers of two machines, each machine with its own folder of modules, and two tenants
with keys. In these tests, all processes run on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client, RequestError
from tokenbus.clients.cli.keys import new_pair
from tokenbus.protocol.keys import Allowed, KeyFolder

from ..workers.controller.wasm.guests import compile_guest
from ..worlds.two_tenants import KeyedBus, Machines

GUEST = """
#include "tokenbus.h"
static uint32_t *mask;
static uint32_t rounds;
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    mask = tb_mask_new();
    tb_mask_set_all(mask);
}
tb_answer tb_pre_process(void) { return tb_go_on(); }
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    return ++rounds > TOKENS ? tb_stop() : tb_sample(mask);
}
"""
"""A guest that stops after ``TOKENS`` tokens."""


@pytest.fixture(scope="module")
def machines(processes: None) -> Iterator[Machines]:
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        keys = KeyFolder(Path(folder, "keys"))
        keys.make(new_pair)
        tenants = []
        for name in ("ann", "ben"):
            key = KeyFolder.issue(name, "client", new_pair(), keys.broker().public)
            keys.allow("client", name, Allowed(public=key.public))
            tenants.append(key)
        with KeyedBus(keys) as bus:
            bus.start_all_roles()
            ann, ben = (Client(bus.front, patience_s=120.0, key=key) for key in tenants)
            with ann, ben:
                yield Machines(bus, ann, ben)


def test_a_tenant_has_no_module_and_no_tag_of_another(machines: Machines) -> None:
    ann, ben = machines.ann, machines.ben
    of_other_tests = {m.module for m in ann.controllers()}
    hers = ann.upload_controller(compile_guest(GUEST, "-DTOKENS=2"), tag="mine").module
    assert ben.controllers() == []
    for name in ("mine", hers, hers[:8]):
        for act in (
            lambda name: ben.tag_controller(name, "taken"),
            ben.delete_controller,
            lambda name: machines.tokens(ben, name),
        ):
            with pytest.raises(RequestError, match="no module has been uploaded") as caught:
                act(name)
            assert caught.value.code == "unknown_controller"
    his = ben.upload_controller(compile_guest(GUEST, "-DTOKENS=3"), tag="mine").module
    assert [machines.tokens(client, "mine") for client in (ann, ben)] == [2, 3]
    assert {m.module for m in ann.controllers()} - of_other_tests == {hers}
    assert [m.module for m in ben.controllers()] == [his]
    ben.delete_controller("mine")
    assert machines.tokens(ann, "mine") == 2
    with pytest.raises(RequestError, match=r"unknown controller 'mine'; .*modules without tags: 1"):
        machines.tokens(ben, "mine")


def test_a_module_that_was_uploaded_at_one_machine_runs_at_another(machines: Machines) -> None:
    bus, ann = machines.bus, machines.ann
    four, five_tokens = (compile_guest(GUEST, f"-DTOKENS={n}") for n in (4, 5))
    module = ann.upload_controller(four, tag="four").module
    other = bus.start_other(
        "controller", run_dir=machines.second, back=f"ipc://{bus.folder}/back.sock"
    )
    bus.wait_for_roles("controller", "controller", "state")
    assert module not in machines.files(machines.second)
    # The first machine's worker now has a stream, so the next stream goes to the second machine.
    busy = ann.generate(
        [40], controller="regex", controller_arg="[a-z]{1900}", max_tokens=1900, n=32
    )
    next(iter(busy))
    assert machines.tokens(ann, "four") == 4
    assert module in machines.files(machines.second)
    # After a tag was changed at one machine, it names the new module at the other machine at once.
    five = ann.upload_controller(five_tokens).module
    ann.tag_controller(five, "four")
    assert machines.tokens(ann, "four") == 5
    with pytest.raises(RequestError, match=r"unknown controller 'four'"):
        machines.tokens(machines.ben, "four")
    assert five in machines.files(machines.second)
    busy.close()
    # Without the first machine's worker, the second machine has all modules that it needs.
    bus.others.pop(1).kill()
    assert machines.tokens(ann, five) == 5
    assert other.alive
