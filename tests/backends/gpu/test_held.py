"""Models whose weights lie on a card in few bits, interpreted: what their own numbers say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts  # noqa: E402

from kvcellar.backends.torch.cpu.modules.blocks import fitted  # noqa: E402
from kvcellar.backends.torch.cpu.modules.experts import ShippedWeights  # noqa: E402
from kvcellar.backends.torch.cpu.modules.mixtures import mixtures, replace_experts  # noqa: E402
from kvcellar.backends.torch.cpu.modules.sorted_experts import replace_sorted  # noqa: E402
from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.weights import multiply  # noqa: E402
from kvcellar.backends.torch.gpu.weights.hold import card_experts  # noqa: E402
from kvcellar.backends.torch.gpu.weights.linears import CardExperts, CardLinear  # noqa: E402
from kvcellar.backends.torch.gpu.weights.matrices import packed, placed  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.errors import BackendError  # noqa: E402
from kvcellar.models import load_model  # noqa: E402
from kvcellar.models.sizes.sizing import size_model  # noqa: E402
from kvcellar.models.weights import is_fitted  # noqa: E402
from tests.backends import test_sorted_experts  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402
from tests.backends.test_experts import CLASSES, far, make, some_tokens  # noqa: E402
from tests.models.adapters import logits_of, merged, write_adapter  # noqa: E402
from tests.models.gguf.families import CASES  # noqa: E402
from tests.models.players import Player, text  # noqa: E402
from tests.models.quantised import awq, gptq, store  # noqa: E402
from tests.models.test_adapters import ATTENTION, MLP, apart, mixed_logits  # noqa: E402


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU is a card for weights; its caches are a CPU's, which are faster than interpreted."""
    hasten()
    monkeypatch.setattr(choice, "ON_CPU", True)
    monkeypatch.setattr(multiply, "OUTPUTS_AT_ONCE", 256)  # few programs, which take long here
    monkeypatch.setattr(choice, "takes", lambda device, q: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def logits(model: Any) -> np.ndarray:
    """Logits of a prompt, of single tokens and of a few, over K and V in float32."""
    with Player(model, "seq", kv_dtype="float32") as player:
        found = [player.feed(text(9), rows="all")]
        found += [player.feed(text(1), rows="all"), player.feed(text(3), rows="all")]
    return np.concatenate(found)


def by_torch(folder: Path, weights: str) -> Any:
    """Load a model by torch, in float32, with the numbers that packed weights stand for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "ON_CPU", False)  # a card's experts are not torch's
        model = load_model(folder, weights="none", dtype="float32")
    network: Any = model.network
    head = network.get_output_embeddings()
    seen: set[int] = set()
    for module in network.modules():
        is_most_exact = module is head or isinstance(module, nn.Embedding)
        if not isinstance(module, (nn.Linear, nn.Embedding)) or id(module.weight) in seen:
            continue
        weight = module.weight.data
        seen.add(id(module.weight))
        if is_fitted(weights, weight.shape[1], is_most_exact):
            matrix = placed(fitted(weight), torch.device("cpu"))
            weight.copy_(multiply.take(matrix, torch.arange(len(weight)), torch.float32))
        else:
            weight.copy_(in_eight_bits(weight))
    for module in mixtures(network):
        pack_experts(module)
    return model


def in_eight_bits(weight: Tensor) -> Tensor:
    """The numbers that packed weights stand for."""
    matrix = packed(weight, 8, torch.device("cpu"))
    return multiply.take(matrix, torch.arange(len(weight)), torch.float32)


def pack_experts(module: Any) -> None:
    """Put the numbers that packed weights stand for in the place of experts' own."""
    for weight in (one.data for one in module.parameters(recurse=False) if one.dim() == 3):
        for one in weight:
            rows = one.T if module.is_transposed else one
            rows.copy_(in_eight_bits(rows))


def kinds_of(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.network.modules()}


def near(got: np.ndarray, want: np.ndarray, most: float = 2e-4) -> None:
    assert 0 < np.linalg.norm(got - want) < most * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_experts_give_what_their_module_gave(kind: Any, weights: str) -> None:
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model, own = make(kind, dtype), make(kind, dtype)
    if weights == "mxfp4":
        ship(model[0], own[0])
    if weights == "int8":
        pack_experts(own[0])
    found = partial(card_experts, weights=weights, device=torch.device("cpu"))
    n_held = replace_experts(model, found, {})
    assert n_held == 6 * 128 * 64 * (3 if own[0].has_gate else 2)
    assert any(isinstance(module, CardExperts) for module in model.modules())
    for n_tokens in (1, 40):
        tokens = some_tokens(n_tokens, dtype)
        most = 0.01 if weights == "bf16" else 1e-4
        assert far(model[0](*tokens), own[0](*tokens)) < most


class Waits(TorchDispatchMode):
    """Fails where an operation would wait for what a device has computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {"_local_scalar_dense", "nonzero"} & set(str(func).split(".")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_tokens", [1, 40])
def test_a_mixture_waits_for_nothing_so_that_a_graph_can_record_it(n_tokens: int) -> None:
    model, (x, chosen, shares) = make(CLASSES[0]), some_tokens(n_tokens, torch.float32)
    found = partial(card_experts, weights="int8", device=torch.device("cpu"))
    replace_experts(model, found, {})
    want = model[0](x, chosen, shares)
    with Waits():
        assert torch.equal(model[0](x, chosen, shares), want)
    with pytest.raises(AssertionError, match="nonzero"), Waits():
        chosen.nonzero()


@pytest.mark.parametrize("n_tokens", [1, 9])
def test_experts_that_are_given_rows_skip_those_of_no_token(n_tokens: int) -> None:
    model, own = (test_sorted_experts.make(Llama4TextExperts) for _ in range(2))
    found = partial(card_experts, weights="bf16", device=torch.device("cpu"))
    assert replace_sorted(model, found) == sum(one.numel() for one in own.parameters())
    rows = test_sorted_experts.some_rows(n_tokens, torch.float32)
    with Waits():
        got = model(rows)
    assert far(got, own(rows)) < 1e-5


def ship(module: Any, own: Any) -> None:
    """Give a module random experts as MXFP4 ships them, and another one their numbers."""
    generator = torch.Generator().manual_seed(4)
    for name, weight in list(own.named_parameters(recurse=False)):
        if weight.dim() < 3:
            continue
        rows = weight.transpose(1, 2) if own.is_transposed else weight
        n_experts, n_out, n_in = rows.shape
        delattr(module, name)
        for end, shape, least, most in (
            ("blocks", (n_experts, n_out, n_in // 32, 16), 0, 256),
            ("scales", (n_experts, n_out, n_in // 32), 120, 126),
        ):
            made = torch.randint(least, most, shape, generator=generator, dtype=torch.uint8)
            module.register_parameter(f"{name}_{end}", nn.Parameter(made, requires_grad=False))
        held = module._parameters
        shipped = ShippedWeights(held[f"{name}_blocks"], held[f"{name}_scales"])
        for expert in range(n_experts):
            rows[expert] = shipped[expert]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", {"CardLayer", "CardEmbedding"}),
        ("gemma3_text", {"CardAttention", "CardMlp", "CardNorm"}),
        ("qwen3_moe", {"CardExperts", "CardLayer"}),
        ("lfm2", {"CardNorm", "CardMlp"}),
    ],
)
def test_packed_weights_are_multiplied_in_every_family(
    family: str, wanted: set[str], tmp_path: Path
) -> None:
    folder = write_tiny(family, tmp_path)
    model = load_model(folder, weights="int8", dtype="float32")
    assert model.weights == "int8" and wanted <= kinds_of(model)
    assert not any(type(one) is nn.Linear for one in model.network.modules()), "but routers"
    near(logits(model), logits(by_torch(folder, "int8")))


@pytest.mark.slow
def test_a_mixer_that_multiplies_by_weights_itself_finds_them(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "attn_layer_offset": 1, "attn_layer_period": 2}
    folder = write_tiny("jamba", tmp_path, **shape, num_experts=1)
    found = []
    for weights in ("bf16", "none"):
        model = load_model(folder, weights=weights, dtype="bfloat16", is_unchecked=True)
        assert ("CardLinear" in kinds_of(model)) == (weights == "bf16")
        with Player(model, "seq", kv_dtype="float32") as player:
            found.append(np.stack([*player.feed([5, 9, 7], rows="all"), *player.feed([3])]))
    near(*found, 0.05)


@pytest.mark.slow
def test_int4_is_what_the_cpu_kernel_fits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    folder = write_tiny("llama", tmp_path, **sizes)
    model = load_model(folder, weights="int4", dtype="float32")
    near(logits(model), logits(by_torch(folder, "int4")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_a_gguf_file_s_matrices_are_multiplied_as_they_are(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    CASES["llama"].write(path, kind=gguf.GGMLQuantizationType[kind])
    model = load_model(path, weights="file", dtype="float32", is_unchecked=True)
    assert model.weights == "file" and "CardLayer" in kinds_of(model)
    plain = load_model(path, weights="none", dtype="float32", is_unchecked=True)
    near(logits(model), logits(plain))


@pytest.mark.slow
def test_blocks_are_the_default_and_bfloat16_lies_between_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    CASES["llama"].write(path, kind=gguf.GGMLQuantizationType["Q4_1"])
    model, spec = load_model(path, is_unchecked=True), size_model(path)
    assert (model.weights, model.dtype, model.kv_dtype) == ("file", "bfloat16", "bfloat16")
    assert (spec.is_in_blocks, spec.dtype) == (True, "bfloat16")
    assert abs(model.size_bytes - spec.weight_bytes) < 0.05 * spec.weight_bytes
    plain = load_model(path, weights="none", dtype="float32", is_unchecked=True)
    near(logits(model), logits(plain), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_groups_of_awq_and_gptq_are_multiplied_as_they_are(method: str, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, num_hidden_layers=1)
    said = {"quant_method": method, "bits": 4 if method == "awq" else 8, "group_size": 32}
    store(folder, said, awq(32) if method == "awq" else gptq(8, 32))
    model = load_model(folder, weights="file", dtype="float32", is_unchecked=True)
    assert "CardLayer" in kinds_of(model)
    plain = load_model(folder, weights="none", dtype="float32", is_unchecked=True)
    near(logits(model), logits(plain))


def test_bfloat16_weights_stay_as_they_are_and_are_the_default(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, num_hidden_layers=1)
    model = load_model(folder, dtype="bfloat16")
    assert model.weights == "bf16" and "CardLayer" in kinds_of(model)
    plain = load_model(folder, weights="none", dtype="bfloat16")
    assert model.size_bytes == plain.size_bytes
    assert model.fingerprint().value == plain.fingerprint().value
    near(logits(model), logits(plain), 0.03)


def test_weights_in_few_bits_are_refused_where_no_kernel_reads_them(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, num_hidden_layers=1)
    for weights in ("bf16", "int8", "int4"):
        with pytest.raises(BackendError, match=f"weights {weights} .* which has none for meta"):
            load_model(folder, weights=weights, device="meta")


def test_without_the_package_s_kernel_weights_in_few_bits_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny("llama", tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(levels, "is_available", lambda: False)
    assert load_model(folder, dtype="bfloat16").weights is None
    with pytest.raises(BackendError, match="weights int4 are looked at and packed by the CPU"):
        load_model(folder, weights="int4")


@pytest.mark.slow
def test_adapters_add_to_what_a_card_computes(tmp_path):
    folder = write_tiny("qwen3", tmp_path / "model")
    paths = {
        name: write_adapter(tmp_path / name, folder, (*ATTENTION, *MLP), seed=i, lora_alpha=2)
        for i, name in enumerate(("one", "two"))
    }
    model: Any = load_model(folder, adapters=paths, weights="int8")
    assert any(isinstance(module, CardLinear) for module in model.network.modules())
    ids = list(range(5, 15))
    names = ["one", "", "two"]
    found = mixed_logits(model, [(name, ids) for name in names])
    wants = [logits_of(merged(folder, paths.get(name)), ids) for name in names]
    errors = [apart(got, want) for got, want in zip(found, wants, strict=True)]
    assert min(apart(wants[0], wants[1]), apart(wants[2], wants[1])) > 0.2
    assert max(errors[0], errors[2]) < max(0.1, 2 * errors[1])  # what 8 bits cost, and no more
