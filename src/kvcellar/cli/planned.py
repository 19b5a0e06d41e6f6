"""The plan of a model, by which the native backend runs it, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kvcellar.cli.terminal import write
from kvcellar.errors import ModelError
from kvcellar.models.checkpoint import read_config, read_json
from kvcellar.models.plan import LayerPlan, LinearPlan, ModelPlan, kept_plan
from kvcellar.models.plan_rules import known_plan
from kvcellar.models.sizing import find_config


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
    facts, rope = plan.facts, plan.rope
    yield "family", facts.family
    yield "known", "learnt by torch, which has run it" if is_learnt else "by its config alone"
    yield "embedding", f"{plan.embedding}, {facts.vocab_size} tokens of {facts.hidden_size} numbers"
    alike: dict[str, list[int]] = {}
    for number, (layer, at) in enumerate(zip(plan.layers, facts.layers, strict=True)):
        window = "" if at.window is None else f", window {at.window}"
        alike.setdefault(f"{_layer(layer)}{window}", []).append(number)
    for says, numbers in alike.items():
        yield f"{len(numbers)} layers", f"{says} (the first is {numbers[0]})"
    yield "norm", f"{plan.norm.weight}, eps {plan.norm.eps:g}"
    yield "head", _linear(plan.head)
    first, last = max(rope.frequencies), min(rope.frequencies)
    yield "RoPE", f"{len(rope.frequencies)} pairs, {first:g} to {last:g} radians per position"


def _layer(layer: LayerPlan) -> str:
    n_heads, n_kv_heads, head_dim = layer.heads
    normed = "" if layer.q_norm is None else ", normed"
    biased = [
        name
        for name, one in (
            ("Q, K and V", layer.qkv),
            ("O", layer.o),
            ("gate and up", layer.gate_up),
            ("down", layer.down),
        )
        if any(one.biases)
    ]
    biases = f", biases of {', '.join(biased)}" if biased else ""
    return (
        f"{n_heads} heads on {n_kv_heads} of {head_dim} numbers{normed}, scale {layer.scale:g}, "
        f"gated MLP with silu, norms with eps {layer.before.eps:g}{biases}"
    )


def _linear(one: LinearPlan) -> str:
    return ", ".join(name for name in (*one.weights, *one.biases) if name is not None)
