"""Queries and overrides of C guests: the requests, the answers, and the refusals."""

from __future__ import annotations

import struct

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.sampling import Distribution, Override, Query
from tokenbus.workers.controller.interface import Action, Answer

from ..played import BYTES, Steered

pytestmark = pytest.mark.process

SIZE = len(BYTES)

READS = r"""
#include "tokenbus.h"

static uint32_t rounds;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    const uint32_t named[] = {9, 7};
    tb_query(2, named, 2);
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    if (++rounds == 2) tb_query(64, 0, 0);
    if (rounds == 3) tb_override_temperature(0.25f), tb_override_top_p(0.5f), tb_override_seed(5);
    if (rounds == 4) tb_override_seed(1ull << 40);
    return tb_sample(0);
}

static void bits(float number) { tb_log("%u ", tb_float_bits(number)); }

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)backtrack;
    for (uint32_t i = 0; i < n; i++) {
        const tb_distribution *seen = tb_distribution_get(i);
        if (!seen) { tb_log("none"); continue; }
        bits(seen->logprob), bits(seen->entropy);
        tb_log("%u ", seen->rank);
        for (uint32_t k = 0; k < seen->num_top; k++)
            tb_log("%u:", seen->top[k].token), bits(seen->top[k].logprob);
        for (uint32_t k = 0; k < seen->num_scores; k++)
            tb_log("%u=", seen->scores[k].token), bits(seen->scores[k].logprob);
    }
    return tb_go_on();
}
"""


def decided(guest: Steered) -> Answer:
    """Runs a round; returns its decision."""
    guest.controller.pre_process()
    return guest.controller.mid_process((0,), memoryview(guest._mask))


def bits(number: float) -> str:
    return f"{struct.unpack('<I', struct.pack('<f', number))[0]} "


def test_the_query_of_init_prompt_holds_for_every_token_and_others_for_one() -> None:
    guest = Steered(READS, BYTES)
    guest.begin()
    asked = [decided(guest).query for _ in range(3)]
    assert asked == [Query(2, [9, 7]), Query(64, []), Query(2, [9, 7])]


def test_overrides_hold_for_one_token() -> None:
    guest = Steered(READS, BYTES)
    guest.begin()
    set_by = [decided(guest).override for _ in range(5)]
    assert set_by == [None, None, Override(0.25, 0.5, 5), Override(seed=1 << 40), None]


def test_a_guest_reads_the_answers() -> None:
    guest = Steered(READS, BYTES)
    guest.begin()
    host = guest.controller._host  # type: ignore[attr-defined]
    seen = Distribution(
        logprob=-0.5, rank=3, entropy=1.25, top={7: -0.25, 8: -1.0}, scores={9: -3.0}
    )
    host.distributions = [seen]
    guest.post([8])
    wanted = f"{bits(-0.5)}{bits(1.25)}3 7:{bits(-0.25)}8:{bits(-1.0)}9={bits(-3.0)}"
    assert guest.log.take() == wanted
    host.distributions = ()
    guest.post([8])
    assert guest.log.take() == "none"
    most = {token: -float(token) for token in range(64)}
    host.distributions = [Distribution(logprob=0.0, rank=1, entropy=0.0, top=most, scores=most)]
    guest.post([8])
    assert guest.log.take().count(":") == 64


LOOKS = r"""
#include "tokenbus.h"

static uint32_t rounds;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_query(2, 0, 0);
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    if (rounds++) return tb_sample(0);
    tb_override_seed(5);
    const uint32_t named[] = {9};
    return tb_look(3, named, 1);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)backtrack;
    const tb_distribution *seen = tb_distribution_get(0);
    if (seen) tb_log("%u %u %u", n, seen->rank, seen->top[0].token);
    return tb_go_on();
}
"""


def test_a_look_is_a_query_for_one_round_and_leaves_the_override_to_the_next_token() -> None:
    guest = Steered(LOOKS, BYTES)
    guest.begin()
    first = decided(guest)
    assert (first.action, first.query, first.override) == (Action.LOOK, Query(3, [9]), None)
    host = guest.controller._host  # type: ignore[attr-defined]
    host.distributions = [Distribution(logprob=0.0, rank=0, entropy=1.0, top={7: -0.5})]
    guest.post([])
    assert guest.log.take() == "0 0 7"
    then = decided(guest)
    assert (then.action, then.query, then.override) == (Action.CONTINUE, Query(2), Override(seed=5))
    assert decided(guest).override is None


def test_a_fork_asks_as_its_parent_does() -> None:
    guest = Steered(READS, BYTES)
    guest.begin()
    decided(guest)
    copy = guest.controller.fork(guest.controller._host)  # type: ignore[attr-defined]
    mask = memoryview(guest._mask)
    assert [copy.mid_process((0,), mask).query for _ in range(2)] == [Query(64), Query(2, [9, 7])]
    copy.close()


def test_a_guest_that_does_not_ask_has_no_options() -> None:
    guest = Steered('#include "tokenbus.h"\n', BYTES)
    guest.begin()
    answer = decided(guest)
    assert (answer.query, answer.override) == (None, None)


ASKS = r"""
#include "tokenbus.h"
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    static const uint32_t named[300] = {0};
    const uint32_t outside = 5000;
    (void)named, (void)outside;
    CASE;
    return tb_sample(0);
}
"""


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("tb_query(65, 0, 0)", "top of the query is 65"),
        ("tb_query(0, named, 257)", "the query has 257 tokens; at most 256 are allowed"),
        ("tb_query(0, &outside, 1)", f"a token of the query is 5000; .* 0 to {SIZE - 1}"),
        ("tb_query(0, (void *)0x7ffffffc, 9)", "memory"),
        ("tb_override_temperature(-1)", "the temperature of the override is -1.0"),
        ("tb_override_temperature(__builtin_inff())", "the temperature of the override is inf"),
        ("tb_override_top_p(0)", "the top_p of the override is 0.0"),
        ("tb_override_seed(1ull << 63)", "the seed of the override is 9223372036854775808"),
    ],
)
def test_a_wrong_query_or_override_ends_the_sequence(case: str, error: str) -> None:
    guest = Steered(ASKS.replace("CASE", case), BYTES)
    guest.begin()
    with pytest.raises(ControllerError, match=error):
        decided(guest)
