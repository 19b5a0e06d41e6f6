"""Ask what a step of a mixture costs, against a dense model that reads as many weights.

A mixture of the layer shape of Qwen3-30B-A3B (128 experts of 768, of which a token chooses 8) and a
dense model whose MLP is as wide as those 8 decode single tokens in alternation, both in 4 bits. The
vocabulary is small, so that a step is its layers. Then 8 tokens in one step: how many bytes of
experts' weights the kernel has read, by its own count, over those of the experts that were chosen.
Then the experts of one layer with a prompt, against those of transformers in bfloat16.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from harness import alternate, median_ms, median_ratio, run

import kvcellar as kv
from kvcellar.backends.torch.bind.model_attention import NAME
from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.hold import Held, hold_weights
from kvcellar.backends.torch.cpu.modules.mixtures import hold_experts
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.kernel.experts import expert_counts

LAYERS, VOCABULARY, CONTEXT = 4, 4096, 128
SHAPE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
}
N_EXPERTS, N_CHOSEN, INNER = 128, 8, 768
TOGETHER, PROMPT = 8, 128

MIXTURE = {
    "num_experts": N_EXPERTS,
    "num_experts_per_tok": N_CHOSEN,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "norm_topk_prob": True,
}


def make(kind: str, layers: int = LAYERS, **fields: Any) -> Any:
    """Return a random model in bfloat16; the experts of a layer are one, seen 128 times."""
    config = transformers.CONFIG_MAPPING[kind](
        **SHAPE, **fields, num_hidden_layers=layers, tie_word_embeddings=False
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=NAME
        )
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_shared = parameter.dim() == 3
            shape = (1, *parameter.shape[1:]) if is_shared else parameter.shape
            numbers = torch.empty(shape, dtype=torch.bfloat16)
            # Logits of a router whose choices are far from even, as those of a trained one.
            spread = 0.1 if parameter.shape[0] == N_EXPERTS and not is_shared else 0.02
            numbers.normal_(0, spread, generator=generator)
            if parameter.dim() == 1:
                numbers.fill_(1)
            held = numbers.expand(parameter.shape)
            module.register_parameter(name, torch.nn.Parameter(held, requires_grad=False))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)
    return model.eval()


@contextlib.contextmanager
def decoding(model: Any, held: Held) -> Iterator[Callable[[int], Any]]:
    """Bind a model to a session with some tokens; yield a forward of so many random ones."""
    config = model.config
    params = kv.ModelCacheParams(LAYERS, config.num_key_value_heads, config.head_dim)
    generator = torch.Generator().manual_seed(1)
    with kv.make_decode_session(
        "torch", kv.make_config(params, 4096, kv_dtype="bfloat16")
    ) as session:
        runner = TorchRunner(model, held.decoder, params, VOCABULARY, session, ())

        def forward(n_tokens: int) -> Any:
            tokens = torch.randint(VOCABULARY, (n_tokens,), generator=generator).tolist()
            start = session.cache.length
            return runner.forward(tokens, range(start, start + n_tokens))

        forward(CONTEXT)
        yield forward


def read_once(forward: Callable[[int], Any]) -> float:
    """Run 8 tokens; return the bytes that the kernel read over those of the experts chosen."""
    before = expert_counts()
    forward(TOGETHER)
    read, chosen = (after - first for after, first in zip(expert_counts(), before, strict=True))
    print(
        f"{TOGETHER} tokens in {LAYERS} layers: {read:,} bytes read of {chosen:,} of experts chosen"
    )
    return read / chosen


def prompt_ratio(quick: bool) -> float:
    """Return the time of a prompt through one layer's experts in 4 bits over transformers' own."""
    from transformers.integrations.moe import grouped_mm_experts_forward as grouped_mm

    block = make("qwen3_moe", layers=1, **MIXTURE).model.layers[0].mlp
    experts, n_experts = block.experts, 16  # of bfloat16 some are enough
    for name, parameter in list(experts.named_parameters()):
        own = torch.nn.Parameter(parameter[:n_experts].clone(), requires_grad=False)
        experts.register_parameter(name, own)
    experts.num_experts = n_experts
    x = torch.randn(PROMPT, SHAPE["hidden_size"]).bfloat16()
    chosen = torch.stack([torch.randperm(n_experts)[:N_CHOSEN] for _ in range(PROMPT)])
    shares = torch.rand(PROMPT, N_CHOSEN).bfloat16()
    own = copy.deepcopy(experts)
    hold_experts(block, "int4", Arena())
    with torch.inference_mode():
        calls = {
            "ours": lambda: experts(x, chosen, shares),
            "transformers": lambda: grouped_mm(own, x, chosen, shares),
        }
        times = alternate(calls, rounds=4 if quick else 40, warmup=1)
    ours, theirs = median_ms(times["ours"]), median_ms(times["transformers"])
    print(
        f"{PROMPT} tokens through {n_experts} experts: {ours:.1f} ms in 4 bits, {theirs:.1f} ms by"
    )
    print("  transformers in bfloat16")
    return median_ratio(times, "ours", "transformers")


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure the figures."""
    mixture, dense = make("qwen3_moe", **MIXTURE), make("qwen3", intermediate_size=N_CHOSEN * INNER)
    held = [hold_weights(model, "int4") for model in (mixture, dense)]
    assert all(one.decoder for one in held), "a step of either is one call of the kernel"
    with decoding(mixture, held[0]) as of_mixture, decoding(dense, held[1]) as of_dense:
        calls = {"mixture": lambda: of_mixture(1), "dense": lambda: of_dense(1)}
        rounds = 80 if quick else 400
        times = alternate(calls, rounds=rounds, warmup=8)
        once = read_once(of_mixture)
    ratio = median_ratio(times, "mixture", "dense")
    ours, base = median_ms(times["mixture"]), median_ms(times["dense"])
    print(f"decode step, {LAYERS} layers in 4 bits, {rounds} rounds:")
    print(f"  mixture {ours:.2f} ms, dense of as many weights {base:.2f} ms, ratio {ratio:.3f}")
    return {
        "int4_decode_over_dense_of_active": round(ratio, 3),
        "experts_read_once": round(once, 4),
        "int4_prompt_over_transformers": round(prompt_ratio(quick), 3),
        "mixture_ms": round(ours, 3),
        "dense_ms": round(base, 3),
    }


if __name__ == "__main__":
    run(__doc__ or "", measure)
