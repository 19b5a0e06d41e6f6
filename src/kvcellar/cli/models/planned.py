"""The plan of a model, by which the native backend runs it, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvcellar.cli.common.terminal import write
from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_config, read_json
from kvcellar.models.plans.plan import (
    GELU_TANH,
    SILU,
    LatentPlan,
    LayerPlan,
    LinearPlan,
    ModelPlan,
    kept_plan,
)
from kvcellar.models.plans.recurrent import CONVOLUTION, DELTA, RecurrentPlan
from kvcellar.models.plans.rules import known_plan
from kvcellar.models.sizes.sizing import find_config


def show_plan(model: str, as_json: bool) -> None:
    """Print the plan of a model.

    Raises:
        ModelError: there is no such model, or it has no plan.
    """
    path = find_config(model)
    checkpoint = path.parent if path.name == "config.json" else path
    raw = read_json(path) if checkpoint.suffix == ".json" else read_config(checkpoint)
    plan = known_plan(raw)
    if plan is None:
        raise ModelError(
            f"{model!r} has no plan yet, by which the native backend runs a model; load it once "
            f"with torch, as with: kvcellar generate {model} --weights bf16 --max-tokens 1"
        )
    if as_json:
        write(json.dumps(plan.to_json()) + "\n")
        return
    is_learnt = kept_plan(raw) is not None
    for name, text in _lines(plan, is_learnt=is_learnt):
        write(f"{name:<12}{text}\n")


def _lines(plan: ModelPlan, *, is_learnt: bool) -> Iterator[tuple[str, str]]:
    """Yield what a plan says, a line for each kind of layer."""
    facts = plan.facts
    yield "family", facts.family
    yield "known", "learnt by torch, which has run it" if is_learnt else "by its config alone"
    times = f", times {plan.embedding_scale:g}" if plan.embedding_scale != 1 else ""
    size = f"{facts.vocab_size} tokens of {facts.hidden_size} numbers{times}"
    yield "embedding", f"{plan.embedding}, {size}"
    alike: dict[str, list[int]] = {}
    windows = {at.layer: at.window for at in facts.layers}
    sources = {at.layer: at.source for at in facts.layers}
    for number, layer in enumerate(plan.layers):
        window, source = windows.get(number), sources.get(number)
        slides = "" if window is None else f", window {window}"
        alike.setdefault(f"{_layer(layer, source)}{slides}", []).append(number)
    for says, numbers in alike.items():
        yield f"{len(numbers)} layers", f"{says} (the first is {numbers[0]})"
    own = plan.own_rows
    if own is not None:
        says = f"{own.size} numbers in each layer by {own.embedding}, times {own.own_scale:g}"
        yield "own rows", f"{says}, and {_linear(own.project)}, normed, together times {own.mean:g}"
    yield "norm", f"{plan.norm.weight}, eps {plan.norm.eps:g}"
    times = f", times {plan.logit_scale:g}" if plan.logit_scale != 1 else ""
    cap = f", capped at {plan.logit_cap:g}" if plan.logit_cap is not None else ""
    yield "head", f"{_linear(plan.head)}{times}{cap}"
    if plan.query_growth is not None:
        share, stretch = plan.query_growth
        yield "queries", f"times 1 + {share:g} * log(1 + position // {stretch})"
    for number, rope in enumerate(plan.ropes):
        turned = [one for one in rope.frequencies if one]
        first, last = max(turned, default=0.0), min(turned, default=0.0)
        stay = len(rope.frequencies) - len(turned)
        pairs = f"{len(turned)} pairs, {first:g} to {last:g} radians per position"
        pairs += f"; {stay} pairs stay" if stay else ""
        yield f"RoPE {number}" if len(plan.ropes) > 1 else "RoPE", pairs


def _recurrent(one: RecurrentPlan) -> str:
    """Say what a recurrent module is."""
    n_channels, width = one.conv_shape
    convolution = f"convolution of {width} tokens in {n_channels} channels"
    n_heads, second, third, fourth = one.heads
    if one.kind == CONVOLUTION:
        return convolution
    normed = "with a gate" if one.norm is None else f"normed with eps {one.eps:g}, with a gate"
    if one.kind == DELTA:
        return (
            f"{convolution}, delta rule of {n_heads} heads on {second} of {third} x {fourth} "
            f"numbers {normed}"
        )
    return (
        f"{convolution}, scan of {n_heads} heads in {second} groups of {third} x {fourth} numbers "
        f"{normed}"
    )


def _latent(one: LatentPlan, layer: LayerPlan) -> str:
    """Say what attention over latents is."""
    shape = one.shape
    short = f", queries of {one.q_size}" if one.q_size else ""
    return (
        f"{shape.n_kv_heads} heads on latents of {shape.latent_dim} and {shape.rotary_dim} "
        f"numbers{short}, turned by RoPE {layer.rope}, scale {layer.scale:g}"
    )


def _attention(layer: LayerPlan, source: int | None) -> str:
    """Say what the attention of a layer is, or what is in its place.

    Args:
        layer: the layer.
        source: earlier layer whose K and V it reads; None: its own.
    """
    if layer.recurrent is not None:
        return _recurrent(layer.recurrent)
    if layer.latent is not None:
        return _latent(layer.latent, layer)
    n_heads, n_kv_heads, head_dim = layer.heads
    read = f" on {n_kv_heads}" if source is None else f" on those of layer {source},"
    normed = "" if layer.q_norm is None else ", normed"
    normed += "" if layer.v_eps is None else ", V normed"
    normed += ", V made as K" if layer.qkv.weights[1:2] == layer.qkv.weights[2:] != () else ""
    pairs = " in pairs" if layer.turns_pairs else ""
    turned = "not turned" if layer.rope is None else f"turned{pairs} by RoPE {layer.rope}"
    sinks = ", sinks" if layer.sinks else ""
    gated = ", with a gate" if layer.is_gated else ""
    return (
        f"{n_heads} heads{read} of {head_dim} numbers{normed}, {turned}, scale "
        f"{layer.scale:g}{sinks}{gated}"
    )


def _layer(layer: LayerPlan, source: int | None) -> str:
    says = _attention(layer, source)
    is_usual = layer.recurrent is None and layer.latent is None
    biased = [
        name
        for name, one in (
            ("Q, K and V" if is_usual else "inputs", layer.qkv),
            ("O" if is_usual else "outputs", layer.o),
            ("gate and up", layer.gate_up),
            ("down", layer.down),
        )
        if one is not None and any(one.biases)
    ]
    biases = f", biases of {', '.join(biased)}" if biased else ""
    gates = {SILU: "silu", GELU_TANH: "gelu"}
    gate = gates.get(layer.gate, "a gate of its own")
    norms = (layer.before, layer.attended, layer.between, layer.mixed)
    places = ("before", "behind the attention", "between", "behind the MLP")
    there = [place for place, one in zip(places, norms, strict=True) if one is not None]
    eps = ", ".join(sorted({f"{one.eps:g}" for one in layer.norms}))
    residual = f", residual times {layer.residual:g}" if layer.residual != 1 else ""
    parts = [] if layer.down is None else ["gated MLP"]
    if layer.mixture is not None:
        n_groups, n_kept, _ = layer.mixture.groups
        among = f" in {n_kept} of {n_groups} groups" if n_groups > 1 else ""
        apart = ", normed apart," if layer.mixture.apart is not None else ""
        parts.append(f"{layer.mixture.n_chosen} experts of each token{among}{apart}")
    own = "" if layer.own is None else ", rows of its own"
    result = "" if layer.result is None else ", the result times a number of its own"
    return (
        f"{says}, {' and '.join(parts)} with {gate}, norms {', '.join(there)} with eps {eps}"
        f"{residual}{biases}{own}{result}"
    )


def _linear(one: LinearPlan) -> str:
    return ", ".join(name for name in (*one.weights, *one.biases) if name is not None)
