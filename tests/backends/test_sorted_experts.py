"""Experts that are given rows by expert are held by the kernel, and only the chosen ones run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from torch import nn  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts  # noqa: E402

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.cache.memory import Arena  # noqa: E402
from kvcellar.backends.torch.cpu.modules.sorted_experts import (  # noqa: E402
    SortedExperts,
    hold_sorted_experts,
)
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.models import load_model  # noqa: E402
from kvcellar.models.sizes.sizing import size_model  # noqa: E402

pytestmark = pytest.mark.kernel

N_EXPERTS, HIDDEN, INNER = 6, 128, 64
FIELDS = {"num_local_experts": N_EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}


class UpFirst(Llama4TextExperts):
    """Experts whose gate is behind what it opens."""

    def forward(self, rows: Any) -> Any:
        x = rows.view(N_EXPERTS, -1, HIDDEN)
        up, gate = torch.bmm(x, self.gate_up_proj).chunk(2, -1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, HIDDEN)


class Doubled(Llama4TextExperts):
    """Experts that compute something else."""

    def forward(self, rows: Any) -> Any:
        return 2 * super().forward(rows)


def make(kind: Any, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    module = kind(SimpleNamespace(**FIELDS, hidden_act="silu"))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=HIDDEN**-0.5)
    return nn.Sequential(module).to(dtype).requires_grad_(False)


def some_rows(n_tokens: int, dtype: Any) -> Any:
    """Rows of tokens that chose one or two experts each."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(N_EXPERTS, n_tokens, HIDDEN)
    for token in range(n_tokens):
        for expert in {token % N_EXPERTS, token * 3 % N_EXPERTS}:
            rows[expert, token] = torch.randn(HIDDEN, generator=generator)
    return rows.view(-1, HIDDEN).to(dtype)


@pytest.mark.parametrize("kind", [Llama4TextExperts, UpFirst])
@pytest.mark.parametrize(
    ("weights", "dtype", "most"),
    [("bf16", torch.bfloat16, 0.01), ("int8", torch.float32, 0.03), ("int4", torch.float32, 0.25)],
)
def test_held_experts_give_what_the_module_gave(
    kind: Any, weights: str, dtype: Any, most: float
) -> None:
    model, own = make(kind, dtype), make(kind, dtype)
    n_held = hold_sorted_experts(model, weights, Arena())
    assert n_held == sum(one.numel() for one in own.parameters())
    assert isinstance(model[0], SortedExperts)
    assert not list(model.parameters())
    for n_tokens in (1, 9, 70):
        rows = some_rows(n_tokens, dtype)
        got, want = model(rows).float(), own(rows).float()
        assert float((got - want).norm() / want.norm()) < most


def test_experts_that_no_token_chose_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(Llama4TextExperts)
    hold_sorted_experts(model, "int8", Arena())
    seen: list[Any] = []
    run = type(model[0].held).forward

    def watch(self: Any, x: Any, chosen: Any, shares: Any) -> Any:
        seen.append(chosen.unique().tolist())
        return run(self, x, chosen, shares)

    monkeypatch.setattr(type(model[0].held), "forward", watch)
    rows = torch.zeros(N_EXPERTS, 2, HIDDEN)
    rows[1], rows[4, 1] = 1.0, -1.0
    model(rows.view(-1, HIDDEN))
    assert seen == [[1, 4]]
    assert not model(torch.zeros(N_EXPERTS * 2, HIDDEN)).any()
    assert len(seen) == 1


def test_what_computes_something_else_stays() -> None:
    model = make(Doubled)
    assert hold_sorted_experts(model, "int8", Arena()) == 0
    assert type(model[0]) is Doubled


def logits_of(model: Any) -> Any:
    with kv.make_decode_session("torch", kv.make_config(model.params, 64)) as session:
        return model.bind(session).forward(range(1, 30), range(29), rows=range(29))


def test_a_model_with_such_experts_holds_them_as_was_counted_before(tmp_path: Any) -> None:
    folder = write_tiny("llama4_text", tmp_path / "it")
    model: Any = load_model(folder, weights="int8")
    held = [name for name, one in model.network.named_modules() if isinstance(one, SortedExperts)]
    assert held
    assert not [name for name, _ in model.network.named_parameters() if "experts" in name]
    buffers = sum(b.nbytes for n, b in model.network.named_buffers() if "rotary" in n)
    assert model.size_bytes - buffers == size_model(folder, weights="int8").weight_bytes
    want = logits_of(load_model(folder, weights="none"))
    assert 0 < np.linalg.norm(logits_of(model) - want) < 0.1 * np.linalg.norm(want)
