"""Whatever a request asks of sampling holds with guesses, whoever makes them: trees and chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcellar.engine import FinishEvent, GeneratedToken, Request, SamplingParams
from kvcellar.engine.loop.generating import generate
from tests.engine.fakes import FULL_PARAMS, ByteTokenizer, HashRunner, make_cache
from tests.engine.speculate.test_lossless import DRAFTERS, drafter_of
from tests.engine.speculate.test_trees import UpTo
from tests.engine.speculate.traces import NARROW, prompts
from tests.engine.test_engine import EOS, VOCAB, make_engine, nothing_is_left

PLAIN = SamplingParams(max_tokens=30, ignore_eos=True)
SETTINGS = {
    "temperature": replace(PLAIN, temperature=0.3, seed=3),
    "cuts": replace(PLAIN, temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, seed=4),
    "penalties": replace(
        PLAIN, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "sampled with penalties": replace(
        PLAIN, temperature=0.3, seed=5, repetition_penalty=1.1, frequency_penalty=0.2
    ),
    "logprobs": replace(PLAIN, logprobs=3),
    "grammar": replace(PLAIN, guide=lambda: UpTo(20)),
    "sampled by a grammar": replace(PLAIN, guide=lambda: UpTo(20), temperature=0.3, seed=6),
    "stop text": PLAIN,
    "sampled up to a stop text": replace(PLAIN, temperature=0.3, seed=7),
    "the model's own end": replace(
        PLAIN, max_tokens=60, ignore_eos=False, logit_bias={ByteTokenizer.END: 1.5}
    ),
}

CAUSES = {
    "grammar": "guide",
    "sampled by a grammar": "guide",
    "stop text": "stop_text",
    "sampled up to a stop text": "stop_text",
    "the model's own end": "eos",
}
"""What ends some of them."""


def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[Any]:
    """Every token of the plain loop with its text and probabilities, and how it ended."""
    cache = make_cache("seq", 512, FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    return list(generate(runner, cache, ByteTokenizer(), prompt, params, eos_token_ids=EOS))


@pytest.mark.parametrize("cache", ["tree", "seq"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.slow
def test_a_setting_holds_within_guesses(kind, setting, cache):
    params = SETTINGS[setting]
    if kind == "ngram":  # it is right where few tokens are said again and again
        more = {token: 28 + extra for token, extra in params.logit_bias.items()}
        params = replace(params, logit_bias={**NARROW, **more})
    engine = make_engine(
        params=FULL_PARAMS,
        cache=make_cache(cache, 600, FULL_PARAMS),
        drafter=drafter_of(kind, FULL_PARAMS),
        verify_all_drafts=True,
    )
    wanted: dict[int, list[Any]] = {}
    for prompt in prompts(3, VOCAB):
        mine = params
        if "stop text" in setting:
            mine = replace(params, stop=(alone(prompt, params)[-1].text[17:19],))
        wanted[engine.submit(Request(prompt, mine))] = alone(prompt, mine)
    told: dict[int, list[GeneratedToken]] = {request_id: [] for request_id in wanted}
    ends: dict[int, FinishEvent] = {}
    for event in engine.run():
        if isinstance(event, GeneratedToken):
            told[event.request_id].append(event)
        else:
            ends[event.request_id] = event
    for request_id, (*tokens, generation) in wanted.items():
        assert told[request_id] == tokens
        end = ends[request_id]
        assert (end.text, end.finish) == (generation.text, generation.finish)
    assert engine.stats().accepted_tokens > 0
    nothing_is_left(engine)
    causes = [end.finish.cause for end in ends.values() if end.finish is not None]
    if setting in CAUSES:
        assert CAUSES[setting] in causes
