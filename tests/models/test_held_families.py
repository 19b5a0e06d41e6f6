"""Weights in the kernel's formats, whatever the family: what is held, and what the model says."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from kvcellar.backends.torch.bind import model_attention
from kvcellar.backends.torch.cpu.find.finding import PartFinder
from kvcellar.backends.torch.cpu.find.trial import Recorder, run
from kvcellar.backends.torch.cpu.hold import hold_weights
from kvcellar.backends.torch.cpu.holdable import held_linears, matrices_of
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw, random_network, twin_raw
from kvcellar.backends.torch.load.networks import empty_network
from kvcellar.kernel import levels
from kvcellar.models.weights import GROUP

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())

POSITIONS = (0, 1, 5, 7)

WHOLE = "layers, all in one call"
LAYERS = "layers"
FOUND = {
    "llama": WHOLE,
    "mistral": WHOLE,
    "ministral": WHOLE,
    "qwen2": WHOLE,
    "qwen3": WHOLE,
    "phi3": WHOLE,  # q, k and v, and gate and up, are joined as they come
    "seed_oss": WHOLE,  # biases
    "internlm3": WHOLE,
    "granite": WHOLE,  # its multipliers are 1 here
    "smollm3": LAYERS,  # some turn nothing
    "glm": LAYERS,  # neighbours turn against each other, in half of a head
    "ernie4_5": LAYERS,
    "gemma": "norms, mlps, attentions",
    "gemma2": "norms, mlps, attentions",
    "gemma3_text": "norms, mlps, attentions",
    "gemma4_text": "norms, mlps",
    "glm4": "norms, mlps, attentions",
    "exaone4": "norms, mlps, attentions",
    "cohere": "mlps, attentions",
    "stablelm": "mlps, attentions",
    "olmo2": "norms, mlps",
    "ministral3": "norms, mlps",  # queries are scaled by position
    "hunyuan_v1_dense": "norms, mlps",
    "deepseek_v3": "norms, mlps",
    "qwen3_5_text": "norms, mlps",
    "qwen3_moe": LAYERS,  # and their experts
    "mixtral": LAYERS,
    "gpt_oss": "norms",
    "gpt2": "attentions",  # its linear layers are turned
    "starcoder2": "attentions",
    "opt": "nothing",
    "nanochat": "nothing",
}
"""Family -> the largest parts that the kernel computes, in float32."""

OTHERWISE_IN_BFLOAT16 = {
    "qwen3_moe": WHOLE,  # routers are the kernel's, too
    "mixtral": WHOLE,
    "gemma": "mlps, attentions",
    "gemma2": "mlps, attentions",
    "gemma3_text": "mlps, attentions",
    "gemma4_text": "mlps",
    "olmo2": "mlps",
    "gpt_oss": "nothing",
    "qwen3_5_text": "mlps",
}
"""The same in bfloat16, where norms that round elsewhere than the kernel's are left alone."""


@functools.cache
def made(family: str, fields: tuple[tuple[str, object], ...] = ()):
    """A tiny network of a family, whose attention is on the op; not to be changed."""
    raw = twin_raw(default_raw(family, **dict(fields)))
    return random_network(raw, attention=model_attention.NAME)


def said(held) -> str:
    """The largest parts that were found."""
    kinds = Counter(type(part).__name__ for part in held.parts.values())
    if kinds["LayerPart"]:
        return WHOLE if held.decoder is not None else LAYERS
    named = {"norms": "NormPart", "mlps": "MlpPart", "attentions": "AttentionPart"}
    return ", ".join(name for name, kind in named.items() if kinds[kind]) or "nothing"


class Rounded(nn.Module):
    """What a layer of the kernel computes, by torch, from the weights that it holds."""

    def __init__(self, held: KernelLinear) -> None:
        super().__init__()
        self.bits, self.bias = held.bits, held.bias
        outputs = torch.arange(held.out_features)
        dtype = torch.bfloat16 if held.bits == 12 else torch.float32
        self.weight = held.weight if held.bits == 16 else held.rows(outputs, dtype)

    def forward(self, x):
        if self.bits < 12:
            groups = x.float().unflatten(-1, (-1, GROUP))
            steps = groups.abs().amax(-1, keepdim=True) / 127
            x = (torch.round(groups / steps.clamp(min=1e-30)) * steps).flatten(-2).to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def reference(network, weights, monkeypatch):
    """A network whose own modules run, on linear layers that torch computes as they are held."""
    network = copy.deepcopy(network)
    with monkeypatch.context() as only:
        only.setattr(PartFinder, "find", lambda finder: None)
        assert hold_weights(network, weights).parts == {}
    for name, module in list(network.named_modules()):
        if isinstance(module, KernelLinear) and ".held" not in f".{name}":
            network.set_submodule(name, Rounded(module))
    return network


def runs(network):
    """The logits, and q, k and v of each layer, one behind the other."""
    recorder = Recorder()
    logits = run(network, POSITIONS, recorder)
    return [x.float() for one in recorder.seen for x in (one.q, one.k, one.v)] + [logits.float()]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", FOUND)
def test_a_family_says_what_its_rounded_weights_say(monkeypatch, family, weights):
    network = copy.deepcopy(made(family))
    if weights == "bf16":
        network.bfloat16()
    want = runs(reference(network, weights, monkeypatch))
    held = hold_weights(network, weights)
    expected = FOUND[family]
    if weights == "bf16":
        expected = OTHERWISE_IN_BFLOAT16.get(family, expected)
    assert (said(held), held.why_none) == (expected, None)
    got = runs(network)
    most = 0.05 if weights == "bf16" else 0.01
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= most * other.norm()


@pytest.mark.parametrize("family", FOUND)
def test_all_linear_layers_and_embeddings_are_packed_as_they_were_counted(family):
    network = copy.deepcopy(made(family))
    sizes = {name: one.numel() for name, one in network.named_parameters()}
    there = [sizes[name] for name, one in matrices_of(network).items() if one.n_in % GROUP == 0]
    held = hold_weights(network, "int8")
    assert (held.n_weights, held.n_held) == (sum(sizes.values()), sum(there))
    linears = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert all(one.in_features % GROUP or one.out_features < 16 for one in linears)
    assert f"{100 * held.n_held / held.n_weights:.0f}% of the weights are int8" in held.said("int8")
    on_meta = empty_network(twin_raw(default_raw(family)))
    assert matrices_of(on_meta) == matrices_of(made(family))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"residual_multiplier": 0.22}, "norms, mlps, attentions"),
        ({"attention_multiplier": 0.01}, WHOLE),
        ({"embedding_multiplier": 12.0}, LAYERS),
        ({"logits_scaling": 8.0}, LAYERS),
    ],
)
def test_a_multiplier_is_not_overlooked(fields, expected):
    network = copy.deepcopy(made("granite", tuple(fields.items())))
    assert said(hold_weights(network, "int8")) == expected


def changed(family, path, change):
    """A network one of whose modules computes something else than it did."""
    network = copy.deepcopy(made(family))
    module = network.get_submodule(path)
    own = module.forward
    module.forward = lambda *args, **kwargs: change(own(*args, **kwargs))
    return network


@pytest.mark.parametrize(
    ("path", "change", "n_parts"),
    [
        ("model.layers.1.mlp.act_fn", lambda x: x.clamp(max=7.0), {"MlpPart": 2, "LayerPart": 1}),
        ("model.layers.1.mlp", lambda x: x * 0.999, {"MlpPart": 1, "LayerPart": 1}),
        ("model.layers.1.self_attn", lambda x: (x[0].clamp(-9, 9), None), {"AttentionPart": 1}),
        ("model.layers.1.input_layernorm", lambda x: x + 1e-3, {"NormPart": 4, "LayerPart": 1}),
        ("model.layers.0", lambda x: x.tanh(), {"LayerPart": 1}),
        ("model.rotary_emb", lambda x: x, {"LayerPart": 2}),
    ],
)
def test_what_differs_in_one_place_is_left_there_alone(path, change, n_parts):
    held = hold_weights(changed("llama", path, change), "int8")
    kinds = Counter(type(part).__name__ for part in held.parts.values())
    assert {kind: kinds[kind] for kind in n_parts} == n_parts
    assert (held.decoder is not None) == (path == "model.rotary_emb")


def test_a_model_that_cannot_be_tried_is_packed_all_the_same():
    def refuse(_):
        raise RuntimeError("not with random numbers")

    held = hold_weights(changed("llama", "model.norm", refuse), "int8")
    assert held.why_none == "RuntimeError: not with random numbers"
    assert held.parts == {} and held.decoder is None and held.n_held > 0.9 * held.n_weights


def test_routers_stay_exact():
    network = copy.deepcopy(made("qwen2_moe"))
    hold_weights(network, "int4")
    of_mixtures = {name for name, _ in network.named_parameters() if ".mlp." in name}
    kept = {"gate.weight", "shared_expert_gate.weight"}
    assert of_mixtures == {f"model.layers.{i}.mlp.own.{name}" for i in (0, 1) for name in kept}


def test_weights_that_several_layers_share_are_held_once():
    network = copy.deepcopy(made("llama"))
    first, second = network.model.layers[:2]
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    second.self_attn.o_proj = first.self_attn.o_proj
    before = sum(one.numel() for one in network.parameters())
    held = hold_weights(network, "int8")
    assert held.n_weights == before and held.n_held < before
    a, b = network.model.layers[:2]
    assert a.mlp.down_proj is b.mlp.down_proj and a.self_attn.o_proj is b.self_attn.o_proj


def test_layers_whose_weights_others_read_are_left():
    network = copy.deepcopy(made("llama"))
    attention = network.model.layers[1].self_attn
    own, left = type(attention), attention.k_proj

    class Reads(own):
        def norm(self):
            return self.k_proj.weight.norm() if self.layer_idx else self.no_such_part.weight

        def set_up(self):
            self.q_proj.weight = nn.Parameter(torch.zeros(1))
            if self.training and self.layer_idx:
                self.v_proj.weight.zero_()

    attention.__class__ = Reads
    found = held_linears(network)
    attention.__class__ = own
    assert held_linears(network).keys() - found.keys() == {"model.layers.1.self_attn.k_proj"}
    attention.__class__ = Reads
    held = hold_weights(network, "int8")
    assert attention.k_proj is left and isinstance(attention.q_proj, KernelLinear)
    kinds = Counter(type(part).__name__ for part in held.parts.values())
    assert (kinds["LayerPart"], held.decoder) == (1, None)


def test_what_a_recurrent_module_multiplies_by_itself_is_left_and_no_more():
    raw = twin_raw(default_raw("jamba"))
    found = {
        name.rpartition(".")[2]
        for made_one in (random_network(raw | {"mamba_dt_rank": 32}), made("falcon_h1"))
        for name in held_linears(made_one)
    }
    assert {"in_proj", "x_proj", "out_proj"} <= found and "dt_proj" not in found


@pytest.mark.parametrize("family", ["phi3", "qwen3_5_text", "smollm3", "opt"])
def test_parts_that_were_found_before_are_read(monkeypatch, tmp_path, family):
    known = tmp_path / "parts.json"
    first = hold_weights(copy.deepcopy(made(family)), "int8", known=known)
    other = hold_weights(copy.deepcopy(made(family)).bfloat16(), "int8", known=tmp_path / "other")
    with monkeypatch.context() as only:
        only.setattr(PartFinder, "__init__", lambda *_: pytest.fail("they are known"))
        again = hold_weights(copy.deepcopy(made(family)), "int8", known=known)
    assert again.parts == first.parts and said(again) == said(first)
    known.write_text(known.read_text()[:-9])
    assert hold_weights(copy.deepcopy(made(family)), "int8", known=known).parts == first.parts
    same = hold_weights(copy.deepcopy(made(family)).bfloat16(), "int8", known=known)
    assert same.parts == other.parts
