"""What models cost, against published configs; every figure is derived in the comment beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcellar.backends.torch import loading
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.load import counting
from kvcellar.errors import ConfigError, ModelError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.loading import load_model
from kvcellar.models.sizes.sizing import size_model
from kvcellar.models.sizes.spec_file import SPEC_FIELDS, spec_from_file
from kvcellar.spec import ModelCacheSpec
from kvcellar.types import LayerGroup, ModelCacheParams
from tests.models.tiny_checkpoints import FAMILIES, make_checkpoint

CONFIGS = Path(__file__).parent / "configs"
"""config.json of four models as they are published, under the models' names."""


def published(name: str) -> ModelCacheSpec:
    """With weights as they are in files, not as this machine's kernel would hold them."""
    return size_model(CONFIGS / f"{name}.json", weights="none")


def token_bytes(spec: ModelCacheSpec) -> dict[str, int]:
    names = ("float32", "bfloat16", "int8", "int4", "k8v4")
    return {name: spec.token_bytes(parse_kv_dtype(name)) for name in names}


# Published models ---------------------------------------------------------------------------------


def test_llama_3_1_8b():
    spec = published("llama-3.1-8b")
    # 32 layers, 8 KV heads, head_dim 4096 / 32 = 128; no windows.
    assert (spec.params.n_layers, spec.params.n_kv_heads) == (32, 8)
    assert (spec.params.head_dim, spec.params.v_head_dim) == (128, 128)
    assert [group.window for group in spec.params.groups] == [None]
    assert spec.max_positions == 131_072
    # A token is 32 layers * 8 heads = 256 rows of K and as many of V, of 128 numbers each.
    #   float32:  256 * 2 * 128 * 4 bytes            = 262,144
    #   bfloat16: 256 * 2 * 128 * 2                  = 131,072
    #   int8:     a row is 128 bytes and 2 groups of 64, 4 bytes of scale and bias each: 136;
    #             256 * 2 * 136                      =  69,632
    #   int4:     a row is 64 bytes and 4 groups of 32, 4 bytes each: 80;  256 * 2 * 80 = 40,960
    #   k8v4:     256 * (136 + 80)                   =  55,296
    assert token_bytes(spec) == {
        "float32": 262_144,
        "bfloat16": 131_072,
        "int8": 69_632,
        "int4": 40_960,
        "k8v4": 55_296,
    }
    # An agent of 4,096 tokens in bfloat16: 4,096 * 131,072 = 536,870,912, half a GiB.
    assert spec.agent_bytes(4096, parse_kv_dtype("bfloat16")) == 2**29
    # Embedding and head, untied: 2 * 128,256 * 4,096                  = 1,050,673,152
    # A layer: q and o 2 * 4,096^2                                     =    33,554,432
    #          k and v 2 * 4,096 * 1,024                               =     8,388,608
    #          gate, up, down 3 * 4,096 * 14,336                       =   176,160,768
    #          two norms 2 * 4,096                                     =         8,192
    # 32 * 218,112,000 = 6,979,584,000; and a last norm of 4,096: 8,030,261,248 in all,
    # which is what the model's page says. In bfloat16 twice as many bytes.
    assert spec.weight_bytes == spec.stored_bytes == 2 * 8_030_261_248


def test_qwen_2_5_14b():
    spec = published("qwen2.5-14b")
    # 48 layers, 8 KV heads, head_dim 5120 / 40 = 128. sliding_window is written down and switched
    # off (use_sliding_window), so every layer keeps all of its history.
    assert (spec.params.n_layers, spec.params.n_kv_heads, spec.params.head_dim) == (48, 8, 128)
    assert [(len(g.layers), g.window) for g in spec.params.groups] == [(48, None)]
    # 48 * 8 = 384 rows each of K and V; rows of 512, 256, 136, 80 bytes as above:
    #   384 * 2 * 512 = 393,216; * 256 = 196,608; * 136 = 104,448; * 80 = 61,440;
    #   384 * (136 + 80) = 82,944
    assert token_bytes(spec) == {
        "float32": 393_216,
        "bfloat16": 196_608,
        "int8": 104_448,
        "int4": 61_440,
        "k8v4": 82_944,
    }
    # Embedding and head, untied: 2 * 152,064 * 5,120                  = 1,557,135,360
    # A layer: q, o 2 * 5,120^2 = 52,428,800; k, v 2 * 5,120 * 1,024   =    10,485,760
    #          biases of q, k, v: 5,120 + 2 * 1,024                    =         7,168
    #          gate, up, down 3 * 5,120 * 13,824                       =   212,336,640
    #          two norms                                               =        10,240
    # 48 * 275,268,608 = 13,212,893,184; and a last norm of 5,120: 14,770,033,664, as published.
    assert spec.weight_bytes == spec.stored_bytes == 2 * 14_770_033_664


def test_gpt_oss_20b():
    spec = published("gpt-oss-20b")
    # head_dim is 64, a field of its own: 2880 / 64 heads would be 45. 24 layers, of which every
    # other one, from the first on, has a window of 128.
    assert (spec.params.n_layers, spec.params.n_kv_heads, spec.params.head_dim) == (24, 8, 64)
    assert [(g.layers, g.window) for g in spec.params.groups] == [
        (tuple(range(0, 24, 2)), 128),
        (tuple(range(1, 24, 2)), None),
    ]
    # Each group: 12 layers * 8 heads = 96 rows each of K and V, of 64 numbers:
    #   bfloat16: 96 * 2 * 128 = 24,576 in each group
    #   int8: a row is 64 bytes and one group of 64: 68;   96 * 2 * 68 = 13,056
    #   int4: a row is 32 bytes and 2 groups of 32: 40;    96 * 2 * 40 =  7,680
    assert spec.group_bytes(parse_kv_dtype("bfloat16")) == (24_576, 24_576)
    assert token_bytes(spec) == {
        "float32": 98_304,
        "bfloat16": 49_152,
        "int8": 26_112,
        "int4": 15_360,
        "k8v4": 2 * 96 * (68 + 40),
    }
    # An agent of 8,192 tokens: all of them in the full group, 128 and 64 of slack in the other:
    #   (8,192 + 192) * 24,576 = 206,045,184
    assert spec.agent_cells(8192) == (192, 8192)
    assert spec.agent_bytes(8192, parse_kv_dtype("bfloat16")) == 206_045_184
    # Experts: 24 layers * 32 * (2,880 * 5,760 + 2,880 * 2,880)      = 19,110,297,600
    #   in MXFP4: half a byte each, and a byte per 32: 17/32           = 10,152,345,600 bytes
    # The others, bfloat16: embedding and head 2 * 201,088 * 2,880    =  1,158,266,880
    #   a layer: q 2,880 * 4,096 + 4,096                               =     11,800,576
    #            k, v 2 * (2,880 * 512 + 512)                          =      2,950,144
    #            o 4,096 * 2,880 + 2,880                               =     11,799,360
    #            64 sinks; router 32 * 2,880 + 32; two norms 5,760     =         98,016
    #            biases of the experts 32 * (5,760 + 2,880)            =        276,480
    #   24 * 26,924,576 = 646,189,824; last norm 2,880: 1,804,459,584  =  3,608,919,168 bytes
    # 13,761,264,768 bytes in all: the total_size in the published model.safetensors.index.json.
    assert spec.stored_bytes == 13_761_264_768
    # 20.9 billion parameters; loading expands them all to bfloat16.
    assert spec.weight_bytes == 2 * 20_914_757_184
    assert "MXFP4 is expanded to bfloat16" in spec.counted


def test_gpt_oss_20b_fits_a_machine_of_24_gb_as_the_kernel_holds_it():
    # Experts as they are stored: rows are multiples of 16, so nothing is padded.
    shipped = 10_152_345_600
    for weights, linear_bytes in (
        # Per layer of the others: rows in blocks of 16, of each 320 bytes beside 12 bits or scales
        # of 2 bytes for 128 inputs. 2,880 is no multiple of 128, and 4,096 is: q, k and v stay in
        # 16 bits and o has 12. Nor is it one of 256: q, k and v have 8 bits and o has 4, of which
        # 256 take 148 bytes with their scales and minima.
        ("bf16", 24 * (5_120 * 2_880 * 2 + 180 * 320 + 2_880 * 4_096 * 3 // 2)),
        ("int4", 24 * (5_120 * (2_880 + 23 * 2) + 2_880 * 4_096 // 256 * 148)),
    ):
        spec = size_model(CONFIGS / "gpt-oss-20b.json", weights=weights)
        others = 24 * (8_000 * 2 + 98_016 * 2 + 276_480 * 2) + 2_880 * 2
        table = 2 * 201_088 * 2_880 * 2  # embedding and head
        if weights == "int4":  # in 8 bits, with 23 scales for 2,880 inputs
            table = 2 * (201_088 * 2_880 + 201_088 * 23 * 2)
        assert "91% of them stay in MXFP4" in spec.counted
        assert spec.weight_bytes == shipped + linear_bytes + others + table
        assert spec.weight_bytes + spec.agent_bytes(32_768, parse_kv_dtype("bfloat16")) < 16 << 30


def test_gemma_3_12b():
    spec = published("gemma-3-12b-it")
    # head_dim is 256, the class's own value: 3840 / 16 heads would be 240. Five layers with a
    # window of 1,024, then one with all of the history: 8 full ones of 48.
    assert (spec.params.n_layers, spec.params.n_kv_heads, spec.params.head_dim) == (48, 8, 256)
    assert [(len(g.layers), g.window) for g in spec.params.groups] == [(40, 1024), (8, None)]
    assert spec.params.groups[1].layers == tuple(range(5, 48, 6))
    assert spec.max_positions == 131_072
    # bfloat16, one layer: 8 heads * 2 * 256 * 2 bytes = 8,192; 40 of them 327,680, 8 of them 65,536
    # int8: a row is 256 bytes and 4 groups of 64: 272; 8 * 2 * 272 = 4,352 a layer; 48: 208,896
    # int4: a row is 128 bytes and 8 groups of 32: 160; 8 * 2 * 160 = 2,560 a layer; 48: 122,880
    assert spec.group_bytes(parse_kv_dtype("bfloat16")) == (327_680, 65_536)
    assert token_bytes(spec) == {
        "float32": 786_432,
        "bfloat16": 393_216,
        "int8": 208_896,
        "int4": 122_880,
        "k8v4": 48 * 8 * (272 + 160),
    }
    # An agent of 32,768 tokens: 1,024 + 64 * 327,680, and 32,768 * 65,536:
    #   1,088 * 327,680 = 356,515,840; + 2,147,483,648 = 2,503,999,488
    assert spec.agent_bytes(32_768, parse_kv_dtype("bfloat16")) == 2_503_999_488
    # The text part alone; the vision tower (0.42 billion) is not loaded.
    # Embedding, tied: 262,208 * 3,840                                = 1,006,878,720
    # A layer: q 3,840 * 4,096; o as much; 2 * that                   =    31,457,280
    #          k, v 2 * 3,840 * 2,048                                 =    15,728,640
    #          gate, up, down 3 * 3,840 * 15,360                      =   176,947,200
    #          norms: 4 * 3,840, and 2 * 256 for q and k              =        15,872
    # 48 * 224,148,992 = 10,759,151,616, the 10,759M of Gemma 3's report; and a last norm of 3,840
    assert spec.weight_bytes == spec.stored_bytes == 2 * 11_766_034_176
    assert "text model alone (a vision tower is not loaded)" in spec.counted


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_dict_and_a_file_give_the_same_facts(path):
    assert size_model(path).params == learn_facts(json.loads(path.read_text())).params


# What lies on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted_as_it_is_loaded(family, checkpoint, loaded):
    folder = checkpoint(family)
    model = loaded(family)
    spec = size_model(folder)
    held = sum(p.numel() * p.element_size() for p in model.network.parameters())
    assert spec.weight_bytes == held
    assert spec.params == model.params
    assert spec.max_positions == model.max_positions


def test_the_sizes_of_files_count_more_than_what_the_config_says(checkpoint, tmp_path):
    folder = checkpoint("llama")
    stored = size_model(folder).stored_bytes
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert files - 20_000 < stored < files
    raw = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    alone = size_model(tmp_path)
    assert alone.stored_bytes == alone.weight_bytes == stored // 2
    for path in folder.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert size_model(tmp_path).stored_bytes == stored


def test_the_bundled_model_is_counted_in_the_type_that_it_runs_in():
    spec = size_model("demo")
    model = load_model("demo")
    assert spec.weight_bytes == sum(4 * p.numel() for p in model.network.parameters())
    plain = size_model("demo", dtype="bfloat16", weights="none")
    assert plain.weight_bytes * 2 == spec.weight_bytes


# Configs that contradict themselves ---------------------------------------------------------------

PARTS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 272,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": -16}, "head_dim=-16"),
        ({"head_dim": 16.5}, "head_dim"),
        ({"head_dim": "16"}, "head_dim"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 6, "sliding_window": None}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
        ({"intermediate_size": -3}, "makes no model"),
        ({"vocab_size": -1}, "makes no model"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 66}, "hidden size (66)"),
        ({"model_type": "alien"}, "'alien' is unknown to transformers"),
        ({"hidden_size": None}, "no hidden_size"),
    ],
)
def test_contradictory_fields_are_refused_with_the_file_and_the_field(fields, words, tmp_path):
    raw = {key: value for key, value in (PARTS | fields).items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError) as caught:
        size_model(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/at/all", "there is no folder and no config"),
        ("weights.gguf", "there is no folder and no config"),
        ("./demo", "there is no folder and no config"),
    ],
)
def test_a_name_that_is_nothing_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=words):
        size_model(name)


def test_files_that_are_no_config_are_refused(tmp_path):
    for name, text, words in (
        ("model.bin", "x", "neither a folder nor a config.json"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[1]", "holds list where an object"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ModelError, match=words):
            size_model(path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        size_model(tmp_path)


# Spec files ---------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "n_layers": 6,
    "n_kv_heads": 2,
    "head_dim": 64,
    "v_head_dim": 32,
    "groups": [{"layers": 4, "window": 100}, {"layers": [4, 5], "n_kv_heads": 1}],
    "max_positions": 8192,
    "weight_bytes": 10**9,
}


def spec_file(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_spec_file_alone_describes_a_model_that_no_config_here_can(tmp_path):
    spec = spec_from_file(spec_file(tmp_path, WHOLE))
    first, second = spec.params.groups
    assert (first.layers, first.window, first.n_kv_heads) == ((0, 1, 2, 3), 100, 2)
    assert (second.layers, second.window, second.n_kv_heads) == ((4, 5), None, 1)
    # bfloat16: 4 layers * 2 heads * (64 + 32) * 2 bytes = 1,536; 2 * 1 * 96 * 2 = 384
    assert spec.group_bytes(parse_kv_dtype("bfloat16")) == (1536, 384)
    assert (spec.weight_bytes, spec.stored_bytes) == (10**9, 10**9)
    assert spec.agent_cells(1000) == (164, 1000)


def test_a_spec_file_describes_groups_of_every_kind_and_layers_that_share(tmp_path):
    latent = {"layers": 1, "n_kv_heads": 1, "head_dim": 8, "v_head_dim": 32, "is_latent": True}
    chunked = {"layers": 2, "n_kv_heads": 2, "head_dim": 16, "chunk": 64}
    fields = {key: WHOLE[key] for key in ("max_positions", "weight_bytes")}
    fields |= {"n_layers": 4, "groups": [chunked, latent], "shared": [[3, 1]]}
    spec = spec_from_file(spec_file(tmp_path, fields))
    assert spec.params == ModelCacheParams(
        4,
        groups=(
            LayerGroup((0, 1), 2, 16, 16, chunk=64),
            LayerGroup((2,), 1, 8, 32, is_latent=True),
        ),
        shared=((3, 1),),
    )


def test_a_spec_file_replaces_fields_of_a_models_config(tmp_path):
    base = published("gemma-3-12b-it")
    fields = {"weight_bytes": 8_000_000_000, "v_head_dim": 128}
    spec = spec_from_file(spec_file(tmp_path, fields), base)
    assert spec.weight_bytes == spec.stored_bytes == 8_000_000_000
    assert [g.window for g in spec.params.groups] == [1024, None]
    assert {(g.head_dim, g.v_head_dim) for g in spec.params.groups} == {(256, 128)}
    assert spec.max_positions == base.max_positions
    assert "weight_bytes, v_head_dim from mine.json" in spec.counted
    assert spec_from_file(spec_file(tmp_path, {}), base).params == base.params


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "cannot be read as JSON"),
        ([], "holds list"),
        ({"layers": 3}, "has the field 'layers', which a spec does not have; there are: n_layers"),
        ({}, "has no n_layers (attention layers)"),
        (WHOLE | {"weight_bytes": "8GB"}, "weight_bytes='8GB'; it must be a whole number >= 1"),
        (WHOLE | {"head_dim": 0}, "head_dim=0"),
        (WHOLE | {"head_dim": True}, "head_dim=True"),
        (WHOLE | {"n_layers": 7}, "must name each of the 7 layers once"),
        (WHOLE | {"dtype": "int3"}, "dtype='int3'; choose one of float32"),
        (WHOLE | {"n_heads": 3}, "3 query heads (n_heads) are no multiple of 2 KV heads"),
        (WHOLE | {"groups": {}}, "groups={}; write a list of objects"),
        (WHOLE | {"groups": [{"layers": 6, "size": 1}]}, "groups[0].size"),
        (WHOLE | {"groups": [{"layers": 0}]}, "groups[0].layers=0"),
        (WHOLE | {"groups": [{"layers": ["a"]}]}, "groups[0].layers=['a']"),
        (WHOLE | {"groups": [{"layers": 6, "window": 0}]}, "groups[0].window=0"),
        (WHOLE | {"groups": [{"layers": [1, 0]}]}, "groups[0] that cannot work"),
        (WHOLE | {"groups": [{"layers": 6, "window": 9, "chunk": 9}]}, "a window or a chunk"),
        (WHOLE | {"groups": [{"layers": 6, "is_latent": 1}]}, "is_latent must be True or False"),
        (WHOLE | {"shared": [[5, 6]]}, "layer 5 cannot share the rows of layer 6"),
        (WHOLE | {"shared": 5}, "shared must be a tuple of (layer, source), got 5"),
    ],
)
def test_a_spec_file_that_cannot_work_names_itself_and_the_field(value, words, tmp_path):
    path = spec_file(tmp_path, value)
    with pytest.raises(ConfigError) as caught:
        spec_from_file(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_spec_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        spec_from_file(tmp_path / "none.json")


def test_the_page_about_spec_files_has_every_field_and_an_example_that_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "spec-file.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( \*)? \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(SPEC_FIELDS)
    needed = {name for name, star in rows if star}
    example = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    assert spec_from_file(spec_file(tmp_path, example)).params.n_layers == 6
    for name in rows:
        part = {key: value for key, value in example.items() if key != name[0]}
        if name[0] in needed:
            with pytest.raises(ConfigError, match=f"has no {name[0]} "):
                spec_from_file(spec_file(tmp_path, part))
        elif name[0] in example:
            spec_from_file(spec_file(tmp_path, part))


def test_a_model_that_is_sized_again_is_counted_once_until_one_of_its_files_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = make_checkpoint("llama", tmp_path / "llama")
    loading._counted.cache_clear()  # another test may have counted a model of the same config
    made = []
    real = counting.empty_networks
    monkeypatch.setattr(
        counting, "empty_networks", lambda *args, **more: made.append(1) or real(*args, **more)
    )
    first = size_model(folder, weights="none")
    assert size_model(folder, weights="none", kv_dtype="int8").n_parameters == first.n_parameters
    assert size_model(folder, weights="none") == first
    assert len(made) == 1
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"num_hidden_layers": raw["num_hidden_layers"] - 1}))
    assert size_model(folder, weights="none").params.n_layers == first.params.n_layers - 1
    assert len(made) == 2
