"""Models in GGUF with a vision part beside them, held to the checkpoints that both were made of."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import transformers

from kvcellar import make_config, make_seq_session
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.models import load_model
from kvcellar.pictures.tokens import ids_of, pictures_in
from tests.mmproj_files import FILES, make_gguf
from tests.models.picture_players import INTERLEAVED, ONE, TWO, Own, Player, assert_close
from tests.vision_checkpoints import make_picture, make_vision_checkpoint


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


@pytest.mark.parametrize("family", FILES)
def test_pictures_are_read_as_by_the_checkpoint(player, family):
    play = player(family)
    for seq, (text, pictures) in enumerate([("What is in IMG here?", ONE), (INTERLEAVED, TWO)]):
        tokens, want = play.own.history(text, pictures), play.own.logits(text, pictures)
        behind = pictures_in(tokens)[-1].stop
        assert_close(play, play.feed((seq, tokens, behind, pictures))[0], want[:behind])
        for stop in range(behind + 1, len(tokens) + 1):
            assert_close(play, play.feed((seq, tokens, stop, pictures))[0], want[stop - 1 : stop])
