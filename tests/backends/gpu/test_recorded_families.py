"""Decode steps of every family can be recorded as graphs, whatever holds its weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.bind import model_attention  # noqa: E402
from kvcellar.backends.torch.bind.binding import bind_network  # noqa: E402
from kvcellar.backends.torch.gpu.record.graphs import StepGraphs  # noqa: E402
from kvcellar.backends.torch.learn.probe import learn_facts  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw, random_network, twin_raw  # noqa: E402
from kvcellar.backends.torch.run.place_weights import hold_parts  # noqa: E402
from kvcellar.backends.torch.run.runner import TorchRunner  # noqa: E402
from kvcellar.errors import ModelError  # noqa: E402
from kvcellar.kernel import levels  # noqa: E402
from kvcellar.models.text.tokenizer import quiet  # noqa: E402
from tests.backends.gpu.meta_card import CARD, CaptureError, MetaCard, meta_card  # noqa: E402
from tests.models.test_check import EXACT, RECURRENT  # noqa: E402

FEW = ("llama", "gpt_oss", "llama4", "phimoe", "gemma3n", "lfm2")
"""Families of which each has something that others lack; the rest runs with all cases alone."""

ALL = (*EXACT.split(), *RECURRENT.split())

CASES = [
    (family, weights)
    for family in (ALL if "KVCELLAR_ALL_CASES" in os.environ else FEW)
    for weights in (None, "bf16")
]


def network_of(family: str, weights: str | None) -> tuple[Any, Any]:
    """A family's twin on the card, as loading puts it there; and its facts."""
    try:
        raw = twin_raw(default_raw(family))
        facts = learn_facts(raw)
    except ModelError:
        raw = twin_raw(default_raw(family), keeps_dims=True)
        facts = learn_facts(raw)
    network = random_network(raw, attention=model_attention.NAME)
    if weights == "bf16":
        network.bfloat16()
    bind_network(network, facts, CARD)
    hold_parts(network, weights, CARD, Path(os.devnull), {}, facts)
    return network.to(CARD), facts


def played(card: MetaCard, network: Any, facts: Any) -> StepGraphs:
    """A prompt, and then steps of one sequence and of eight, each of them twice."""
    dtype = str(network.dtype).removeprefix("torch.")
    config = kv.make_config(facts.params, 64, min_chunk=64, kv_dtype=dtype)
    with kv.make_seq_session("torch", config) as session, card:
        runner = TorchRunner(network, None, facts.params, facts.vocab_size, session)
        runner.graphs = StepGraphs(network, card)
        cache: Any = session.cache
        runner.forward([1] * 5, cache.begin_step([(0, 5)]))
        for seq_id in range(1, 8):
            cache.seq_cp(0, seq_id)
        for n in (8, 8, 1, 1):  # states of eight move when they come, and a graph goes with them
            runner.forward(
                [1] * n, cache.begin_step([(seq_id, 1) for seq_id in range(n)]), range(n)
            )
    return runner.graphs


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights"), CASES)
def test_a_family_s_steps_are_recorded(family: str, weights: str | None, caplog: Any) -> None:
    if weights is not None and not levels.is_available():
        pytest.skip(levels.why_not())
    card = MetaCard()
    with caplog.at_level(logging.WARNING, "kvcellar.torch"), meta_card():
        with quiet(lambda part: None):
            network, facts = network_of(family, weights)
        graphs = played(card, network, facts)
    assert not graphs.is_off, caplog.text
    assert graphs.n_graphs == card.n_captured == card.n_played == 2


# What the card refuses ----------------------------------------------------------------------------

REFUSED = {
    "copy to the card": lambda x: x + torch.arange(4).to(CARD),
    "copy from it": lambda x: x.cpu(),
    "numbers": lambda x: x * torch.tensor([1, 2, 3, 4], device=CARD),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "index": lambda x: x[torch.tensor([0, 1])],
    "list": lambda x: x[[0, 1]],
    "groups": lambda x: torch._grouped_mm(
        torch.empty(4, 16, device=CARD),
        torch.empty(2, 16, 16, device=CARD),
        offs=x[:2].int(),
    ),
    "other device": lambda x: torch.cat([x, torch.arange(4)]),
}
ALLOWED = {
    "range": lambda x: x + torch.arange(4, device=CARD),
    "scalar": lambda x: x * torch.tensor(2),
    "full": lambda x: x + torch.full((4,), 3, device=CARD),
    "index": lambda x: x[torch.arange(2, device=CARD)],
    "where": lambda x: torch.where(x > 0, x, 0),
    "type": lambda x: x.float(),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("what", [*REFUSED, *(f"allowed {name}" for name in ALLOWED)])
def test_what_cuda_refuses_is_refused(what: str, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        x, card = torch.empty(4, dtype=torch.int64, device=CARD), MetaCard()
        with card:
            if what.startswith("allowed"):
                card.capture(lambda: (ALLOWED[what.removeprefix("allowed ")](x),))
                return
            with pytest.raises(CaptureError):
                card.capture(lambda: (REFUSED[what](x),))


def test_a_tensor_that_outlives_its_graph_is_refused() -> None:
    kept, card = [], MetaCard()
    x = torch.empty(4, device=CARD)
    with card, pytest.raises(CaptureError, match="outlive"):
        card.capture(lambda: (kept.append(x + 1), x * 2)[1:])
