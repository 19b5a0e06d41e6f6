"""Models in GGUF with a vision part beside them, held to the checkpoints that both were made of."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvcellar import make_config, make_seq_session
from kvcellar.backends.native.loading import lack_of
from kvcellar.backends.torch.vision.beside import seen_beside
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.hosting.pictures import HostLooks
from kvcellar.models import load_model
from kvcellar.models.gguf import mmproj
from kvcellar.models.options import LoadOptions
from kvcellar.models.text.prompts import encode, render
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.pictures.tokens import ids_of, pictures_in
from tests.mmproj_files import (
    FILES,
    TEXT_TEMPLATE,
    make_gguf,
    vocabulary_of,
    write_mmproj,
    write_old_vocabulary,
)
from tests.models.picture_players import INTERLEAVED, ONE, TWO, Own, Player, assert_close
from tests.vision_checkpoints import (
    family_of,
    make_picture,
    make_vision_checkpoint,
    make_vision_model,
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("mmproj")

    @functools.cache
    def make(family):
        folder = make_vision_checkpoint(root / family, family)
        model = load_model(make_gguf(root / f"{family}-gguf", family), dtype="float32")
        assert model.pictures is not None, model.no_pictures
        auto: Any = transformers.AutoModelForImageTextToText
        wrapper = auto.from_pretrained(folder, dtype="float32", attn_implementation="eager")
        return Own(model, wrapper.eval(), Processor(folder, wrapper.config)._processor)

    return make


@pytest.fixture
def player(own):
    sessions = []

    def make(family):
        made = own(family)
        session = make_seq_session("torch", make_config(made.model.params, 2048))
        sessions.append(session)
        return Player(made, session.__enter__())

    yield make
    for session in sessions:
        session.__exit__(None, None, None)


@pytest.mark.parametrize("family", FILES)
def test_a_prompt_is_what_the_checkpoints_processor_writes(own, family):
    made = own(family)
    for text, pictures in [("A IMG b", ONE), (INTERLEAVED, TWO), ("IMG", [make_picture(64, 16)])]:
        want = made.inputs(text, pictures)["input_ids"][0]
        assert ids_of(made.history(text, pictures)).tolist() == list(want)


EXACT = [family for family in FILES if family != "qwen3_5_moe"]
"""Families by whose logits the files can be held: float32 rounds too much of the others away."""


@pytest.mark.parametrize("family", EXACT)
def test_pictures_are_read_as_by_the_checkpoint(player, family):
    play = player(family)
    for seq, (text, pictures) in enumerate([("What is in IMG here?", ONE), (INTERLEAVED, TWO)]):
        tokens, want = play.own.history(text, pictures), play.own.logits(text, pictures)
        behind = pictures_in(tokens)[-1].stop
        assert_close(play, play.feed((seq, tokens, behind, pictures))[0], want[:behind])
        for stop in range(behind + 1, len(tokens) + 1):
            assert_close(play, play.feed((seq, tokens, stop, pictures))[0], want[stop - 1 : stop])


@pytest.mark.parametrize("family", [family for family in FILES if family not in EXACT])
def test_every_number_is_the_checkpoints(own, family, tmp_path):
    model = own(family).model
    want = load_model(make_vision_checkpoint(tmp_path, family), dtype="float32")
    tensors = dict(want.network.named_parameters())
    found = dict(model.network.named_parameters())
    assert found.keys() == tensors.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, tensors[name], rtol=1e-6, atol=1e-6)
    assert torch.equal(model.pictures.encode(ONE[0]).rows, want.pictures.encode(ONE[0]).rows)


@pytest.fixture(scope="module")
def old(own, tmp_path_factory):
    """A LLaVA whose vocabulary has no placeholder, and whose template writes text alone."""
    path = make_gguf(tmp_path_factory.mktemp("old"), "llava", vocabulary=write_old_vocabulary)
    model = load_model(path, dtype="float32")
    assert model.pictures is not None, model.no_pictures
    return Own(model, own("llava").wrapper, None)


def shown(*pictures, text):
    """A message of the user, with pictures in place of IMG."""
    parts, content, placed = text.split("IMG"), "", []
    for picture, part in zip((None, *pictures), parts, strict=True):
        placed += [] if picture is None else [{"name": picture.name, "at": len(content)}]
        content += part
    return {"role": "user", "content": content, "pictures": placed}


PICTURES = [("IMGWhat is it?", ONE), ("IMGIMGWhich?", TWO), (INTERLEAVED, TWO)]


@pytest.mark.parametrize("family", FILES)
def test_a_template_of_text_alone_is_given_what_the_processor_reads(own, family, monkeypatch):
    made = own(family)
    known = made.model.tokenizer
    monkeypatch.setattr(known, "chat_template", TEXT_TEMPLATE)
    own_text = family_of(family).written
    for text, pictures in PICTURES:
        shelf = PictureShelf()
        held = [shelf.read(one.data) for one in pictures]
        looks = HostLooks(made.reader, shelf)
        said = [shown(*held, text=text), {"role": "assistant", "content": own_text}]
        tokens = encode(known, render(known, said, looks=looks, is_asking=False))
        written = text.replace("IMG", own_text)
        read = made.processor(
            text=[f"<s>USER: {written}\nASSISTANT: "], images=[one.pixels() for one in held]
        )
        ids = list(ids_of(np.array(tokens)))
        want = [int(one) for one in read["input_ids"][0]]
        assert ids[: len(want)] == want
        spelt = ids[len(want) :]
        assert known.decode(spelt) == f"{own_text}\n"
        assert made.reader.token_id not in spelt


@pytest.mark.parametrize(("text", "pictures"), PICTURES)
def test_a_vocabulary_without_a_placeholder_reads_pictures(old, text, pictures):
    shelf = PictureShelf()
    held = [shelf.read(one.data) for one in pictures]
    looks = HostLooks(old.model.pictures, shelf)
    said = [shown(*held, text=text), {"role": "assistant", "content": "<unk>"}]
    said.append({"role": "user", "content": "<unk> and <image>?"})
    tokens = np.array(encode(old.model.tokenizer, render(old.model.tokenizer, said, looks=looks)))
    ids = ids_of(tokens)
    n_rows = [looks.look(one.name).n_rows for one in held]
    assert [len(one.places) for one in pictures_in(tokens)] == n_rows
    assert [one.name for one in pictures_in(tokens)] == [one.name for one in held]
    assert np.count_nonzero(ids == 0) == sum(n_rows)  # what is said spells none
    written = old.model.tokenizer.decode([int(one) for one in ids[1:]])
    for n in n_rows:
        written = written.replace("<unk>" * n, "IMG", 1)
    assert written == (f"USER: {text}\nASSISTANT: <unk>\nUSER: <unk> and <image>?\nASSISTANT:")
    theirs = old.wrapper.config.image_token_id
    inputs = [old.reader._processor.inputs(one)["pixel_values"] for one in held]
    with torch.inference_mode():
        kept = torch.from_numpy(np.where(ids == 0, theirs, ids))[None]
        found = old.wrapper(input_ids=kept, pixel_values=torch.cat(inputs), use_cache=False)
        want = found.logits[0].numpy()
    with make_seq_session("torch", make_config(old.model.params, 2048)) as session:
        play = Player(old, session)
        assert_close(play, play.feed((0, tokens, len(tokens), held))[0], want)


@pytest.fixture
def gemma(tmp_path):
    """A model, its vision part, and what writes another in its place."""
    path = make_gguf(tmp_path, "gemma3")
    wrapper = make_vision_model("gemma3")
    mmproj = tmp_path / "mmproj-model-F32.gguf"

    def write(name=mmproj.name, **how):
        (tmp_path / name).unlink(missing_ok=True)
        return write_mmproj(tmp_path / name, "gemma3", wrapper, **how)

    return path, mmproj, write


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("v.blk.0.attn_q.weight", "v.blk.0.attn_k.weight"),
        ("v.blk.0.ln1.weight", "v.blk.1.ln1.weight"),
        ("v.blk.0.ffn_up.weight", "v.blk.0.ffn_down.weight"),
    ],
)
def test_two_tensors_that_are_taken_for_each_other_show_in_the_rows(own, gemma, one, other):
    path, _, write = gemma

    def swap(tensors):
        tensors[one], tensors[other] = tensors[other], tensors[one]

    write(change=swap)
    found = load_model(path, dtype="float32").pictures.encode(ONE[0]).rows
    assert (found - own("gemma3").reader.encode(ONE[0]).rows).abs().max() > 1e-3


def test_up_and_down_may_have_each_others_names_as_in_older_files(gemma):
    path, mmproj, _ = gemma
    wrapper = make_vision_model("gemma3", intermediate_size=48)
    mmproj.unlink()
    write_mmproj(mmproj, "gemma3", wrapper)
    want = load_model(path, dtype="float32").pictures.encode(ONE[0]).rows

    def rename(tensors):
        for name in [name for name in tensors if ".ffn_" in name]:
            now = name.replace("up", "DOWN").replace("down", "up").lower()
            tensors[f"new.{now}"] = tensors.pop(name)
        for name in [name for name in tensors if name.startswith("new.")]:
            tensors[name.removeprefix("new.")] = tensors.pop(name)

    mmproj.unlink()
    write_mmproj(mmproj, "gemma3", wrapper, change=rename)
    assert torch.equal(load_model(path, dtype="float32").pictures.encode(ONE[0]).rows, want)


def why_not(path):
    seen, why = seen_beside(path)
    assert (seen is None) == bool(why)
    return why


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"projector": "qwen3a"}, "type 'qwen3a', which is for sounds"),
        ({"projector": "glm4v"}, "type 'glm4v', which is not read here.*are: gemma3, idefics3"),
        ({"projector": "qwen2vl_merger"}, "texts of the architecture qwen2vl, and .* is gemma3"),
        ({"block_count": 10**9}, "1000000000 for clip.vision.block_count"),
        ({"block_count": 3}, "18,688 numbers, and its metadata wants 25,152"),
        ({"attention__head_count": 5}, "5 heads in layers of 32"),
        ({"image_size": 10**7}, "10000000 for clip.vision.image_size"),
        ({"image_size": 36}, "64 positions for pictures of 36 pixels"),
        ({"patch_size": 5}, "patches of 5 pixels"),
        ({"projector__scale_factor": 9}, "one row of 9 patches a side"),
        ({"image_mean": [0.5]}, "for clip.vision.image_mean"),
        ({"image_std": [0.0] * 3}, "for clip.vision.image_std"),
        ({"change": lambda tensors: tensors.pop("mm.soft_emb_norm.weight")}, "has 18,656 numbers"),
        (
            {"change": lambda tensors: tensors.update({"v.more": np.ones(3, np.float32)})},
            "1 tensors that a .* does not know: v.more",
        ),
        (
            {
                "change": lambda tensors: tensors.update(
                    {"mm.input_projection.weight": np.ones((32, 48), np.float32)}
                )
            },
            "makes rows of 48 numbers, and model-F32.gguf reads rows of 64",
        ),
        ({"change": lambda tensors: tensors.clear()}, "has no tensors"),
        (
            {"change": lambda tensors: tensors.pop("v.blk.1.attn_q.weight")},
            r"has no v\.blk\.1\.attn_q\.weight",
        ),
    ],
)
def test_a_vision_part_that_cannot_be_read_is_told_by_what_is_wrong(gemma, how, why):
    path, mmproj, write = gemma
    write(**how)
    assert re.search(why, why_not(path))
    assert str(mmproj) in why_not(path)


def _newline(tensors):
    tensors["model.image_newline"] = np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("family", "how", "why"),
    [
        ("llava", {"feature_layer": [3]}, r"\[3\] for layers that are read, of 2"),
        ("llava", {"feature_layer": [-2]}, r"\[-2\] for layers that are read, of 2"),
        ("llava", {"change": _newline}, "0 grids of tiles that are merged as 'flat', with what"),
        (
            "llava",
            {"change": lambda all: all.pop("mm.0.weight")},
            "'mlp' that is not of two layers",
        ),
        ("llava_next", {"image_grid_pinpoints": None}, "0 grids .* 'spatial_unpad', with what"),
        ("llava_next", {"mm_patch_merge_type": None}, "3 grids .* 'flat', with what"),
        (
            "llava_next",
            {"change": lambda all: all.pop("model.image_newline")},
            "3 grids .* without",
        ),
        ("llava_next", {"image_grid_pinpoints": [16, 32, 16]}, "image_grid_pinpoints"),
        ("llava_next", {"image_grid_pinpoints": [16, 24]}, "16 by 24 pixels of tiles of 16"),
        ("llava_next", {"image_grid_pinpoints": [8192, 8192]}, "8192 by 8192 pixels of tiles"),
        ("granite_vision", {"feature_layer": [3]}, "numbers"),
        ("granite_vision", {"feature_layer": [0, 1, 2]}, "numbers"),
    ],
)
def test_a_llava_that_cannot_be_read_is_told_by_what_is_wrong(tmp_path, family, how, why):
    path = make_gguf(tmp_path, family)
    assert not why_not(path)
    mmproj = tmp_path / "mmproj-model-F32.gguf"
    mmproj.unlink()
    write_mmproj(mmproj, family, make_vision_model(family), **how)
    assert re.search(why, why_not(path)), why_not(path)


def test_a_vocabulary_of_other_kinds_needs_a_placeholder(tmp_path):
    path = make_gguf(tmp_path, "llava", vocabulary=vocabulary_of("gemma3"))
    assert "has no token '<image>', which stands for a picture" in why_not(path)


def test_a_model_whose_vision_part_cannot_be_read_reads_text(gemma):
    path, mmproj, _ = gemma
    mmproj.write_bytes(mmproj.read_bytes()[:20_000])
    model = load_model(path, dtype="float32", backend="torch")
    assert model.pictures is None
    assert "is truncated" in model.no_pictures


def test_metadata_of_any_kind_ends_in_a_reason(gemma):
    path, mmproj, write = gemma
    keys = [
        key.removeprefix("clip.vision.")
        for key in gguf.GGUFReader(mmproj).fields
        if key.startswith("clip.vision.")
    ]
    for key in keys:
        for value in (0, 2**31 - 1, "text", [True, False]):
            write(**{key.replace(".", "__"): value})
            seen_beside(path)


@pytest.mark.parametrize(
    ("part", "model"),
    [
        ("mmproj-gemma-4b-it-F16", "gemma-4b-it-Q4_K_M"),
        ("gemma-4b-it.mmproj-f16", "gemma-4b-it.Q4_K_M"),
        ("gemma-4b-it-mmproj-F16", "gemma-4b-it-UD-Q4_K_XL"),
        ("mmproj-gemma-4b-it-bf16", "gemma-4b-it.i1-IQ4_XS-00001-of-00002"),
    ],
)
def test_of_several_one_is_found_by_the_ways_in_which_files_are_named(part, model):
    there = [Path(f"{name}.gguf") for name in (part, part.replace("4b", "12b"), model)]
    assert mmproj._find(there[-1], there) == there[0]


def test_of_several_the_one_with_the_models_name_is_read(gemma):
    path, mmproj, write = gemma
    other = mmproj.rename(mmproj.with_name("mmproj-F16.gguf"))
    assert not why_not(path)  # the only one, whatever its name
    write("mmproj-another-F16.gguf")
    assert re.search(r"2 vision parts lie beside model-F32.gguf \(mmproj-F16.gguf, ", why_not(path))
    assert "the model's name, mmproj-model.gguf" in why_not(path)
    other.rename(mmproj.with_name("mmproj-model.gguf"))
    assert not why_not(path)
    assert seen_beside(path)[0].file.path.name == "mmproj-model.gguf"


def test_another_vision_part_is_another_fingerprint(gemma):
    path, mmproj, write = gemma
    before = load_model(path, dtype="float32").fingerprint()
    write(
        change=lambda tensors: np.negative(
            tensors["v.patch_embd.bias"], tensors["v.patch_embd.bias"]
        )
    )
    after = load_model(path, dtype="float32").fingerprint()
    assert before.parts["weights"] != after.parts["weights"]
    write(image_mean=[0.25] * 3)
    assert (
        load_model(path, dtype="float32").fingerprint().parts["processor"]
        != after.parts["processor"]
    )
    mmproj.unlink()
    assert "processor" not in load_model(path, dtype="float32").fingerprint().parts


def test_blocks_of_the_text_stay_as_they_are_beside_a_vision_part(gemma, tmp_path):
    path = make_gguf(tmp_path / "blocks", "qwen2_5_vl", gguf.GGMLQuantizationType.Q8_0)
    model = load_model(path)
    assert model.weights == "file"
    assert model.decoder is not None
    assert model.pictures is not None, model.no_pictures


def test_native_leaves_a_model_to_torch_whose_vision_part_can_be_read(tmp_path):
    path = make_gguf(tmp_path, "mistral3", gguf.GGMLQuantizationType.Q8_0)
    mmproj = tmp_path / "mmproj-model-F32.gguf"
    assert "it reads pictures" in lack_of(LoadOptions(path))
    assert "reads text alone" in load_model(path, backend="native").no_pictures
    write_mmproj(mmproj, "mistral3", make_vision_model("mistral3"), projector="glm4v")
    assert "pictures" not in lack_of(LoadOptions(path))
    assert "glm4v" in load_model(path, backend="native").no_pictures
    seeing = make_vision_model("mistral3")
    write_mmproj(mmproj, "mistral3", seeing, change=lambda t: t.pop("v.blk.0.ln1.weight"))
    assert "pictures" not in lack_of(LoadOptions(path)), "a part that lacks something"
    mmproj.unlink()
    assert load_model(path, backend="native").no_pictures == ""
