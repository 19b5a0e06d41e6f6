"""Latent attention is found by its numbers, and bound gives transformers' own logits."""

from __future__ import annotations

import copy
import functools
import json
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcellar.backends.torch.bind import model_attention
from kvcellar.backends.torch.bind.latent import LatentLinear, bind_latents
from kvcellar.backends.torch.learn.finding_latents import find_latents
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.facts import ModelFacts
from kvcellar.models.latents import Latents
from kvcellar.models.sizes.sizing import size_model
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.models.players import Oracle, Player, assert_close, text
from tests.models.tiny_checkpoints import COMMON, randomize

MLA: dict[str, Any] = COMMON | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_cache": False,
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "v_head_dim": 20},
    "deepseek_v3": {"rope_interleave": True},
    "glm4_moe_lite": {},
    "minicpm3": {"attention_bias": True},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "kimi_linear": {"layer_types": ["full_attention"] * 3},
}
"""Families that differ in how rotary parts lie and turn, in scales, and in how queries come."""


def make_network(family: str) -> Any:
    """A tiny network with random weights, the same each time."""
    config = transformers.AutoConfig.for_model(family, **MLA | MODELS[family])
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(network)
    return network


@dataclass(frozen=True, eq=False)
class Bound:
    """A network whose latents are bound, as a ``Player`` wants a model."""

    network: Any
    params: ModelCacheParams
    backend: str = "torch"

    def bind(self, session: Any) -> TorchRunner:
        vocab_size = self.network.get_input_embeddings().num_embeddings
        return TorchRunner(self.network, None, self.params, vocab_size, session)


def bind(network: Any) -> Bound:
    """Find and bind the latents of a network that has nothing else."""
    found = find_latents(network)
    bind_latents(network, found)
    network.config._attn_implementation = model_attention.NAME
    (dims,) = set(found.values())
    group = LayerGroup(tuple(sorted(found)), 1, dims.rotary_dim, dims.latent_dim, is_latent=True)
    return Bound(network, ModelCacheParams(len(found), groups=(group,)))


@functools.cache
def bound(family: str) -> Bound:
    return bind(make_network(family))


@functools.cache
def logits(family: str, tokens: tuple[int, ...]) -> np.ndarray:
    """What transformers makes of one history: ``[len(tokens), vocab]``."""
    with torch.no_grad():
        return _own(family)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


_own = functools.cache(make_network)

every_family = pytest.mark.parametrize("family", MODELS)


@every_family
def test_every_layer_is_found_with_its_lengths(family: str) -> None:
    found = find_latents(_own(family))
    n_layers = _own(family).config.num_hidden_layers * (2 if family == "longcat_flash" else 1)
    n_layers = len(found) if family == "longcat_flash" else n_layers
    v_dim = MODELS[family].get("v_head_dim", 12)
    want = Latents("kv_b_proj", True, True, False, 4, 16, 8, v_dim, 32)
    assert found == dict.fromkeys(range(n_layers), want)
    assert found


@every_family
@pytest.mark.parametrize("kind", ["contiguous", "seq", "tree"])
def test_prefill_chunks_decode_and_rollback_give_transformers_logits(
    family: str, kind: str
) -> None:
    prompt, other = text(40), text(9, seed=1)
    want = logits(family, prompt)
    with Player(bound(family), kind) as player:
        start = 0
        for size in (17, 1, 7, 1, 1, 13):
            got = player.feed(prompt[start : start + size], rows="all")
            assert_close(got, want[start : start + size])
            start += size
        player.cut(21)
        got = player.feed(other, rows="all")
        assert_close(got, logits(family, prompt[:21] + other)[21:])


@every_family
def test_forks_flat_batches_and_trees_give_transformers_logits(family: str) -> None:
    trunk, left, right, third = (text(n, seed=n) for n in (15, 5, 6, 11))
    with Player(bound(family), "tree") as player:
        player.feed(trunk)
        player.cache.seq_cp(0, 1)
        flat = [(0, t) for t in left] + [(2, t) for t in third] + [(1, t) for t in right]
        got = player.batch(flat, rows="all")
        assert_close(got[:5], logits(family, trunk + left)[15:])
        assert_close(got[5:16], logits(family, third))
        assert_close(got[16:], logits(family, trunk + right)[15:])
        player.cache.propose([-1, -1, 0, 1], 2)
        got = player.batch([(0, 7), *((2, t) for t in (1, 2, 3, 4)), (1, 8)], rows="all")
        assert_close(got[:1], logits(family, trunk + left + (7,))[-1:])
        assert_close(got[3:4], logits(family, (*third, 1, 3))[-1:])
        assert_close(got[4:5], logits(family, (*third, 2, 4))[-1:])
        player.cache.commit([1, 3], 2)
        assert_close(player.feed([5], 2), logits(family, (*third, 2, 4, 5))[-1:])


@pytest.mark.parametrize("kv_dtype", ["int8", "int8:rot"])
def test_latents_in_eight_bits_are_close(kv_dtype: str) -> None:
    prompt = text(40)
    want = logits("minicpm3", prompt)
    with Player(bound("minicpm3"), "seq", kv_dtype=kv_dtype) as player:
        got = np.concatenate(
            [player.feed(prompt[:30], rows="all"), player.feed(prompt[30:], rows="all")]
        )
    assert 1e-5 < np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_a_bound_layer_keeps_its_weights_once_and_expands_nothing() -> None:
    network = make_network("deepseek_v3")
    n_numbers = sum(p.numel() for p in network.parameters())
    bind(network)
    assert sum(p.numel() for p in network.parameters()) == n_numbers
    linear = network.model.layers[0].self_attn.kv_b_proj
    assert isinstance(linear, LatentLinear)
    out = linear(torch.ones(1, 1, 5, 32))
    assert out.shape == (1, 1, 5, 4 * 28)
    assert out.untyped_storage().nbytes() == 4


def test_a_copy_of_a_bound_network_hands_latents_to_itself() -> None:
    whole = bound("deepseek_v2")
    copied = Bound(copy.deepcopy(whole.network), whole.params)
    for parameter in whole.network.model.layers[0].self_attn.kv_b_proj.parameters():
        assert all(parameter is not other for other in copied.network.parameters())
    with Player(copied, "seq") as player:
        assert_close(player.feed(text(9), rows="all"), logits("deepseek_v2", text(9)))


def test_two_threads_may_run_one_bound_network() -> None:
    family, texts = "deepseek_v3", [text(30, seed=s) for s in (3, 4)]
    wants = [logits(family, tokens) for tokens in texts]
    got: list[Any] = [None, None]

    def run(i: int) -> None:
        with Player(bound(family), "seq") as player:
            got[i] = np.concatenate([player.feed([t]) for t in texts[i]])

    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, want in zip(got, wants, strict=True):
        assert_close(one, want)


# Loaded ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    """Name of a family -> a tiny checkpoint of it."""
    root = tmp_path_factory.mktemp("latents")
    return functools.cache(lambda family: write_tiny(family, root / family))


@pytest.mark.parametrize("family", ["axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_a_checkpoint_is_loaded_with_its_latents_bound(folder: Any, family: str) -> None:
    model = load_model(folder(family), weights="none")
    assert all(group.is_latent for group in model.params.groups)
    prompt = text(40)
    want = Oracle(folder(family)).logits(prompt)
    with Player(model, "tree") as player:
        got = [player.feed(prompt[:19], rows="all"), player.feed(prompt[19:], rows="all")]
    assert_close(np.concatenate(got), want)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_packed_weights_leave_those_of_latents_as_they_are(folder: Any, weights: str) -> None:
    model: Any = load_model(folder("minicpm3"), weights=weights)
    bound = [m for m in model.network.modules() if isinstance(m, LatentLinear)]
    assert len(bound) == model.params.n_layers
    counted = size_model(folder("minicpm3"), weights=weights).weight_bytes
    assert 0 <= model.size_bytes - counted < 100, "but for what RoPE keeps"
    assert {str(m.up_k.dtype) for m in bound} == {f"torch.{model.dtype}"}
    prompt = text(40)
    want = Oracle(folder("minicpm3")).logits(prompt)
    with Player(model, "seq", kv_dtype=model.dtype) as player:
        got = player.feed(prompt, rows="all")
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_what_is_known_of_latents_is_written_and_read() -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", num_hidden_layers=4)
    facts = learn_facts(config.to_dict())
    (group,) = facts.params.groups
    assert group == LayerGroup((0, 1, 2, 3), 1, 64, 512, is_latent=True)
    again = ModelFacts.from_json(json.loads(json.dumps(facts.to_json())))
    assert again == facts
    assert sorted(again.latents) == [0, 1, 2, 3]


# Layouts that no family has today -----------------------------------------------------------------


class Attention(nn.Module):
    """Latent attention of 3 heads with 5 plain, 4 rotary and 6 V numbers, as ``shape`` lays it."""

    def __init__(self, config: Any, layer: int, shape: dict[str, bool]) -> None:
        super().__init__()
        self.config, self.layer_idx, self.shape = config, layer, shape
        n_rank = 100 if shape.get("is_large") else 16
        self.q = nn.Linear(32, 3 * 9, bias=False)
        self.down = nn.Linear(32, n_rank + 4, bias=False)
        self.inner = nn.Module()
        self.inner.up = nn.Linear(n_rank, 3 * 11, bias=shape.get("is_biased", False))
        self.out = nn.Linear(3 * 6, 32, bias=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        n, shape = x.shape[1], self.shape
        latent, rotary = self.down(x).split((self.inner.up.in_features, 4), dim=-1)
        y = self.inner.up(latent.tanh())
        if shape.get("is_rotary_of_it"):
            rotary = rotary + y.mean()
        first, second = (5, 6) if shape.get("is_k_first", True) else (6, 5)
        if shape.get("is_by_head", True):
            k, v = y.view(1, n, 3, 11).split((first, second), dim=-1)
        else:
            k, v = y.split((3 * first, 3 * second), dim=-1)
            k, v = k.view(1, n, 3, first), v.view(1, n, 3, second)
        k, v = (k, v) if shape.get("is_k_first", True) else (v, k)
        rotary = (rotary * position_ids[..., None].cos())[:, :, None].expand(-1, -1, 3, -1)
        if shape.get("is_rotary_own"):
            rotary = rotary * torch.arange(1, 4)[:, None]
        parts = (rotary, k) if shape.get("is_rotary_first") else (k, rotary)
        q, k, v = self.q(x).view(1, n, 3, 9), torch.cat(parts, dim=-1), v
        if shape.get("is_scaled"):
            v = v * 1.5
        if shape.get("is_query_of_it"):
            q = q + y.mean()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager)
        heads = [rows.transpose(1, 2) for rows in (q, k, v)]
        out, _ = attend(self, *heads, None, scaling=0.3, position_ids=position_ids)
        return x + self.out(out.reshape(1, n, -1))


def _eager(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    return out.transpose(1, 2), None


class Network(nn.Module):
    """Two such layers between an embedding and a head."""

    def __init__(self, shape: dict[str, bool]) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="eager", hidden_size=32)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.embed = nn.Embedding(50, 32)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Attention(self.config, i, shape) for i in (0, 1)])
        self.model.norm = nn.Identity()
        self.head = nn.Linear(32, 50, bias=False)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
    ) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.model.layers:
            x = layer(x, position_ids)
        return SimpleNamespace(logits=self.head(self.model.norm(x)))


@pytest.mark.parametrize("is_rotary_first", [False, True])
@pytest.mark.parametrize("is_k_first", [False, True])
@pytest.mark.parametrize("is_by_head", [False, True])
def test_latents_are_found_and_bound_however_they_lie(
    is_by_head: bool, is_k_first: bool, is_rotary_first: bool
) -> None:
    shape = {
        "is_by_head": is_by_head,
        "is_k_first": is_k_first,
        "is_rotary_first": is_rotary_first,
    }
    network = Network(shape)
    ids = torch.arange(20)[None] * 3 % 50
    with torch.no_grad():
        want = network(ids, torch.arange(20)[None]).logits[0].numpy()
    found = find_latents(network)
    assert found == dict.fromkeys(
        (0, 1),
        Latents(
            "inner.up", **shape, n_kv_heads=3, plain_dim=5, rotary_dim=4, v_dim=6, latent_dim=16
        ),
    )
    assert network.config._attn_implementation == "eager"
    with Player(bind(network), "seq") as player:
        got = np.concatenate(
            [player.feed(ids[0, :11].tolist(), rows="all")]
            + [player.feed([t]) for t in ids[0, 11:].tolist()]
        )
    assert_close(got, want)


@pytest.mark.parametrize(
    "what",
    [
        "is_biased",
        "is_large",
        "is_query_of_it",
        "is_rotary_of_it",
        "is_rotary_own",
        "is_scaled",
    ],
)
def test_what_is_more_than_an_expanded_latent_is_left_as_it_is(what: str) -> None:
    assert find_latents(Network({})) != {}
    assert find_latents(Network({what: True})) == {}


def test_a_network_without_what_was_found_is_refused() -> None:
    found = find_latents(Network({}))
    with pytest.raises(ModelError, match=r"layers \[7\] were found to expand latents"):
        bind_latents(Network({}), {7: found[0]})


def test_a_model_of_any_size_is_looked_at_without_its_weights() -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", num_hidden_layers=5)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    latents = Latents("kv_b_proj", True, True, False, 128, 128, 64, 128, 512)
    assert find_latents(network.eval()) == dict.fromkeys(range(5), latents)


def test_ordinary_attention_has_no_latents() -> None:
    for family in ("llama", "phi3", "smollm3"):
        config = transformers.AutoConfig.for_model(family, **COMMON, num_hidden_layers=2)
        network = transformers.AutoModelForCausalLM.from_config(config).eval()
        assert find_latents(network) == {}
