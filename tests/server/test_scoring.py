"""Log probabilities of prompts and answers: those of the model itself, token by token."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from kvcellar.models.files.hub import DEMO_FOLDER

PROMPT = "def add(a, b):\n    return a + b  # é€😀\n"
ECHO = {"prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 0}


@pytest.fixture(scope="module")
def oracle():
    """transformers' own model and tokenizer: each token behind those before it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)

    def score(ids):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double()
        return torch.log_softmax(logits, dim=-1)

    return tokenizer, score


def complete(live, **body):
    return live.post("/v1/completions", {"temperature": 0, **body})


def streamed(live, **body):
    text = live.http.post("/v1/completions", json={"temperature": 0, **body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_an_echo_has_the_log_probabilities_of_transformers(live, oracle):
    tokenizer, score = oracle
    ids = tokenizer.encode(PROMPT)
    wanted = score(ids)
    for _ in range(2):  # cold, and with the prompt in the cache
        answer = complete(live, **ECHO)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert len(found["tokens"]) == len(ids) == answer["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == 0
        for i in range(1, len(ids)):
            assert found["token_logprobs"][i] == pytest.approx(
                wanted[i - 1, ids[i]].item(), abs=1e-4
            )
            top = sorted(found["top_logprobs"][i].values(), reverse=True)
            best = wanted[i - 1].topk(3).values.tolist()
            assert top[:3] == pytest.approx(best, abs=1e-4)
            assert 3 <= len(top) <= 4 and found["token_logprobs"][i] in top


def test_the_offsets_are_those_of_the_text(live):
    (choice,) = complete(live, **{**ECHO, "max_tokens": 6, "ignore_eos": True})["choices"]
    found, text = choice["logprobs"], choice["text"]
    ends = [*found["text_offset"][1:], len(text)]
    assert found["text_offset"][0] == 0
    for name, start, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
        assert name.startswith("bytes:") or text[start:end].endswith(name)
    parts = [name for name in found["tokens"] if name.startswith("bytes:")]
    assert all(part.count("\\x") >= 1 for part in parts)


def test_prompt_and_answer_are_one_row_of_log_probabilities(live, oracle):
    tokenizer, score = oracle
    body = {**ECHO, "max_tokens": 5, "ignore_eos": True}
    (choice,) = complete(live, **body)["choices"]
    ids = tokenizer.encode(choice["text"])
    n = len(tokenizer.encode(PROMPT))
    assert len(choice["logprobs"]["tokens"]) == n + 5 and choice["text"].startswith(PROMPT)
    if len(ids) == n + 5:  # the text is encoded as it was sampled
        wanted = [score(ids)[i - 1, ids[i]].item() for i in range(1, n + 5)]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    (alone,) = complete(live, **{**body, "echo": False})["choices"]
    assert alone["logprobs"]["token_logprobs"] == pytest.approx(
        choice["logprobs"]["token_logprobs"][n:], abs=1e-4
    )


@pytest.mark.parametrize("n_tokens", [0, 4])
def test_a_stream_has_the_same_pieces(live, n_tokens):
    body = {**ECHO, "max_tokens": n_tokens, "ignore_eos": True}
    (choice,) = complete(live, **body)["choices"]
    chunks = streamed(live, **body)
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        rows = [one for c in chunks if c["logprobs"] for one in c["logprobs"][name]]
        if name in ("tokens", "text_offset"):
            assert rows == choice["logprobs"][name]
        assert len(rows) == len(choice["logprobs"][name])
    assert chunks[-1]["finish_reason"] == "length"


def test_several_prompts_are_scored_each_also_as_tokens(live, oracle):
    tokenizer, score = oracle
    texts = ["import os", "class A:", "x = 1"]
    prompts = [tokenizer.encode(text) for text in texts]
    for given in (texts, prompts):
        answer = complete(live, **{**ECHO, "prompt": given, "n": 2})
        assert [c["index"] for c in answer["choices"]] == list(range(6))
        for i, choice in enumerate(answer["choices"]):
            ids = prompts[i // 2]
            assert choice["text"] == texts[i // 2]
            wanted = [score(ids)[j - 1, ids[j]].item() for j in range(1, len(ids))]
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)


def test_an_evaluation_harness_ranks_choices_as_the_model_does(live, oracle):
    """What lm-evaluation-harness asks, and how it reads the answer."""
    tokenizer, score = oracle
    context = tokenizer.encode("def double(x):\n    return x")
    choices = [tokenizer.encode(text) for text in (" * 2", " banana", " + 1")]
    found, wanted, greedy = [], [], []
    for choice in choices:
        ids = [*context, *choice]
        more = {"max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
        read = complete(live, prompt=[ids], **more)["choices"][0]["logprobs"]
        scored = read["token_logprobs"][len(context) : -1]
        tops = read["top_logprobs"][len(context) : -1]
        found.append(sum(scored))
        greedy.append(all(s == max(top.values()) for s, top in zip(scored, tops, strict=True)))
        table = score(ids)
        wanted.append(sum(table[j - 1, ids[j]].item() for j in range(len(context), len(ids))))
    assert found == pytest.approx(wanted, abs=1e-3) and len(set(found)) == 3
    assert greedy.count(True) <= 1


def test_without_a_token_to_sample_the_prompt_is_read_and_kept(live):
    prompt = "import itertools\n" * 12
    first = complete(live, prompt=prompt, max_tokens=0)
    (choice,) = first["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    again = complete(live, prompt=prompt, max_tokens=0)["usage"]
    n = again["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] == n - 1
    (chunk,) = streamed(live, prompt=prompt, max_tokens=0, echo=True)
    assert (chunk["text"], chunk["finish_reason"]) == (prompt, "length")
    live.until(live.is_still, "the end")


def test_an_agent_answers_and_its_prompt_is_not_scored(live):
    agent = live.post("/v1/agents", {})["id"]
    for more in ({"max_tokens": 0}, {"echo": True, "logprobs": 1}):
        body = {"prompt": "x", "agent_id": agent, **more}
        response = live.http.post("/v1/completions", json=body)
        assert response.status_code == 400 and "agent" in response.json()["error"]["message"]


def test_a_token_that_the_model_does_not_have_is_refused(live):
    for ids in ([2**70], [-1], [10**6]):
        for echo in (True, False):
            response = live.http.post("/v1/completions", json={"prompt": ids, "echo": echo})
            assert response.status_code == 400, response.text


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_an_answer_joined_are_its_text(live, stream, tools):
    host = live.host()
    wanted = "é€😀 漢"
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"const": wanted}},
        },
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 60,
        "temperature": 0,
    }
    if tools:
        function = {"name": "f", "parameters": {"type": "object"}}
        body["tools"] = [{"type": "function", "function": function}]
        body["logit_bias"] = {str(host.tokenizer.encode("<")[0]): -100}
    if stream:
        text = live.http.post("/v1/chat/completions", json={**body, "stream": True}).text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line)["choices"][0] for line in lines]
        content = [one for c in chunks if c.get("logprobs") for one in c["logprobs"]["content"]]
        said = "".join(c["delta"].get("content") or "" for c in chunks)
    else:
        (choice,) = live.post("/v1/chat/completions", body)["choices"]
        content, said = choice["logprobs"]["content"], choice["message"]["content"]
    assert said == json.dumps(wanted, ensure_ascii=False)
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == said
    assert any(len(token["bytes"]) == 1 and token["bytes"][0] > 127 for token in content)
    assert all("bytes" in other for token in content for other in token["top_logprobs"])


def test_prompt_logprobs_are_those_of_transformers_with_or_without_an_echo(live, oracle):
    tokenizer, score = oracle
    ids = tokenizer.encode(PROMPT)
    wanted = score(ids)
    body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2}
    for more in ({}, {"echo": True, "logprobs": 5}):
        (choice,) = complete(live, **body, **more)["choices"]
        found = choice["prompt_logprobs"]
        assert len(found) == len(ids) and found[0] is None
        assert choice["text"].startswith(PROMPT) == bool(more)
        for i in range(1, len(ids)):
            own = found[i][str(ids[i])]
            assert own["logprob"] == pytest.approx(wanted[i - 1, ids[i]].item(), abs=1e-4)
            best = [str(one) for one in wanted[i - 1].topk(2).indices.tolist()]
            assert set(found[i]) == {*best, str(ids[i])}
            assert [found[i][one]["rank"] for one in best] == [1, 2]
    (plain,) = complete(live, **{**body, "prompt_logprobs": None})["choices"]
    assert "prompt_logprobs" not in plain


def test_the_prompt_of_a_chat_is_scored_as_its_template_writes_it(live, oracle):
    _, score = oracle
    messages = [{"role": "user", "content": "hello"}]
    ids = live.post("/tokenize", {"messages": messages})["tokens"]
    wanted = score(ids)
    body = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 0}
    found = live.post("/v1/chat/completions", body)["prompt_logprobs"]
    assert found[0] is None and [list(one) for one in found[1:]] == [[str(i)] for i in ids[1:]]
    for i in range(1, len(ids)):
        one = found[i][str(ids[i])]
        assert one["logprob"] == pytest.approx(wanted[i - 1, ids[i]].item(), abs=1e-4)


@pytest.mark.parametrize("more", [{"stream": True}, {"agent_id": "poet"}])
def test_prompt_logprobs_where_they_cannot_be_are_refused(live, more):
    for path, said in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = live.http.post(path, json={**said, "prompt_logprobs": 1, **more})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"
