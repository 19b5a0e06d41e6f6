"""Checks of models of transformers: on the model itself where that is quick, else on its twin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcellar.backends.host_memory import give_back
from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.cpu.hold import hold_mixers
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    random_network,
    started_network,
    twin_raw,
)
from kvcellar.backends.torch.load.networks import empty_network, load_network, unforeseen
from kvcellar.backends.torch.load.weights import UnreadWeightsError
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.errors import KVCellarError, ModelError
from kvcellar.models.check import (
    CAPACITY,
    TOLERANCE,
    CheckVerdict,
    Subject,
    compare,
    kinds_of,
    torch_versions,
    unit_of,
)
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.configs import config_from_dict, rope_of
from kvcellar.models.plays import make_texts
from kvcellar.models.runner import FloatArray, Runner
from kvcellar.models.text.tokenizer import quiet
from kvcellar.registry import CacheSession
from kvcellar.types import IntArray

MOST_NUMBERS = 4_000_000
"""Numbers of a model that is checked itself."""

_SHORT = 64
"""Longest window or chunk that the texts of a check meet."""

SLACK, MOST_SLACK = 4.0, 1e-3
"""How many times a model's own rounding is allowed where that is more, and never more than that: a
model that amplifies noise would hide a fault as large."""

_MOST_SAID = 400
"""Letters of a reason."""

Report = Callable[[float], None]


def unheard(part: float) -> None:
    """Report to nobody."""


def check_checkpoint(
    folder: Path, raw: Mapping[str, Any], report: Report = unheard
) -> CheckVerdict:
    """Compare a model behind our caches with its own eager attention over whole texts, in float32.

    Args:
        folder: the checkpoint.
        raw: its ``config.json``.
        report: is told how much is done.

    Raises:
        UnreadWeightsError: its weights cannot be read, which says nothing of the model.
    """

    def make() -> Pair:
        facts = learn_facts(raw)
        spans = [span for group in facts.params.groups for span in (group.window, group.chunk)]
        is_met = all(span is None or span <= _SHORT for span in spans) and facts.rope.is_fixed
        if not is_met or _count(empty_network(raw)) > MOST_NUMBERS:
            return twins(raw)
        cpu = torch.device("cpu")
        with quiet(unheard):
            ours, theirs = (
                load_network(folder, raw, dtype=torch.float32, device=cpu, attention=attention)
                for attention in (None, "eager")
            )
        return _pair(ours, theirs, facts, "the model itself, of")

    return _check(str(raw.get("model_type")), make, report)


def check_family(model_type: str, report: Report = unheard, **fields: Any) -> CheckVerdict:
    """Compare a family's twin with itself, made of the family's default config.

    Args:
        model_type: as ``zoo`` has it.
        report: is told how much is done.
        fields: of its text part, in place of the defaults.
    """
    return _check(model_type, lambda: twins(default_raw(model_type, **fields)), report)


@dataclass(frozen=True, slots=True)
class Pair:
    """One model twice.

    Attributes:
        ours: on the op.
        theirs: with eager attention.
        facts: of the model.
        name: what it is.
        exact_to: tokens of the longest text that RoPE was made for, where longer ones are
            turned otherwise.
    """

    ours: Any
    theirs: Any
    facts: ModelFacts
    name: str
    exact_to: int | None = None


@quiet(unheard)  # transformers says at length that it has no kernels of its own
def _check(family: str, make: Callable[[], Pair], report: Report) -> CheckVerdict:
    """Make a pair of networks and compare them; what goes wrong is the verdict's reason.

    Raises:
        UnreadWeightsError: from ``make``.
    """
    start = time.perf_counter()
    layers: tuple[str, ...] = ()
    name, own, reason = "nothing", None, None
    differences: dict[str, dict[str, float]] = {}
    pair, allowed = None, TOLERANCE
    exact_to, beyond = None, None
    try:
        pair = make()
        name, layers = pair.name, kinds_of(pair.facts.params)
        own = own_gap(pair.theirs, pair.facts.vocab_size)
        subject = subject_of(pair, report)
        differences = compare(subject)
        allowed = _allowed(pair, subject, differences)
        if subject.beyond > allowed:
            exact_to, beyond = pair.exact_to, subject.beyond
    except UnreadWeightsError:
        raise
    except Exception as error:  # whatever transformers' own code does not like
        if not isinstance(error, KVCellarError):
            error = unforeseen(family, "a few texts were compared", error)
        reason = " ".join(str(error).split())[:_MOST_SAID]
    del pair
    give_back()  # a process that is measured afterwards holds the model alone
    seconds = round(time.perf_counter() - start, 2)
    return CheckVerdict(
        family,
        layers,
        name,
        differences,
        own,
        reason,
        torch_versions(),
        seconds,
        allowed,
        exact_to,
        beyond,
    )


def twins(raw: Mapping[str, Any]) -> Pair:
    """Return a pair of networks of a model's twin, with the same random weights.

    Args:
        raw: the model's ``config.json``.

    Raises:
        ModelError: there is no twin, or its attention cannot be served.
    """
    try:
        small = twin_raw(raw)
        facts = learn_facts(small)
    except ModelError:  # some sizes belong to heads, and are nowhere in the config
        small = twin_raw(raw, keeps_dims=True)
        facts = learn_facts(small)
    facts.params  # noqa: B018 (what cannot be served is refused first)
    theirs = random_network(small, attention="eager")
    ours = started_network(small)
    ours.load_state_dict(theirs.state_dict())
    pair = _pair(ours, theirs, facts, f"a twin of {facts.n_layers} layers and")
    if facts.rope.is_fixed:
        return pair
    return replace(pair, exact_to=rope_of(config_from_dict(raw)).original)


def _pair(ours: Any, theirs: Any, facts: ModelFacts, name: str) -> Pair:
    """Return a pair of networks of which one is held as loading holds it."""
    bind_network(ours, facts)
    hold_mixers(ours)
    return Pair(ours, theirs, facts, f"{name} {_count(theirs):,} numbers")


def _count(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def own_gap(network: Any, vocab_size: int) -> float | None:
    """Return how far a network's own chunked logits are from those of the whole text at once.

    With the cache that it makes itself. None: it does not take tokens in chunks.
    """
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, min(vocab_size, 250), (1, 60)))
    at = torch.arange(60)[None]
    gap, past = 0.0, None
    try:
        with torch.inference_mode():
            want = network(input_ids=ids, position_ids=at, use_cache=False).logits
            for start, stop in ((0, 30), (30, 31), (31, 60)):
                out = network(
                    input_ids=ids[:, start:stop],
                    position_ids=at[:, start:stop],
                    past_key_values=past,
                    use_cache=True,
                )
                past = out.past_key_values
                gap = max(gap, (out.logits - want[:, start:stop]).abs().max().item())
    except Exception:  # not every model does
        return None
    return gap


def _allowed(pair: Pair, subject: Subject, differences: Mapping[str, Any]) -> float:
    """Return how much a logit may differ: more where float32 itself is further from float64.

    That is looked at last, and only where it matters: the pair's own network is made float64.
    """
    found = max(gap for parts in differences.values() for gap in parts.values())
    if not TOLERANCE < found <= MOST_SLACK:
        return TOLERANCE
    texts = make_texts(subject.vocab_size, subject.n_columns)
    rounded = subject.oracle(texts)
    try:
        pair.theirs.double().set_experts_implementation("eager")  # torch's groups have no float64
        exact = subject.oracle(texts)
    except Exception:  # not every model's code runs in it
        return TOLERANCE
    noise = float(np.abs(rounded - exact).max()) / unit_of(rounded)
    return max(TOLERANCE, min(SLACK * noise, MOST_SLACK))


def subject_of(pair: Pair, report: Report = unheard) -> Subject:
    """Return a pair of networks as the neutral check takes them."""
    facts = pair.facts

    def oracle(texts: IntArray) -> FloatArray:
        ids = torch.from_numpy(texts)
        at = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        with torch.inference_mode():
            logits = pair.theirs(input_ids=ids, position_ids=at, use_cache=False).logits
        found: FloatArray = logits.float().numpy()
        return found

    def bind(session: CacheSession[Any]) -> Runner:
        length = facts.rope.length_for(CAPACITY)
        return TorchRunner(
            pair.ours,
            None,
            facts.params,
            facts.vocab_size,
            session,
            rope_length=length,
            rope_border=facts.rope.border_in(length),
        )

    subject = Subject(facts.params, facts.vocab_size, oracle, bind, "torch", report=report)
    if not facts.rope.is_fixed:  # factors are those of the longest text that the caches hold
        subject.n_columns, subject.border = CAPACITY, facts.rope.original
    return subject
