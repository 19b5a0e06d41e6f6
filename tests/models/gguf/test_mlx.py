"""GGUF files in models of mlx-lm: what torch computes of them, by blocks that are kept."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.text.tokenizer import load_tokenizer
from tests.models.gguf.families import CASES
from tests.models.players import Player
from tests.real_models import SMOLLM2

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")

from mlx.utils import tree_flatten  # noqa: E402

from kvcellar.backends.mlx.gguf import pick_dtype, read_network  # noqa: E402
from kvcellar.backends.mlx.words import text_config  # noqa: E402

TEXT = [1, 40, 7, 99, 258, 3, 120, 45, 6, 7, 8, 200, 10, 11, 12, 13, 77, 15, 16]
KINDS = gguf.GGMLQuantizationType


def read(path, dtype="float32"):
    raw = read_config(path)
    return read_network(read_gguf(path), raw, text_config(raw), dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_its_model_or_is_refused_by_name(name, tmp_path):
    path = tmp_path / "model.gguf"
    network = CASES[name].write(path)
    try:
        model, _ = read(path)
    except ModelError as error:
        assert "backend torch" in str(error) or "mlx-lm makes no model" in str(error)
        assert CASES[name].architecture not in ("llama", "qwen2", "qwen3", "gemma3", "phi3")
        return
    if (network.config.rope_parameters or {}).get("rope_type") == "longrope":
        with Player(load_model(path, dtype="float32", weights="none"), "contiguous") as player:
            want = player.feed(TEXT, rows="all")  # by the factors for long texts, as mlx-lm has it
    else:
        with torch.inference_mode():
            want = network(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    # Without our caches some of its models have no window: up to there rows are the same.
    n = getattr(network.config, "sliding_window", None) or len(TEXT)
    got, want = np.array(model(mx.array([TEXT]))[0])[:n], want[:n]
    # mlx-lm's GELU is the exact one in some models whose configs say tanh.
    assert np.abs(got - want).max() <= (2e-3 if name in ("gemma", "starcoder2") else 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_blocks_that_are_kept_are_the_files_own_numbers(name, kind, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    network = CASES[name].write(path, kind=kind)
    model, said = read(path, dtype)
    parameters = dict(tree_flatten(model.parameters()))
    kept = [key.removesuffix(".scales") for key in parameters if key.endswith(".scales")]
    n_of_file = sum(len(one.shape) > 1 for one in read_gguf(path).tensors.values())
    assert len(kept) == n_of_file and f"{n_of_file} matrices stay as they are ({kind.name})" in said
    bits = 8 if kind is KINDS.Q8_0 else 4
    for base in kept:
        parts = [parameters[f"{base}.{end}"] for end in ("weight", "scales", "biases")]
        assert str(parts[1].dtype) == f"mlx.core.{dtype}", "nothing is rounded"
        weight, scales, biases = parts
        got = mx.dequantize(
            weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits
        )
        want = stored(network, base, kind)
        assert np.array_equal(np.array(got), want), base


def stored(network, base, kind):
    """The numbers of a layer's weight once they went through a file."""
    parameters = {key: one.detach().numpy() for key, one in network.named_parameters()}
    if "switch_mlp" in base:
        stem, _, which = base.replace("switch_mlp", "experts").rpartition(".")
        joined = parameters.get(f"{stem}.gate_up_proj")
        plain = {
            "gate_proj": lambda: np.split(joined, 2, axis=1)[0],
            "up_proj": lambda: np.split(joined, 2, axis=1)[1],
            "down_proj": lambda: parameters[f"{stem}.down_proj"],
        }[which]()
    else:
        plain = parameters[f"{base}.weight"]
    blocks = gguf.quantize(np.ascontiguousarray(plain), kind)
    return gguf.dequantize(blocks, kind).reshape(plain.shape)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(KINDS.Q5_0, "float16"), (KINDS.Q8_0, "bfloat16"), (KINDS.F16, "float32")]
)
def test_other_blocks_are_made_plain_and_it_is_said(kind, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    network = CASES["qwen3"].write(path, kind=kind)
    model, said = read(path, dtype)
    parameters = dict(tree_flatten(model.parameters()))
    assert not any(key.endswith(".scales") for key in parameters)
    assert f"are made {dtype} ({kind.name})" in said
    name = "model.layers.1.mlp.down_proj"
    want = torch.from_numpy(stored(network, name, kind)).to(getattr(torch, dtype)).float()
    got = np.array(parameters[f"{name}.weight"].astype(mx.float32))
    assert np.array_equal(got, want.numpy())


def test_the_type_of_plain_numbers_is_the_one_that_loses_least(tmp_path):
    for kind, dtype in ((KINDS.Q8_0, "float16"), (KINDS.Q5_1, "bfloat16"), (None, "float32")):
        CASES["qwen3"].write(tmp_path / "model.gguf", kind=kind)
        assert pick_dtype(read_gguf(tmp_path / "model.gguf")) == dtype


def test_a_file_is_a_whole_model_of_mlx(tmp_path):
    path = tmp_path / "model.gguf"
    network = CASES["llama with biases, tied"].write(path, kind=KINDS.Q8_0)
    told = []
    model = load_model(
        path, backend="mlx", dtype="float32", progress=lambda part, what: told.append(what)
    )
    assert told[-1].startswith("ready: ") and "stay as they are (Q8_0)" in told[-1]
    assert model.eos_token_ids == {261, 263} and model.tokenizer.chat_template
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1:
                blocks = gguf.quantize(weight.numpy(), KINDS.Q8_0)
                weight.copy_(torch.from_numpy(gguf.dequantize(blocks, KINDS.Q8_0)))
        want = network(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    with Player(model, "seq") as player:
        got = player.feed(TEXT, rows="all")
    assert np.abs(got - want).max() <= 1e-4


def test_a_model_that_float16_has_no_room_for_is_float32(tmp_path):
    path, case = tmp_path / "model.gguf", CASES["llama"]

    def larger(config):
        change = case.change(config)
        return lambda name, values: change(name, values) * (400 if "ffn_" in name else 1)

    replace(case, change=larger).write(path, kind=KINDS.Q8_0)
    assert not np.isfinite(np.array(read(path, "float16")[0](mx.array([TEXT])))).all()
    model = load_model(path, backend="mlx", is_unchecked=True)
    assert model.dtype == "float32"
    assert np.isfinite(np.array(model.network(mx.array([TEXT])))).all()


@pytest.mark.slow
def test_greedy_text_of_a_real_model_is_that_of_torch_on_its_plain_weights():
    from mlx_lm.generate import generate_step

    from tests.models.gguf.test_real_models import greedy, reference

    path, theirs = SMOLLM2.found(), reference("smollm2")
    model, said = read(path)
    assert "stay as they are (Q8_0, Q4_1)" in said
    ids = load_tokenizer(path)("The capital of France is")["input_ids"]
    got = [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=8)]
    assert got == greedy(theirs, ids, 8)
