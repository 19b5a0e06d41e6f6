"""The CPU kernel refuses tensors that are elsewhere: it would read whatever lies at an address."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from torch import nn  # noqa: E402

import kvcellar as kv  # noqa: E402
from kvcellar.backends import torch as backend  # noqa: E402
from kvcellar.backends.torch.cache import kernel  # noqa: E402
from kvcellar.backends.torch.cache.memory import Arena  # noqa: E402
from kvcellar.backends.torch.cpu.modules import blocks, layers, linears, mixtures, rotations  # noqa: E402
from kvcellar.errors import BackendError  # noqa: E402
from tests.backends.test_experts import CLASSES, make, some_tokens  # noqa: E402

pytestmark = pytest.mark.kernel

ROOT = Path(backend.__file__).parent
N = 256
META = torch.device("meta")


def on_meta(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.empty(*shape, dtype=dtype, device=META)


def linear(bits: int) -> Any:
    expanded = None if bits == 16 else linears.Expanded(N * N)
    return linears.KernelLinear(nn.Linear(N, N, dtype=torch.bfloat16), bits, expanded)


def mlp() -> Any:
    both = nn.Identity()
    return layers.KernelMlp(both, nn.Identity(), None)


def held_experts() -> Any:
    found = make(CLASSES[0])
    mixtures.hold_experts(found, "int8", Arena())
    return found[0]


ASKED: dict[str, Callable[[], Any]] = {
    "KernelLinear.forward": lambda: linear(8)(on_meta(1, N)),
    "KernelLinear.rows": lambda: linear(8).rows(on_meta(3, dtype=torch.int64), torch.float32),
    "code": lambda: linears.code(on_meta(16, N, dtype=torch.bfloat16)),
    "pack": lambda: linears.pack(on_meta(16, N), 4),
    "fitted": lambda: blocks.fitted(on_meta(16, N)).read(),
    "KernelNorm.forward": lambda: layers.KernelNorm(torch.ones(N), 1e-5)(on_meta(1, 2, N)),
    "KernelMlp.forward": lambda: mlp()(on_meta(1, 2, N)),
    "rotate": lambda: rotations.rotate(on_meta(1, 2, 3, 16), *[on_meta(1, 2, 16)] * 2),
    "attend": lambda: attended(on_meta(1, 4, 1, 16)),
    "_side": lambda: pool_of(on_meta(1, 2, 8, 16)),
}
"""By what the error names: how the kernel is given a tensor on another device."""


def attended(q: Any) -> Any:
    """Attend queries on another device than K and V."""
    params = kv.ModelCacheParams(1, groups=(kv.LayerGroup((0,), 2, 16, 16),))
    with kv.make_seq_session("torch", kv.make_config(params, 32)) as session:
        positions = session.cache.begin_step([(0, 1)])
        rows = torch.ones(1, 2, 1, 16)
        at = torch.as_tensor(positions)
        return session.cache.update_and_attend(q, rows, rows, at, 0, 0.2, torch.float32)


def pool_of(rows: Any) -> Any:
    """Describe a pool on another device to the kernel."""
    codecs: Any = (FloatRows(), FloatRows())
    return kernel.make_pool((rows,), (rows,), codecs, None)


class FloatRows:
    dim = 16


@pytest.mark.parametrize("asked", ASKED)
def test_a_tensor_on_another_device_is_refused_by_name(asked: str) -> None:
    with pytest.raises(BackendError, match=rf"{asked} would have .* lies on meta; move it to"):
        ASKED[asked]()


@pytest.mark.parametrize("bits", [16, 12, 4])
def test_weights_of_any_format_refuse_such_inputs(bits: int) -> None:
    with pytest.raises(BackendError, match=r"KernelLinear\.forward would have .*lies on meta"):
        linear(bits)(on_meta(1, N, dtype=torch.bfloat16))


def test_experts_refuse_such_rows_and_such_choices() -> None:
    experts = held_experts()
    x, chosen, shares = some_tokens(3, torch.float32)
    for given in ((x.to(META), chosen, shares), (x, chosen.to(META), shares)):
        with pytest.raises(BackendError, match=r"lies on meta"):
            experts(*given)


def test_every_address_that_the_kernel_is_given_was_looked_at() -> None:
    of_kernel = r"^from kvcellar\.(kernel|backends\.torch\.cache\.kernel) import "
    found = {}
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if re.search(of_kernel, text, re.MULTILINE):
            found[path.relative_to(ROOT).as_posix()] = len(re.findall(r"data_ptr\(", text))
    assert len(found) > 10
    assert {name: n for name, n in found.items() if n} == {"cache/kernel.py": 1}  # address_of's own
