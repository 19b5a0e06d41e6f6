"""A guide decides what may come, whatever the model wants and however it is batched."""

from __future__ import annotations

import numpy as np
import pytest

from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams, SamplingState, sample
from kvcellar.engine.requests.request import Sequence
from kvcellar.engine.schedule.policy import Mixed
from kvcellar.errors import ConfigError
from kvcellar.history import History
from tests.engine.fakes import PARAMS, ByteTokenizer, HashRunner, SeqCells

VOCAB = 260


class Script:
    """Lets the letters of each step come, and ends behind the last."""

    end_id = None

    def __init__(self, steps, at=0):
        self.steps, self.at = steps, at

    @property
    def is_complete(self):
        return self.at == len(self.steps)

    def allowed(self):
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[list(self.steps[self.at].encode())] = True
        return mask

    def accept(self, token_id):
        assert chr(token_id) in self.steps[self.at]
        self.at += 1

    def fork(self):
        return Script(self.steps, self.at)


def guided(*steps, **more):
    return SamplingParams(guide=lambda: Script(steps), **more)


def engine_of(capacity=256, drafter=None, **config):
    cache = SeqCells(make_config(PARAMS, capacity, min_chunk=16))
    return Engine(
        HashRunner(cache, VOCAB),
        cache,
        ByteTokenizer(),
        eos_token_ids=(ByteTokenizer.END,),
        config=EngineConfig(**config),
        drafter=drafter,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_is_what_its_guide_lets_through(temperature):
    params = guided("ab", "cd", "e", "fgh", temperature=temperature, seed=1)
    end = engine_of().generate(Request((1, 2, 3), params))
    assert len(end.text) == 4 and end.text[2] == "e"
    assert end.text[0] in "ab" and end.text[1] in "cd" and end.text[3] in "fgh"
    assert end.reason == "stop" and end.finish.cause == "guide"


def test_guides_of_one_batch_do_not_meet():
    engine = engine_of()
    wants = {engine.submit(Request((i,), guided(*word))): word for i, word in enumerate("ab")}
    wants |= {engine.submit(Request((9, i), guided(*w))): w for i, w in enumerate(["xyz", "q"])}
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    assert {request_id: end.text for request_id, end in ends.items()} == wants


def test_a_guide_survives_preemption():
    engine = engine_of(capacity=48)
    words = ["abcdefghij" * 2, "klmnopqrst" * 2, "uvwxyzabcd" * 2]
    ids = [engine.submit(Request((i,) * 8, guided(*word))) for i, word in enumerate(words)]
    ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
    assert [ends[i].text for i in ids] == words
    assert engine.stats().preemptions > 0


def test_a_copy_goes_its_own_way_and_sampling_changes_nothing():
    state = SamplingState(guided("a", "b"), VOCAB)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    other = state.fork()
    other.record(ord("a"))
    assert chr(sample(logits, [other])[0].token_id) == "b"
    assert chr(sample(logits, [state])[0].token_id) == "a"
    assert (logits == 0).all()


def sequence(n, n_computed, n_prompt):
    found = Sequence(
        request_id=n_computed,
        request=Request((1,)),
        tokens=History(range(n)),
        n_prompt=n_prompt,
        state=SamplingState(SamplingParams(), VOCAB),
        stream=None,
        arrived_s=0.0,
    )
    found.n_computed = n_computed
    return found


def test_beside_answers_a_step_reads_few_tokens_of_prompts():
    decode, prompt = sequence(11, 10, 10), sequence(300, 0, 300)
    policy = Mixed(max_beside=64)
    assert [a.n_tokens for a in policy.allot([decode, prompt], 256)] == [1, 64]
    assert [a.n_tokens for a in policy.allot([prompt], 256)] == [256]
    assert [a.n_tokens for a in Mixed().allot([decode, prompt], 256)] == [1, 255]
    with pytest.raises(ConfigError, match="max_prefill_beside"):
        EngineConfig(max_prefill_beside=0)


class Or(Script):
    """Lets the letters come where the model wants them, and ends where it wants anything else."""

    end_id = ByteTokenizer.END

    def allowed(self):
        mask = super().allowed()
        mask[self.end_id] = True
        return mask


def test_a_sequence_ends_where_the_model_wants_what_a_guide_only_offers_an_end_for():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [ord("x"), ord("a"), ord("b")]] = 5, 4, 3
    greedy = SamplingState(SamplingParams(guide=lambda: Or(["ab"])), VOCAB)
    assert sample(logits, [greedy])[0].token_id == ByteTokenizer.END
    logits[0, ord("a")] = 6
    assert sample(logits, [greedy])[0].token_id == ord("a")


def test_an_offered_end_is_as_likely_as_all_that_it_stands_for():
    chance = np.random.default_rng(5)
    logits = chance.normal(size=VOCAB).astype(np.float32) * 2
    for temperature in (0.5, 1.0, 2.0):
        params = SamplingParams(guide=lambda: Or(["ab"]), temperature=temperature, seed=1)
        held = logits.copy()
        SamplingState(params, VOCAB).adjust(held)
        free = np.exp(logits.astype(np.float64) / temperature)
        free /= free.sum()
        with np.errstate(under="ignore"):
            got = np.exp(held.astype(np.float64) / temperature)
        got /= got.sum()
        np.testing.assert_allclose(got[[ord("a"), ord("b")]], free[[ord("a"), ord("b")]], rtol=1e-4)
        rest = 1 - free[ord("a")] - free[ord("b")]
        assert got[ByteTokenizer.END] == pytest.approx(rest, rel=1e-4)


def test_a_guide_of_an_earlier_version_is_refused_by_what_it_lacks():
    class Old(Script):
        @property
        def end_id(self):
            raise AssertionError("nothing is asked of a guide that is looked at")

    engine_of().submit(Request((1, 2), SamplingParams(guide=lambda: Old(["a"]))))
    guide = Script(["a"])
    old = type("OldGuide", (), {n: getattr(Script, n) for n in ("is_complete", "allowed", "fork")})
    with pytest.raises(ConfigError, match="guide OldGuide has no end_id and no accept, which"):
        engine_of().submit(Request((1, 2), SamplingParams(guide=old)))
    assert guide.at == 0
