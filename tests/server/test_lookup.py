"""What clients of llama.cpp and vLLM look up: tokens, the server's properties, and fillings."""

from __future__ import annotations

import json

import anthropic
import pytest
import transformers

from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.text import infill

TEXT = "def add(a, b):  # é😀<|end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)


@pytest.fixture
def live(live):
    live.post("/v1/completions", {"prompt": "x", "max_tokens": 0})  # the model is in memory
    return live


def test_a_text_has_the_tokens_of_the_models_tokenizer_and_they_its_text(live, tokenizer):
    ids = tokenizer.encode(TEXT)
    as_llama = live.post("/tokenize", {"content": TEXT, "with_pieces": True})
    assert [one["id"] for one in as_llama["tokens"]] == ids
    parts = [one["piece"] for one in as_llama["tokens"]]
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in parts)
    assert joined.decode() == TEXT
    as_vllm = live.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert as_vllm["tokens"] == ids and as_vllm["count"] == len(as_vllm["token_strs"]) == len(ids)
    back = live.post("/detokenize", {"tokens": ids})
    assert back == {"content": TEXT, "prompt": TEXT}


def test_a_text_may_be_kept_from_spelling_special_tokens(live, tokenizer):
    ids = live.post("/tokenize", {"content": TEXT, "parse_special": False})["tokens"]
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in ids
    assert live.post("/detokenize", {"tokens": ids})["content"] == TEXT


def test_a_conversation_has_the_tokens_that_its_answer_is_billed(live):
    messages = [{"role": "user", "content": "hello"}]
    found = live.post("/tokenize", {"messages": messages})
    body = {"messages": messages, "max_tokens": 1}
    usage = live.post("/v1/chat/completions", body)["usage"]
    assert found["count"] == usage["prompt_tokens"]
    assert "hello" in live.post("/detokenize", {"tokens": found["tokens"]})["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": "a", "prompt": "b"}),
        ("/tokenize", {"prompt": "b", "continue_final_message": True}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/slots/0?action=save", {"filename": "x"}),
        ("/props", {}),
        ("/v1/batches", {}),
    ],
)
def test_what_cannot_be_is_refused(live, path, body):
    assert live.http.post(path, json=body).status_code == 400


def test_batches_are_refused_in_anthropics_words(live):
    client = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    with client:
        for ask in (
            lambda: client.messages.batches.create(requests=[]),
            lambda: client.messages.batches.retrieve("msgbatch_1"),
        ):
            with pytest.raises(anthropic.BadRequestError, match="batches is not served"):
                ask()


def test_properties_are_those_of_the_model(live, tokenizer):
    (model,) = live.get("/v1/models")["data"]
    props = live.get("/props")
    assert props["default_generation_settings"]["n_ctx"] == model["context_length"]
    assert props["chat_template"] == tokenizer.chat_template
    assert props["eos_token"] == tokenizer.eos_token and props["model_alias"] == model["id"]
    assert len(live.get("/slots")) == props["total_slots"]


def test_a_slot_tells_how_far_its_answer_is(live):
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy = [slot for slot in live.get("/slots") if slot["is_processing"]]
        assert len(busy) == 1 and busy[0]["n_prompt_tokens"] >= 1
        assert busy[0]["next_token"]["n_decoded"] >= 1


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/slots", "/api/tags", "/api/version"])
def test_head_is_answered_wherever_get_is(live, path):
    assert live.http.head(path).status_code == 200


# Fillings -------------------------------------------------------------------------------------

GAP = {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n\nprint(add(1, 2))\n"}


def test_a_model_without_the_tokens_says_so(live):
    for path, body, field in (
        ("/infill", GAP, "infill"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ):
        response = live.http.post(path, json=body)
        assert response.status_code == 400
        assert f"{field} is not honoured" in response.json()["error"]["message"]
    body = {"model": "demo", "prompt": "a", "suffix": "b"}
    refused = live.http.post("/api/generate", json=body)
    assert refused.status_code == 400 and "suffix is not honoured" in refused.json()["error"]


@pytest.fixture
def filling(live, tokenizer, monkeypatch):
    """Has the model of the server take other tokens of its own for marks."""
    words = infill.FillWords("<|user|>", "<|system|>", "<|tool|>", ("<|end|>",))
    monkeypatch.setattr(infill, "FAMILIES", (words,))
    return live


def test_a_filling_is_the_same_by_every_protocol_streamed_and_not(filling, tokenizer):
    fill = infill.fill_tokens(tokenizer)
    before, behind = GAP["input_prefix"], GAP["input_suffix"]
    ids = infill.fill_prompt(tokenizer, fill, before, behind)
    rest = {"max_tokens": 12, "temperature": 0, "stop_token_ids": list(fill.ends)}
    (want,) = filling.post("/v1/completions", {"prompt": ids, **rest})["choices"]
    asked = {**GAP, "n_predict": 12, "temperature": 0}
    whole = filling.post("/infill", asked)
    assert whole["content"] == want["text"] != "" and whole["tokens_evaluated"] == len(ids)
    text = filling.http.post("/infill", json={**asked, "stream": True}).text
    lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(line["content"] for line in lines) == want["text"]
    assert [line["stop"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["stop_type"] == whole["stop_type"]
    body = {"prompt": before, "suffix": behind, "max_tokens": 12, "temperature": 0}
    assert filling.post("/v1/completions", body)["choices"][0]["text"] == want["text"]
    options = {"num_predict": 12, "temperature": 0}
    body = {"model": "demo", "prompt": before, "suffix": behind, "options": options}
    said = filling.post("/api/generate", {**body, "stream": False})
    assert said["response"] == want["text"] and said["prompt_eval_count"] == len(ids)
    text = filling.http.post("/api/generate", json=body).text
    pieces = [json.loads(line) for line in text.splitlines()]
    assert "".join(one["response"] for one in pieces) == want["text"] and pieces[-1]["done"]
    assert "insert" in filling.post("/api/show", {"model": "demo"})["capabilities"]


def test_samplers_that_are_not_done_are_named(filling):
    body = {**GAP, "n_predict": 1, "samplers": ["top_k", "infill"], "t_max_predict_ms": 500}
    response = filling.http.post("/infill", json=body)
    assert response.headers["x-kvcellar-ignored"] == "t_max_predict_ms, samplers.infill"


def test_a_raw_prompt_goes_through_no_template(live):
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "demo", "prompt": "def add(", "raw": True, "stream": False}
    said = live.post("/api/generate", {**body, "options": options})
    body = {"prompt": "def add(", "max_tokens": 6, "temperature": 0}
    assert said["response"] == live.post("/v1/completions", body)["choices"][0]["text"]
