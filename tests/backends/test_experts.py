"""Experts of mixtures, held by the kernel: what transformers' modules compute, found by trying."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from torch import nn  # noqa: E402
from transformers.models.aria.modeling_aria import AriaExperts  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from kvcellar.backends.torch.cache.memory import Arena  # noqa: E402
from kvcellar.backends.torch.cpu.modules import mixtures  # noqa: E402
from kvcellar.backends.torch.cpu.modules.experts import KernelExperts, ShippedWeights  # noqa: E402

pytestmark = pytest.mark.kernel

N_EXPERTS, HIDDEN, INNER = 6, 128, 64
FIELDS = {
    "num_experts": N_EXPERTS,
    "num_local_experts": N_EXPERTS,
    "n_routed_experts": N_EXPERTS,
    "moe_num_experts": N_EXPERTS,
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "moe_latent_size": None,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.0,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}
CLASSES = [Qwen3MoeExperts, GptOssExperts, AriaExperts, NemotronHExperts, MuseSparkExperts]


def make(kind: Any, dtype: Any = torch.float32, **fields: Any) -> Any:
    """Return a module of experts with random weights, inside of another one."""
    torch.manual_seed(0)
    module = kind(SimpleNamespace(**{**FIELDS, **fields}))
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "bias" in name or "norm" in name else HIDDEN**-0.5)
    return nn.Sequential(module).to(dtype).requires_grad_(False)


def some_tokens(n_tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(N_EXPERTS)[:2] for _ in range(n_tokens)])
    return torch.randn(n_tokens, HIDDEN).to(dtype), chosen, torch.rand(n_tokens, 2).to(dtype)


def far(found: Any, want: Any) -> float:
    return float((found.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("weights", "dtype", "most"),
    [
        ("bf16", torch.bfloat16, 0.01),
        ("int8", torch.bfloat16, 0.03),
        ("int8", torch.float32, 0.03),
        ("int4", torch.float32, 0.25),
    ],
)
def test_held_experts_give_what_the_module_gave(
    kind: Any, weights: str, dtype: Any, most: float
) -> None:
    model, own = make(kind, dtype), make(kind, dtype)
    mixtures.hold_experts(model, weights, Arena())
    for n_tokens in (1, 9, 70):
        tokens = some_tokens(n_tokens, dtype)
        assert far(model[0](*tokens), own[0](*tokens)) < most
    held = [module for module in model.modules() if isinstance(module, KernelExperts)]
    assert len(held) == 1
    assert not [name for name, _ in model.named_parameters() if "proj" in name]


def test_a_module_that_computes_something_else_stays_as_it_is() -> None:
    class Others(Qwen3MoeExperts):
        def _apply_gate(self, both: Any) -> Any:
            return super()._apply_gate(both)

        def forward(self, hidden_states: Any, *others: Any) -> Any:
            return 2 * Qwen3MoeExperts.forward(self, hidden_states, *others)

        forward.__wrapped__ = forward  # type: ignore[attr-defined]

    model = make(Others)
    tokens = some_tokens(3, torch.float32)
    want = model[0](*tokens)
    mixtures.hold_experts(model, "int8", Arena())
    assert torch.equal(model[0](*tokens), want)
    assert len(list(model.parameters())) == 2


def test_beside_held_experts_those_that_are_not_are_run_by_torch() -> None:
    config = SimpleNamespace(**FIELDS)
    torch.manual_seed(0)
    odd = SimpleNamespace(**{**FIELDS, "hidden_size": 40})
    model = nn.ModuleList([Qwen3MoeExperts(config), Qwen3MoeExperts(odd)]).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model[1].config = config  # one config for all, as in a model
    x, chosen, shares = some_tokens(3, torch.float32)
    want = model[1](x[:, :40], chosen, shares)
    mixtures.hold_experts(model, "int8", Arena())
    assert mixtures.HELD in model[0]._modules and mixtures.HELD not in model[1]._modules
    assert far(model[1](x[:, :40], chosen, shares), want) < 1e-5


def test_gates_are_found_by_what_they_make_of_numbers() -> None:
    def gpt_oss(both: Any) -> Any:
        gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    def gelu(both: Any) -> Any:
        gate, up = both.chunk(2, -1)
        return nn.functional.gelu(gate, approximate="tanh") * up

    def exact_gelu(both: Any) -> Any:
        gate, up = both.chunk(2, -1)
        return nn.functional.gelu(gate) * up

    rows = torch.randn(4, 6)
    for between, is_interleaved, is_known in (
        (gpt_oss, True, True),
        (gelu, False, True),
        (exact_gelu, False, False),
        (lambda both: torch.relu(both.chunk(2, -1)[0]) ** 2 * both.chunk(2, -1)[1], False, False),
    ):
        gate, joined = mixtures.find_gate(between, is_interleaved)
        assert (gate is not None) is is_known
        order = [0, 2, 4, 1, 3, 5] if is_interleaved else list(range(6))
        assert torch.equal(joined(rows[:, order]), between(rows))


def shipped(model: Any, name: str, n_out: int, n_in: int) -> ShippedWeights:
    """Put random weights of MXFP4 in the place of a module's own."""
    blocks = torch.randint(0, 256, (N_EXPERTS, n_out, n_in // 32, 16), dtype=torch.uint8)
    steps = torch.randint(119, 124, (N_EXPERTS, n_out, n_in // 32), dtype=torch.uint8)
    delattr(model[0], name)
    for ending, tensor in (("blocks", blocks), ("scales", steps)):
        model[0].register_parameter(f"{name}_{ending}", nn.Parameter(tensor, requires_grad=False))
    return ShippedWeights(blocks, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_shipped_mxfp4_gives_what_its_numbers_give(dtype: Any, weights: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, plain = make(GptOssExperts, dtype), make(GptOssExperts)
    for name, n_out, n_in in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        torch.manual_seed(2)
        parts = shipped(model, name, n_out, n_in)
        numbers = convert_moe_packed_tensors(parts.blocks, parts.exponents, dtype=torch.float32)
        getattr(plain[0], name).data = numbers
        assert torch.equal(parts[4].T, numbers[4])
        getattr(plain[0], f"{name}_bias").data = getattr(model[0], f"{name}_bias").float()
    mixtures.hold_experts(model, weights, Arena())
    assert model[0]._modules[mixtures.HELD].up.bits == 4.25
    for n_tokens in (1, 5, 40):
        x, chosen, shares = some_tokens(n_tokens, dtype)
        want = plain[0](x.float(), chosen, shares.float())
        # Inputs are rounded to one of 255 steps for each 32.
        assert far(model[0](x, chosen, shares), want) < (0.012 if dtype == torch.float32 else 0.015)


@pytest.mark.slow
def test_experts_of_every_family_that_asks_the_interface_are_held() -> None:
    import transformers

    from kvcellar.backends.torch.learn.shrink.checkpoints import (
        default_raw,
        random_network,
        twin_raw,
        zoo,
    )
    from kvcellar.errors import ModelError

    folder = Path(transformers.__file__).parent / "models"
    asking = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    held, others = [], []
    for name in sorted(asking.intersection(zoo())):
        try:
            network = random_network(twin_raw(default_raw(name)), attention="eager")
        except (ModelError, ValueError, TypeError):  # its defaults make no small model
            continue
        network.requires_grad_(False)
        there = list(mixtures.mixtures(network))
        mixtures.hold_experts(network, "int8", Arena())
        is_held = all(mixtures.HELD in module._modules for module in there)
        (held if is_held else others).append(name)
    assert set(others) <= {"muse_spark"}, "whose experts have a norm behind them"
    assert len(held) > 40
