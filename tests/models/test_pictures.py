"""Models that read pictures: prompts as the processor writes them, logits as the wrapper's own."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvcellar import make_config, make_seq_session
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.errors import ModelError, PictureError, StepError
from kvcellar.models import load_model
from kvcellar.models.seeing import SeenPicture, seeing
from kvcellar.pictures.tokens import ids_of, pictures_in
from tests.models.picture_players import INTERLEAVED, ONE, TWO, Own, Player, assert_close
from tests.models.tiny_checkpoints import rewrite
from tests.vision_checkpoints import (
    FAMILIES,
    make_picture,
    make_vision_checkpoint,
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")

    @functools.cache
    def make(family):
        folder = make_vision_checkpoint(root / family, family)
        model = load_model(folder)
        assert model.pictures is not None, model.no_pictures
        auto: Any = transformers.AutoModelForImageTextToText
        wrapper = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_the_processor_writes(own, family):
    made = own(family)
    for text, pictures in [
        ("A IMG b", ONE),
        (INTERLEAVED, TWO),
        ("IMG\nIMG\n\nIMG", [*ONE, *ONE, make_picture(64, 16)]),
        ("no picture", []),
    ]:
        want = made.inputs(text, pictures)["input_ids"][0]
        assert ids_of(made.history(text, pictures)).tolist() == list(want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_writes_what_is_replaced(own, family):
    made = own(family)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    said = made.model.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False
    )
    assert said.count(made.reader.written) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_one_picture_is_read_as_by_the_wrapper(player, family):
    play = player(family)
    text = "What is in IMG here?"
    tokens = play.own.history(text, ONE)
    want = play.own.logits(text, ONE)
    behind = pictures_in(tokens)[0].stop
    assert_close(play, play.feed((0, tokens, behind + 2, ONE))[0], want[: behind + 2])
    for stop in range(behind + 3, len(tokens) + 1):
        assert_close(play, play.feed((0, tokens, stop, ONE))[0], want[stop - 1 : stop])


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_go_through_the_cache_in_every_way(player, family):
    play = player(family)
    tokens, want = play.own.history(INTERLEAVED, TWO), play.own.logits(INTERLEAVED, TWO)
    first, second = pictures_in(tokens)
    n = len(tokens)
    inside = [] if play.own.reader.is_whole else [first.start + 2, first.stop - 1, second.stop - 2]
    for stop in sorted([3, *inside, second.start, second.stop, second.stop + 1, n - 3]):
        at = play.at.get(0, 0)
        assert_close(play, play.feed((0, tokens, stop, TWO))[0], want[at:stop])
    play.cache.seq_cp(0, 1)  # a fork
    play.at[1] = play.at[0]
    for seq in (0, 1):
        assert_close(play, play.feed((seq, tokens, n, TWO))[0], want[n - 3 :])
    for length in (second.stop + 1, first.stop - 1, first.start):
        play.cut(0, tokens, length)
        at = play.at[0]
        assert_close(play, play.feed((0, tokens, n, TWO))[0], want[at:])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_pictures_are_one_batch(player, family):
    play = player(family)
    said = [(INTERLEAVED, TWO), ("nothing to see here", []), ("IMG is the first", ONE)]
    tokens = [play.own.history(*one) for one in said]
    want = [play.own.logits(*one) for one in said]
    batch = [(i, tokens[i], len(tokens[i]) - 4, said[i][1]) for i in range(3)]
    for found, one, (_, _, stop, _) in zip(play.feed(*batch), want, batch, strict=True):
        assert_close(play, found, one[:stop])
    for step in range(1, 5):
        now = [(seq, told, stop + step, pictures) for seq, told, stop, pictures in batch]
        for found, one, (_, _, stop, _) in zip(play.feed(*now), want, now, strict=True):
            assert_close(play, found, one[stop - 1 : stop])


def test_a_picture_that_nobody_has_encoded_is_no_text(player):
    play = player("qwen2_5_vl")
    tokens = play.own.history("A IMG b", ONE)
    (placed,) = pictures_in(tokens)
    play.cache.begin_step([(0, len(tokens))])
    with (
        seeing(play.runner, [([SeenPicture(placed, None)], len(tokens))]),
        pytest.raises(StepError, match="nobody has encoded"),
    ):
        play.runner.forward(ids_of(tokens), range(len(tokens)))


def test_a_picture_that_the_processor_does_not_take_is_refused(own):
    with pytest.raises(PictureError, match="cannot read a picture of 500 by 2 pixels"):
        own("qwen2_5_vl").reader.look(make_picture(500, 2))


def test_the_vision_part_is_read_with_the_first_picture(own, tmp_path):
    reader = load_model(make_vision_checkpoint(tmp_path)).pictures
    vision = own("qwen2_5_vl").wrapper.model.visual
    assert reader._part is None
    assert reader.size_bytes == sum(one.numel() for one in vision.parameters()) * 4
    reader.encode(ONE[0])
    assert sum(one.numel() for one in reader._part.parameters()) * 4 == reader.size_bytes


def test_a_model_without_its_processor_reads_text(own, tmp_path):
    folder = make_vision_checkpoint(tmp_path)
    before = load_model(folder)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    model = load_model(folder)
    assert model.pictures is None
    assert "no preprocessor_config.json" in model.no_pictures
    parts = dict(before.fingerprint().parts)
    assert parts.pop("processor")
    assert model.fingerprint().parts == parts


def test_other_settings_of_the_processor_are_another_fingerprint(tmp_path):
    folder = make_vision_checkpoint(tmp_path)
    before = load_model(folder).fingerprint()
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_pixels": 2048}))
    assert load_model(folder).fingerprint() != before


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_text_behind_a_picture_is_one_call_of_the_kernel(family, tmp_path, monkeypatch):
    model = load_model(make_vision_checkpoint(tmp_path, family), weights="int8")
    assert model.decoder is not None
    made = Own(model, None, None)
    tokens = made.history("What is in IMG here?", ONE)
    behind = pictures_in(tokens)[0].stop
    calls = []
    whole = type(model.decoder).forward

    def forward(self, *given):
        result = whole(self, *given)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(type(model.decoder), "forward", forward)
    found = []
    for has_decoder in (True, False):
        with make_seq_session("torch", make_config(model.params, 512)) as session:
            play = Player(made, session)
            if not has_decoder:
                play.runner._decoder = None
            parts = [play.feed((0, tokens, behind, ONE))]
            assert calls == [True] * (0 if has_decoder else len(tokens) - behind)
            parts += [
                play.feed((0, tokens, stop, ONE)) for stop in range(behind + 1, len(tokens) + 1)
            ]
            found.append(np.concatenate([one for part in parts for one in part]))
    assert calls == [True] * (len(tokens) - behind)
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_rows_are_of_the_models_type(tmp_path):
    model = load_model(make_vision_checkpoint(tmp_path, "llava"), dtype="bfloat16", weights="none")
    rows, deep, n_bytes, _ = model.pictures.encode(ONE[0])
    assert rows.dtype == torch.bfloat16
    assert (n_bytes, deep) == (rows.numel() * 2, ())
    assert model.pictures.size_bytes < model.size_bytes


def test_a_torn_vision_part_is_refused_when_a_picture_comes(tmp_path):
    folder = make_vision_checkpoint(tmp_path, "llava")
    rewrite(folder / "model.safetensors", lambda tensors: tensors.pop(_first_of_vision(tensors)))
    model = load_model(folder)
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        model.pictures.encode(ONE[0])


def _first_of_vision(tensors):
    return min(name for name in tensors if "projector" in name)


def test_a_part_of_a_picture_that_must_be_whole_is_refused(player):
    play = player("gemma3")
    tokens = play.own.history("A IMG b", ONE)
    (placed,) = pictures_in(tokens)
    with pytest.raises(StepError, match="all of a picture at once"):
        play.feed((0, tokens, placed.stop - 2, ONE))
    assert not play.cache.is_step_open


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="it is installed here")
def test_a_processor_that_transformers_has_with_torchvision_alone_says_so(tmp_path):
    folder = make_vision_checkpoint(tmp_path, "llava")
    path = folder / "preprocessor_config.json"
    said = {**json.loads(path.read_text()), "image_processor_type": "Cohere2VisionImageProcessor"}
    path.write_text(json.dumps(said))
    model = load_model(folder)
    assert model.pictures is None
    assert "pip install torchvision" in model.no_pictures
