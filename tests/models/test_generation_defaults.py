"""How a checkpoint wants to be sampled, and what a chat template in place of its own changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcellar.engine import DEFAULTABLE, SamplingParams, encode_chat
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.models.files.generation import sampling_defaults
from kvcellar.models.files.packaged import PACKAGED
from tests.models.fingerprints import differences
from tests.models.tiny_checkpoints import CHAT_TEMPLATE, make_checkpoint


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, {}),
        ({"eos_token_id": [1, 2]}, {}),
        (  # Qwen 2.5
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
            | {"repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        (  # Gemma 3: without a temperature
            {"do_sample": True, "top_k": 64, "top_p": 0.95},
            {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"top_k": -1, "min_p": None}, {"top_k": 0}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
    ],
)
def test_what_the_file_says_is_read_and_nothing_else(tmp_path, said, found):
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == found


@pytest.mark.parametrize(
    "said",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 1.5},
        {"top_k": True},
        {"repetition_penalty": 0},
    ],
)
def test_a_setting_that_cannot_be_one_is_named_with_its_file(tmp_path, said):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=rf"generation_config.json has {next(iter(said))}="):
        sampling_defaults(tmp_path)


def test_what_somebody_asked_for_wins_over_the_models_own():
    model = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    free = SamplingParams(unset=DEFAULTABLE, max_tokens=3, seed=1)
    assert free.for_model(model) == SamplingParams(**model, max_tokens=3, seed=1)
    asked = SamplingParams(temperature=0.0, unset=DEFAULTABLE - {"temperature"})
    assert asked.for_model(model) == SamplingParams(**model | {"temperature": 0.0})
    assert asked.for_model(model).is_greedy
    explicit = SamplingParams()  # of a program: all of it is meant
    assert explicit.for_model(model) is explicit
    assert free.for_model(model).for_model({"top_p": 0.1}) == free.for_model(model)


def test_what_is_usual_holds_where_the_model_says_nothing():
    usual = SamplingParams(temperature=0.7, top_p=0.95, unset=DEFAULTABLE)
    assert usual.for_model({}) == SamplingParams(temperature=0.7, top_p=0.95)
    assert usual.for_model({"top_k": 5}) == SamplingParams(temperature=0.7, top_p=0.95, top_k=5)
    # A model that names a temperature is not cut off by what is usual here.
    assert usual.for_model({"temperature": 1.0}) == SamplingParams(temperature=1.0)


def test_a_model_brings_its_settings_and_all_its_end_tokens(tmp_path):
    folder = make_checkpoint("qwen2", tmp_path)
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [257, 261]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    model = load_model(folder)
    assert model.sampling == {"temperature": 0.6, "top_k": 20}
    assert model.eos_token_ids == {257, 261}


def test_another_chat_template_is_another_fingerprint_and_its_own_is_not(checkpoint):
    def loaded(text: str | None) -> Any:
        return load_model(checkpoint("llama"), chat_template=text)

    own, same = loaded(None), loaded(CHAT_TEMPLATE)
    other = loaded("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert own.fingerprint() == same.fingerprint()
    assert differences(other.fingerprint(), own.fingerprint()) == ["chat_template"]
    said = [{"role": "user", "content": "hi"}]
    assert len(encode_chat(other.tokenizer, said)) == 2 < len(encode_chat(own.tokenizer, said))


def test_a_packaged_model_whose_file_names_nothing_has_settings_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    file = PACKAGED["smollm2"].file
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")  # what it says is not asked
    settings = sampling_defaults(file)
    assert settings == {"temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.5}
