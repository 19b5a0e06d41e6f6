"""Loading: what is accepted, what is refused and how, and what a user hears meanwhile."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

from kvcellar.backends.torch.cpu.modules.experts import KernelExperts
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.cache_config import make_config
from kvcellar.engine import encode_chat
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.installed import pip_command
from kvcellar.kernel import levels
from kvcellar.models import load_model
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.loading import check_model
from kvcellar.models.options import LoadOptions
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.text.prompts import encode, render
from tests.models.players import Oracle, Player, assert_close, text
from tests.models.tiny_checkpoints import (
    COMMON,
    VOCAB_SIZE,
    edit_json,
    make_model,
    make_tokenizer,
    randomize,
    rewrite,
    save,
)


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A whole Llama checkpoint that the test may damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A Llama checkpoint in several files."""
    save(make_model("llama"), tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def refuses(match: str, where: Any, **options: Any) -> None:
    with pytest.raises(ModelError, match=match):
        load_model(where, **options)


# What is accepted ---------------------------------------------------------------------------------


def test_a_loaded_model_says_what_it_is(loaded, checkpoint):
    model = loaded("gemma3")
    assert model.name == str(model.path) == str(checkpoint("gemma3"))
    assert model.backend == "torch"
    assert model.params.n_layers == 7
    assert model.vocab_size == VOCAB_SIZE
    assert model.max_positions == 512
    assert model.dtype == "float32"
    assert model.config.model_type == "gemma3_text"
    assert model.tokenizer.decode(model.tokenizer.encode("héllo")) == "héllo"
    assert len(repr(model)) < 1500


def test_weights_come_whole_from_several_files(sharded, loaded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    with Player(load_model(sharded), "contiguous") as player:
        got = player.feed(text(9), rows="all")
    with Player(loaded("llama"), "contiguous") as player:
        assert np.array_equal(got, player.feed(text(9), rows="all"))


@pytest.mark.parametrize(
    ("stored", "asked", "loaded_as"),
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", None, "bfloat16"),  # no float16 arithmetic on a CPU
        ("float16", torch.float16, "float16"),  # unless it is asked for
        ("bfloat16", "float32", "float32"),
        ("float32", torch.bfloat16, "bfloat16"),
    ],
)
def test_the_type_of_the_weights_is_the_checkpoints_own_or_what_is_asked(
    tmp_path, stored, asked, loaded_as
):
    save(make_model("qwen2").to(getattr(torch, stored)), tmp_path)
    assert load_model(tmp_path, dtype=asked).dtype == loaded_as
    edit_json(tmp_path / "config.json", dtype=...)  # then the tensors say it
    assert load_model(tmp_path, dtype=asked).dtype == loaded_as


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_bfloat16_checkpoint_gives_float32_logits_near_those_of_transformers(tmp_path, family):
    save(make_model(family).to(torch.bfloat16), tmp_path)
    model = load_model(tmp_path)
    with Player(model, "contiguous", kv_dtype="bfloat16") as player:
        got = player.feed(text(30), rows="all")
    want = Oracle(tmp_path).logits(text(30))  # the same weights, in float32
    assert got.dtype == np.float32
    # A router's near ties fall one way or the other by the last bit.
    assert np.median(np.abs(got - want)) < (0.1 if family == "gpt_oss" else 0.05)
    alike = [np.corrcoef(*rows)[0, 1] for rows in zip(got, want, strict=True)]
    assert (np.median if family == "gpt_oss" else np.min)(alike) > 0.98, alike


def test_the_text_part_of_a_multimodal_gemma_3_runs_alone(tmp_path):
    text_config = transformers.Gemma3TextConfig(
        **COMMON, num_hidden_layers=7, head_dim=32, sliding_window=8
    )
    vision_config = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text_config,
        vision_config=vision_config,
        mm_tokens_per_image=4,
        image_token_index=270,
        boi_token_index=268,
        eoi_token_index=269,
        eos_token_id=[257, 261],
    )
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(whole)
    save(whole, tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[257, 260])
    part = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config=part | {"eos_token_id": 258})
    model = load_model(tmp_path)
    assert model.params.n_layers == 7
    assert [group.window for group in model.params.groups] == [8, None]
    assert model.eos_token_ids == {257, 258, 260, 261}
    assert not any("vision" in name for name, _ in model.network.named_parameters())
    with torch.no_grad():
        want = whole(torch.tensor([text(30)]), use_cache=True).logits[0].numpy()
    with Player(model, "contiguous") as player:
        assert_close(player.feed(text(30), rows="all"), want)


@pytest.fixture
def shipped_in_mxfp4(tmp_path):
    """Save a model as gpt-oss is published: 4-bit values in pairs, a power of two per 32 of them.

    Beside it, in ``plain``, the same weights in bfloat16.
    """
    model = make_model("gpt_oss").to(torch.bfloat16)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    generator = torch.Generator().manual_seed(5)
    packed = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                continue
            experts, n_in, n_out = parameter.shape
            shape = (experts, n_out, n_in // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            scales = torch.randint(123, 126, shape[:3], generator=generator).to(torch.uint8)
            low, high = table[(blocks & 15).long()], table[(blocks >> 4).long()]
            values = torch.stack([low, high], dim=-1).flatten(3)
            values = values * torch.exp2(scales.float() - 127)[..., None]
            parameter.copy_(values.flatten(2).transpose(1, 2))
            packed[name] = (blocks, scales)
    save(model, tmp_path / "plain")
    save(model, tmp_path / "packed")

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name, (blocks, scales) in packed.items():
            del tensors[name]
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales

    rewrite(tmp_path / "packed" / "model.safetensors", pack)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    edit_json(
        tmp_path / "packed" / "config.json",
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped},
    )
    return tmp_path / "packed"


def test_experts_in_mxfp4_are_expanded_where_torch_runs_them(shipped_in_mxfp4):
    logits = []
    for folder in (shipped_in_mxfp4.parent / "plain", shipped_in_mxfp4):
        with Player(load_model(folder, dtype="float32"), "contiguous") as player:
            logits.append(player.feed(text(12), rows="all"))
    assert_close(logits[1], logits[0])


@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.parametrize("weights", [None, "int8"])
def test_experts_in_mxfp4_stay_as_they_were_shipped_where_the_kernel_runs_them(
    shipped_in_mxfp4, weights
):
    model = load_model(shipped_in_mxfp4, weights=weights)
    with Player(model, "contiguous") as player:
        found = player.feed(text(12), rows="all")
    assert model.dtype == "bfloat16"
    held = [m for m in model.network.modules() if isinstance(m, KernelExperts)]
    assert len(held) == model.params.n_layers
    assert all(part.bits == 4.25 for experts in held for part in (experts.up, experts.down))
    plain = load_model(shipped_in_mxfp4.parent / "plain", weights="none")
    with Player(plain, "contiguous") as player:
        want = player.feed(text(12), rows="all")
    # Where two experts are as likely, rounding decides which one a token takes.
    assert np.median(abs(found - want)) < 0.1 * abs(want).mean()
    spec = size_model(shipped_in_mxfp4, weights=weights)
    assert "stay in MXFP4" in spec.counted
    buffers = dict(model.network.named_buffers())
    beside = sum(b.nbytes for n, b in buffers.items() if "rotary" in n or n.endswith("escapes"))
    assert model.size_bytes - beside == spec.weight_bytes


@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.parametrize("weights", ["bf16", "int8", "none"])
def test_experts_in_mxfp4_run_without_torch_as_with_it(shipped_in_mxfp4, weights):
    dtype = "float32" if weights == "none" else "bfloat16"
    found = []
    for backend in ("torch", "native"):
        model = load_model(shipped_in_mxfp4, weights=weights, dtype=dtype, backend=backend)
        with Player(model, "contiguous", kv_dtype="float32") as player:
            found.append(np.stack(player.feed(text(12), rows="all")))
    # Where two experts are as likely, rounding decides which one a token takes.
    far = 1e-5 if weights == "none" else 0.1
    assert np.median(abs(found[1] - found[0])) < far * abs(found[0]).mean()
    spec = size_model(shipped_in_mxfp4, weights=weights, dtype=dtype, backend="native")
    assert spec.weight_bytes == pytest.approx(model.size_bytes, rel=0.02)


@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.parametrize("end", ["gate_up_proj_scales", "down_proj_blocks", "down_proj_bias"])
def test_experts_whose_tensors_do_not_fit_are_refused(shipped_in_mxfp4, end):
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = tensors[name][:-1].clone()

    rewrite(shipped_in_mxfp4 / "model.safetensors", cut)
    with pytest.raises(ModelError, match=r"no weights in MXFP4|does not fit"):
        load_model(shipped_in_mxfp4, weights="bf16", backend="native")


def test_tensors_that_no_layer_needs_are_no_obstacle(folder):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["vision_tower.layers.0.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # of old Llamas
        tensors["model.layers.3.self_attn.q_proj.weight"] = torch.zeros(3)  # beyond the last

    rewrite(folder / "model.safetensors", add)
    assert load_model(folder).params.n_layers == 3


def test_special_tokens_past_the_embedding_are_let_through_and_refused_in_a_forward(folder):
    """Gemma 3 1B is like that: its tokenizer has a token for images, the model has not."""
    tokenizer = make_tokenizer()
    extra = [f"<special{i}>" for i in range(VOCAB_SIZE - len(tokenizer) + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    tokenizer.save_pretrained(folder)
    model = load_model(folder)
    ids = model.tokenizer.encode(extra[-1])
    assert ids == [VOCAB_SIZE]
    with Player(model, "contiguous") as player, pytest.raises(ValueError, match=str(VOCAB_SIZE)):
        player.feed(ids)


def test_every_token_that_ends_a_text_is_known(folder):
    edit_json(folder / "config.json", eos_token_id=[257, 261])
    edit_json(folder / "generation_config.json", eos_token_id=260)
    assert load_model(folder).eos_token_ids == {257, 260, 261}
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_token_ids == {257}


def test_a_chat_is_rendered_by_the_models_own_template(loaded):
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    model = loaded("llama")
    turns = [256, 259, *model.tokenizer.encode("a"), 261, 260, *model.tokenizer.encode("b"), 261]
    assert encode_chat(model.tokenizer, messages[:1]) == [*turns[:4], 260]
    assert encode_chat(model.tokenizer, messages) == turns[:-1], "the answer is gone on with"
    assert encode(model.tokenizer, render(model.tokenizer, messages, is_asking=False)) == turns


# The bundled model --------------------------------------------------------------------------------


def test_the_bundled_model_loads_by_name_and_equals_transformers():
    model = load_model("demo")
    assert (model.name, model.dtype) == ("demo", "float32")
    assert model.max_positions >= 2048
    assert model.tokenizer.eos_token_id in model.eos_token_ids
    prompt = tuple(model.tokenizer.encode("def read_lines(path):\n"))
    want_tokens, want = Oracle(DEMO_FOLDER).greedy(prompt, 16)
    for kind in ("contiguous", "seq", "tree"):
        with Player(model, kind) as player:
            tokens, got = player.greedy(player.feed(prompt), 16)
            assert tokens == want_tokens
            assert_close(got, want)


def test_the_bundled_model_answers_in_a_chat():
    model = load_model("demo", dtype="bfloat16")
    assert model.dtype == "bfloat16"
    assert make_config(model.params, 8).kv_dtype == model.kv_dtype == "bfloat16"
    prompt = encode_chat(model.tokenizer, [{"role": "user", "content": "Write a function."}])
    with Player(model, "contiguous") as player:
        tokens, _ = player.greedy(player.feed(prompt), 3)
    assert isinstance(model.tokenizer.decode(tokens), str)


# What is refused ----------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path):
    refuses(r"there is no folder .*nowhere", tmp_path / "nowhere")
    refuses(r"there is no folder .*nowhere", "./no/where/nowhere")
    refuses(r"there is no folder demo", Path("demo"))


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "model.bin").touch()
    refuses(r"model.bin is a file; give a GGUF file, or the folder of", tmp_path / "model.bin")


@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_code_of_a_checkpoints_own_is_never_run(folder, tmp_path, kind):
    """Neither where the model is known besides nor where only its code knows it."""
    ran = tmp_path / "ran"
    names = {"Config": "PretrainedConfig", "Model": "PreTrainedModel"}
    names["Tokenizer"] = "PreTrainedTokenizerFast"
    source = f"import pathlib, transformers\npathlib.Path({str(ran)!r}).touch()\n"
    for name, base in names.items():
        source += f"class {name}(transformers.{base}):\n    model_type = {kind!r}\n"
    (folder / "evil.py").write_text(source)
    autos = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    autos |= {"AutoTokenizer": [None, "evil.Tokenizer"]}
    for name in ("config.json", "tokenizer_config.json"):
        value = json.loads((folder / name).read_text()) | {"auto_map": autos}
        if kind == "evil" and name == "config.json":
            value |= {"model_type": "evil", "architectures": ["EvilForCausalLM"]}
        (folder / name).write_text(json.dumps(value))
    if kind == "evil":
        refuses(r"evil", folder)
    else:
        assert load_model(folder).tokenizer.encode("x")
    assert not ran.exists()


def test_a_name_that_needs_the_hub_when_there_is_no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuses(r"no folder 'some/model' here.*hub cannot be reached.*offline", "some/model")


def test_a_name_on_the_hub_is_downloaded_with_progress(monkeypatch, checkpoint):
    def snapshot_download(name: str, *, tqdm_class: Any, **options: Any) -> str:
        assert name == "some/model"
        with tqdm_class(total=100, unit="B", desc="Fetching") as bar:
            bar.update(40)
            bar.update(60)
        return str(checkpoint("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    seen: list[tuple[float, str]] = []
    model = load_model("some/model", progress=lambda part, what: seen.append((part, what)))
    assert model.name == "some/model"
    assert [what for _, what in seen[:2]] == ["downloading some/model"] * 2
    assert [part for part, _ in seen[:2]] == pytest.approx([0.36, 0.9])
    assert seen == sorted(seen, key=lambda event: event[0])
    assert seen[-1] == (1.0, "ready")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        ("GatedRepoError", "licence to be accepted.*hf auth login"),
        ("RepositoryNotFoundError", "no folder 'some/model' here and no model of that name"),
        ("HfHubHTTPError", "downloading 'some/model' failed: disk on fire"),
    ],
)
def test_what_the_hub_answers_is_told(monkeypatch, error, match):
    def snapshot_download(name: str, **options: Any) -> str:
        response = SimpleNamespace(headers={}, request=None)
        raise getattr(huggingface_hub.errors, error)("disk on fire", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refuses(match, "some/model")


def test_a_folder_without_a_config(folder):
    (folder / "config.json").unlink()
    refuses(r"no config.json, .* it holds .*generation_config.json, model.safetensors", folder)


@pytest.mark.parametrize("text", ["{", "", "[1]", "\xff\xfe"])
def test_a_config_that_is_not_a_json_object(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    refuses(r"config.json (cannot be read as JSON|holds list where an object)", folder)


def test_a_config_that_lacks_a_field(folder):
    edit_json(folder / "config.json", num_attention_heads=...)
    refuses(r"llama config has no num_attention_heads", folder)


def test_an_unknown_architecture(folder):
    edit_json(folder / "config.json", model_type="alien")
    refuses(r"architecture 'alien' is unknown to transformers", folder)
    edit_json(folder / "config.json", model_type=...)
    refuses(r"config has no model_type", folder)


def test_a_model_that_does_not_generate_text(folder):
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    refuses(r"is a LlamaForSequenceClassification; .* must be a LlamaForCausalLM", folder)


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "choose a causal model"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping.*ignores"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "it has no .linear_attention"),
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "stores its weights by 'bitsandbytes'",
        ),
    ],
)
def test_what_would_load_and_then_run_wrongly(checkpoint, tmp_path, family, changes, match):
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    edit_json(folder / "config.json", **changes)
    refuses(match, folder)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_sizes_that_no_cache_can_have_are_refused_before_anything_is_loaded(tmp_path):
    folder = write_tiny("deepseek_v3", tmp_path / "it")
    edit_json(folder / "config.json", kv_lora_rank=0)
    refuses("needs v_head_dim >= 1, got 0; choose another model$", folder)
    with pytest.raises(ModelError, match="needs v_head_dim >= 1"):
        check_model(LoadOptions(folder))


def test_a_checkpoint_without_weights(folder):
    (folder / "model.safetensors").unlink()
    refuses(r"neither model.safetensors nor model.safetensors.index.json; copy", folder)
    (folder / "pytorch_model.bin").touch()
    refuses(r"pytorch_model.bin is a pickle, which could run code", folder)


def test_a_file_that_the_index_names_and_that_is_missing(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    refuses(rf"lacks 1 of the \d+ files that its index names: {gone.name}; .*half copied", sharded)


def test_a_file_that_lacks_what_the_index_says_it_has(sharded):
    first = min(sharded.glob("*.safetensors"))
    rewrite(first, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    refuses(r"lacks 1 tensors that the index says it has: model.embed_tokens.weight", sharded)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_without_a_map(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    refuses(r"index.json has no weight_map", sharded)


@pytest.mark.parametrize("kept", [0.99, 0.3])
def test_a_truncated_file(folder, kept):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    refuses(rf"is truncated: {path.stat().st_size} bytes of at least {len(whole)}", folder)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is not a safetensors file"),
        (b"\x10\0\0\0\0\0\0\0{", "is truncated: 9 bytes of at least 24"),
        (b"\xff" * 64, "is not a safetensors file"),
        (b"\x04\0\0\0\0\0\0\0{abc", "has a damaged header"),
        (b"\x02\0\0\0\0\0\0\0[]", "has a damaged header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_no_safetensors(folder, content, match):
    (folder / "model.safetensors").write_bytes(content)
    refuses(match, folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "F33"},
        {"dtype": ["F32"]},
        {"dtype": None},
        {"dtype": "BF16"},
        {"shape": [1, 2]},
        {"shape": "[1]"},
        {"shape": [-1, -1]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 2**70]},
        {"data_offsets": [0.5, 1e308]},
        {"data_offsets": {"0": 1}},
    ],
)
def test_a_header_that_is_damaged_in_one_tensor_is_said_to_be(folder, damage):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"].update(damage)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    refuses(r"has a damaged header \(.*\); copy it again", folder)


@pytest.mark.parametrize("names", [[["a"]], ["../model.safetensors"], [5], [""], ["a/b"]])
def test_an_index_names_files_beside_it(folder, names):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses("which is no file beside it", folder)


def test_tensors_that_are_missing_are_not_made_up(folder):
    rewrite(
        folder / "model.safetensors",
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
    )
    refuses(r"lacks 1 tensors .*LlamaForCausalLM has: model.layers.1.mlp.up_proj.weight", folder)


def test_an_output_embedding_that_is_missing_where_it_is_not_tied(folder):
    rewrite(folder / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    refuses(r"lacks 1 tensors .* lm_head.weight", folder)


def test_weights_of_another_shape(folder):
    edit_json(folder / "config.json", intermediate_size=128)
    refuses(r"has 9 tensors of other shapes .*down_proj.weight is \[64, 96\] and not", folder)


def test_weights_of_another_architecture(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen2"), tmp_path / "qwen2")
    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    refuses(r"9 tensors that a LlamaForCausalLM does not know: .*self_attn.k_proj.bias", folder)


def test_a_checkpoint_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    refuses(r"has no tokenizer \(tokenizer.json, tokenizer.model, vocab.json\)", folder)


def test_a_tokenizer_that_cannot_be_read(folder):
    (folder / "tokenizer.json").write_text("{}")
    refuses(r"the tokenizer in .* cannot be read", folder)


def test_a_tokenizer_with_more_tokens_than_the_model(folder):
    make_tokenizer(n_extra=20).save_pretrained(folder)
    refuses(r"token ids up to 281 and the model's embedding has 272 rows", folder)


def test_a_chat_with_a_model_that_has_no_template(folder):
    make_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        encode_chat(load_model(folder).tokenizer, [{"role": "user", "content": "hi"}])


def test_a_chat_that_the_template_refuses(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="refuses these messages: roles must alternate"):
        encode_chat(load_model(folder).tokenizer, [{"role": "user", "content": "hi"}])


def test_settings_that_do_not_exist(folder):
    with pytest.raises(BackendError, match=r"'jax' is unknown; there are: .*torch"):
        load_model(folder, backend="jax")
    with pytest.raises(ConfigError, match=r"dtype 'int3' .* float32, bfloat16, float16"):
        load_model(folder, dtype="int3")
    with pytest.raises(ConfigError, match="device 'nowhere' cannot be used"):
        load_model(folder, device="nowhere")


# What a user hears --------------------------------------------------------------------------------


def test_loading_tells_its_progress_weight_by_weight(folder):
    seen: list[tuple[float, str]] = []
    load_model(folder, progress=lambda part, what: seen.append((part, what)))
    assert seen == sorted(seen, key=lambda event: event[0])
    assert seen[0] == (0.0, "reading the config")
    assert seen[-1] == (1.0, "ready")
    assert len({part for part, what in seen if what == "loading weights"}) > 20


def test_progress_can_stop_the_loading(folder):
    class StopError(Exception):
        pass

    def stop(part: float, what: str) -> None:
        if part > 0.5:
            raise StopError

    with pytest.raises(StopError):
        load_model(folder, progress=stop)
    load_model(folder)


def test_loading_is_silent_and_leaves_the_logging_of_transformers_alone(folder, capfd, caplog):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["unexpected"] = torch.zeros(3)  # which transformers reports

    rewrite(folder / "model.safetensors", add)
    noise = transformers.utils.logging
    verbosity = noise.get_verbosity()
    noise.set_verbosity_info()
    try:
        with caplog.at_level(logging.INFO):
            load_model(folder)
        assert noise.get_verbosity() == logging.INFO
        assert noise.set_tqdm_hook(None) is None
    finally:
        noise.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_importing_the_package_needs_no_tensor_library():
    code = (
        "import sys, kvcellar, kvcellar.models, kvcellar.spec;"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_the_error_says_what_to_install(folder, monkeypatch):
    for name in ("loading", "weights", "model_attention"):
        monkeypatch.delitem(sys.modules, f"kvcellar.backends.torch.{name}", raising=False)
    monkeypatch.delattr("kvcellar.backends.torch.loading", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendError, match="needs torch, which is not installed") as refused:
        load_model(folder, dtype="float16")  # which the native backend does not compute in
    assert str(refused.value).endswith(f": {pip_command('torch')}")


def test_a_sharded_index_may_be_written_by_hand(sharded):
    """Order and extra keys in it mean nothing."""
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    path.write_text(json.dumps({"note": "mine", **index}))
    load_model(sharded)


def test_touching_weights_says_how_many_bytes_they_are(checkpoint):
    model = load_model(checkpoint("gemma3"))  # its embedding is tied, and counts once
    tensors = [*model.network.parameters(), *model.network.buffers()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert model.touch_weights() == held
