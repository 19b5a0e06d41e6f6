"""The tokens between two snapshots of a long prompt: from seconds, bytes and room, as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcellar.cache_config import make_config
from kvcellar.engine.kv.spacing import Spacing
from tests.engine.fakes import STATE_PARAMS, STATES


def spacing(n_slots: int = 10_000) -> Spacing:
    return Spacing(make_config(STATE_PARAMS, 100_000, n_slots=n_slots))


def test_before_anything_was_measured_room_and_bytes_decide():
    assert spacing(102).interval(5_000, 100_000, 1) == 1000
    assert spacing(102).interval(5_000, 100_000, 26) == 2000, "running sequences take slots"
    large = replace(STATE_PARAMS, state=replace(STATES, layers=STATES.layers * 1000))
    one = Spacing(make_config(large, 100_000, n_slots=10_000))
    assert one.interval(5_000, 100_000, 1) == large.state.slot_bytes // 32
    assert not one.is_measured


def test_the_dearer_a_forward_and_the_cheaper_a_token_the_further_apart_they_are():
    one = spacing()
    one.ran(4, 0, 0.05)  # a step without prompts: what a forward takes
    assert one.interval(10_000, 100_000, 1) == 11 and not one.is_measured
    one.ran(500, 500, 1.0)  # 2 ms a token
    assert one.is_measured
    assert one.interval(10_000, 100_000, 1) == pytest.approx((2 * 10_000 * 25) ** 0.5, abs=1)
    assert one.interval(40_000, 100_000, 1) == pytest.approx((2 * 40_000 * 25) ** 0.5, abs=1)
    one.ran(100, 30, 50.0)  # of both kinds: says little of either
    assert one.interval(10_000, 100_000, 1) == pytest.approx((2 * 10_000 * 25) ** 0.5, abs=1)
    for _ in range(100):
        one.ran(500, 500, 0.25)
    assert one.interval(10_000, 100_000, 1) == pytest.approx((2 * 10_000 * 100) ** 0.5, rel=0.05)


def test_it_is_where_the_time_is_least():
    one = spacing()
    one.ran(1, 0, 0.03)
    one.ran(512, 512, 0.512)
    n = 20_000

    def seconds(interval: int) -> float:
        return n / interval * 0.03 + interval / 2 * 0.001

    best = one.interval(n, 100_000, 1)
    assert all(seconds(best) <= seconds(best + by) for by in (-300, -50, 50, 300))


def test_an_answer_is_expected_as_long_as_others_were_and_a_longer_one_as_long_again():
    one = spacing()
    assert one.answer_left(50, 10) == 40, "nothing is known"
    one.answered(30)
    assert one.answer_left(50) == 30 and one.answer_left(20) == 20
    assert one.answer_left(1000, 10) == 20
    assert one.answer_left(1000, 200) == 200 and one.answer_left(300, 200) == 100
    one.answered(1)
    assert one.answer_left(50) == 28


def test_forwards_are_worth_the_tokens_that_take_as_long():
    one = spacing()
    assert one.prompt_tokens(10) == 0
    one.ran(4, 0, 0.05)
    one.ran(500, 500, 1.0)
    assert one.prompt_tokens(10) == pytest.approx(250)
