"""What a model thinks, apart from what it says: asked for, told, sent back, signed and bounded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from kvcellar.dialects import ReasoningMarks
from kvcellar.grammar.thought_budget import ThoughtBound, ThoughtBudget
from kvcellar.server.state.signing import signer_of
from kvcellar.store import Store
from kvcellar.store.shared.tier import SharedTier
from tests.engine.fakes import STATE_PARAMS
from tests.server.live import Live, serving
from tests.server.scripted import QWEN, chat_tokenizer, scripted_host

THOUGHT = "<think>\nThe user wants a greeting.\n</think>\n\n"
USER = {"role": "user", "content": "Hello?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A server of a model that thinks before each answer."""
    folder = tmp_path_factory.mktemp("thinker")
    with serving(
        folder, load=lambda *_: scripted_host(lambda n: f"{THOUGHT}Good day {n}.")
    ) as live:
        yield live


def chat(live: Live, *messages: Any, **more: Any) -> Any:
    return live.post("/v1/chat/completions", {"messages": list(messages) or [USER], **more})


def message_of(answer: Any) -> Any:
    return answer["choices"][0]["message"]


def events(live: Live, path: str, body: Any) -> list[Any]:
    with live.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = list(response.iter_lines())
    found = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line) for line in found]


def test_chat_tells_reasoning_apart_streamed_and_not(thinker):
    answer = chat(thinker)
    said = message_of(answer)
    assert said["reasoning_content"] == "The user wants a greeting."
    assert said["content"] == "Good day 0."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(thinker, "/v1/chat/completions", {"messages": [USER]})
    ]
    assert said["reasoning"] == said["reasoning_content"]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == said[name]


def test_log_probabilities_come_also_where_a_mark_is_a_token(thinker):
    wanted = {"logprobs": True, "top_logprobs": 1}
    tokens = chat(thinker, **wanted)["choices"][0]["logprobs"]["content"]
    said = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    assert said.removesuffix("<|im_end|>") == f"{THOUGHT}Good day 0."
    chunks = events(thinker, "/v1/chat/completions", {"messages": [USER], **wanted})
    told = [chunk["choices"][0].get("logprobs") for chunk in chunks]
    assert [token for one in told if one for token in one["content"]] == tokens


@pytest.mark.parametrize(
    "sent",
    [
        {"content": "Yes.", "reasoning_content": "Hm."},
        {"content": "Yes.", "reasoning": "Hm."},
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                {"type": "text", "text": "Yes."},
            ]
        },
    ],
)
def test_reasoning_that_comes_back_reaches_the_template_however_a_client_has_it(thinker, sent):
    keeps = {"chat_template_kwargs": {"preserve_thinking": True}}
    said = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    want = chat(thinker, USER, said, USER, **keeps)["usage"]["prompt_tokens"]
    answer = chat(thinker, USER, {"role": "assistant", **sent}, USER, **keeps)
    assert answer["usage"]["prompt_tokens"] == want


@pytest.mark.parametrize("hidden", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_chat_leaves_reasoning_out_where_a_client_does_not_want_it(thinker, hidden):
    assert "reasoning_content" not in message_of(chat(thinker, **hidden))
    chunks = events(thinker, "/v1/chat/completions", {"messages": [USER], **hidden})
    assert all("reasoning_content" not in one["choices"][0]["delta"] for one in chunks)


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
    ],
)
def test_thinking_that_is_switched_off_is_off_in_the_template(thinker, off):
    plain = chat(thinker)["usage"]["prompt_tokens"]
    assert chat(thinker, **off)["usage"]["prompt_tokens"] > plain  # an empty thought


def test_what_a_template_does_not_take_is_refused_by_name_and_a_contradiction_is(thinker):
    def refused(**more: Any) -> Any:
        body = {"messages": [USER], **more}
        response = thinker.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        return response.json()["error"]

    error = refused(chat_template_kwargs={"think_harder": True})
    assert "'think_harder'; it takes enable_thinking, preserve_thinking" in error["message"]
    assert error["param"] == "chat_template_kwargs"
    error = refused(reasoning_effort="low", reasoning={"effort": "high"})
    assert "reasoning_effort is low and reasoning.effort" in error["message"]


def test_what_cannot_be_had_of_a_wish_is_noted(thinker):
    for effort, n_notes in (("high", 1), ("medium", 0)):
        notes = chat(thinker, reasoning_effort=effort)["kvcellar"]["notes"]
        assert len([note for note in notes if "no degrees" in note]) == n_notes


def test_a_thought_ends_after_its_budget_and_the_answer_follows(thinker):
    for budget, said in ((3, "The user"), (0, "")):
        for field in ("thinking_budget", "thinking_token_budget"):
            answer = chat(thinker, **{field: budget})
            message = message_of(answer)
            assert message["content"] == "Good day 0."
            assert (message.get("reasoning_content") or "").startswith(said)
            assert len(message.get("reasoning_content") or "") < 12
    assert message_of(chat(thinker, thinking_budget=500)) == message_of(chat(thinker))


def test_a_budget_holds_together_with_tools_and_ends_no_text_that_speaks_of_thoughts(tmp_path):
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "<think> a b c d"}}\n</tool_call>'
    texts = [f"{THOUGHT}{call}", "In HTML <think> is no tag of any kind at all."]
    with serving(
        tmp_path, load=lambda *_: scripted_host(texts.__getitem__, has_tags=False)
    ) as live:
        answer = chat(live, tools=[TOOL], thinking_budget=2)
        (made,) = message_of(answer)["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"path": "<think> a b c d"}
        history = [USER, message_of(answer), {"role": "tool", "content": "x", "tool_call_id": ""}]
        answer = chat(live, *history, thinking_budget=2)
        assert message_of(answer)["content"] == texts[1]


def test_a_budget_holds_with_tools_whose_marks_are_tokens(tmp_path):
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    with serving(tmp_path, load=lambda *_: scripted_host(lambda _: THOUGHT + call)) as live:
        for choice in ("auto", "required"):
            said = message_of(chat(live, tools=[TOOL], tool_choice=choice, thinking_budget=2))
            (made,) = said["tool_calls"]
            assert json.loads(made["function"]["arguments"]) == {"path": "a"}
            assert len(said["reasoning_content"]) < 12


def test_a_thought_that_the_prompt_opens_comes_before_a_form_and_within_its_budget(tmp_path):
    schema: Any = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}

    def load(*_: Any) -> Any:
        template = f"{QWEN.removesuffix('{% endif %}')}{{{{ '<think>\\n' }}}}{{% endif %}}"
        return scripted_host(lambda _: '<think>\nA JSON.\n</think>{"a": 1}', template=template)

    with serving(tmp_path, load=load) as live:
        said = message_of(chat(live, response_format=wanted))
        assert said["reasoning_content"] == "A JSON." and json.loads(said["content"])["a"] == 1
        said = message_of(chat(live, response_format=wanted, thinking_budget=2))
        assert len(said["reasoning_content"]) < 10 and json.loads(said["content"])["a"] == 1
        said = message_of(chat(live, response_format=wanted, thinking_budget=0))
        assert json.loads(said["content"])["a"] == 1 and "reasoning_content" not in said


def test_a_thought_before_a_call_is_no_text_where_the_answer_may_be_a_form_too(tmp_path):
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    wanted = {"type": "json_object"}
    with serving(tmp_path, load=lambda *_: scripted_host(lambda _: THOUGHT + call)) as live:
        for choice in ("auto", "required"):
            said = message_of(chat(live, tools=[TOOL], tool_choice=choice, response_format=wanted))
            assert said["reasoning_content"] == "The user wants a greeting."
            assert not said["content"] and len(said["tool_calls"]) == 1
        bounded = {"tools": [TOOL], "response_format": wanted, "thinking_budget": 2}
        said = message_of(chat(live, **bounded))
        assert len(said["reasoning_content"]) < 12 and len(said["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("marks", "template", "end"),
    [
        (ReasoningMarks(), "...\n</think>", "\n</think>"),
        (ReasoningMarks(), "{{ 'x\\n</think>' }}", "\n</think>"),
        (ReasoningMarks("[THINK]", "[/THINK]"), "[/THINK]", "[/THINK]"),
        (ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>"), "<|end|>", "<|end|>"),
    ],
)
def test_the_end_of_a_thought_is_forced_token_by_token_as_the_template_writes_it(
    marks, template, end
):
    tokenizer = chat_tokenizer(template)
    engine = SimpleNamespace(runner=SimpleNamespace(vocab_size=len(tokenizer)))
    host: Any = SimpleNamespace(tokenizer=tokenizer, eos_token_ids={3}, engine=engine)
    guide: Any = ThoughtBudget(ThoughtBound.of(4, marks, host), None, False)
    for token in tokenizer.encode(f" {marks.begin}"):
        assert guide.allowed().all() and not guide.is_in_thought
        guide.accept(token)
    for _ in range(4):
        assert guide.allowed().all() and guide.is_in_thought
        guide.accept(tokenizer.encode("z")[0])
    forced = []
    while not guide.allowed().all():
        guide = guide.fork()
        (token,) = guide.allowed().nonzero()[0]
        forced.append(int(token))
        guide.accept(int(token))
    assert tokenizer.decode(forced) == end
    for token in tokenizer.encode(f"and {marks.begin} is text of many tokens"):
        assert guide.allowed().all()
        guide.accept(token)


def test_whoever_looks_on_reads_thoughts_apart_from_the_text(thinker):
    thinker.post("/v1/agents", {"id": "watched"})
    with thinker.http.stream("GET", "/v1/agents/watched/live") as response:
        lines = response.iter_lines()
        live_text = thinker.service.agents.live
        thinker.until(lambda: "watched" in live_text._listeners, "a listener")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(chat, thinker, agent_id="watched")
            told = [
                json.loads(one[6:])
                for one in takewhile(lambda one: one != "event: end", lines)
                if one.startswith("data: ")
            ]
            asked.result()
    assert "".join(one["text"] for one in told) == "Good day 0."
    thought = "".join(one.get("reasoning_content", "") for one in told)
    assert thought == "The user wants a greeting."


def test_an_agent_keeps_what_its_template_was_given(thinker):
    head = {"X-Agent-Id": "keeper", "X-Agent-Create": "true"}
    body: dict[str, Any] = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    first = thinker.post("/v1/chat/completions", body, headers=head)
    body = {"messages": [{"role": "user", "content": "And?"}]}
    second = thinker.post("/v1/chat/completions", body, headers=head)
    (agent,) = [a for a in thinker.service.agents.directory.agents() if a.agent_id == "keeper"]
    assert agent.template_kwargs == {"enable_thinking": False}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    text = thinker.host().tokenizer.decode(agent.tokens[:].tolist())
    assert text.count("<think>\n\n</think>") >= 1, first
    thinker.post("/v1/agents/keeper/generate", {"text": "So?", "max_tokens": 4})
    assert agent.template_kwargs == {"enable_thinking": False}
    now = {"chat_template_kwargs": {"enable_thinking": True}}
    thinker.post("/v1/agents/keeper/generate", {"text": "So?", "max_tokens": 4, **now})
    assert agent.template_kwargs == {"enable_thinking": True}
    for wrong in ({"text": "So?", "chat_template_kwargs": {"x": 1}}, {"tokens": [1], **now}):
        response = thinker.http.post("/v1/agents/keeper/generate", json=wrong)
        assert response.status_code == 400


# Anthropic's -------------------------------------------------------------------------------------


def ask_claude(live: Live, *messages: Any, **more: Any) -> Any:
    return live.post(
        "/v1/messages", {"messages": list(messages) or [USER], "max_tokens": 400, **more}
    )


def test_blocks_of_thinking_are_signed_and_come_back_into_the_template(thinker):
    answer = ask_claude(thinker)
    thought, text = answer["content"]
    assert thought["thinking"] == "The user wants a greeting." and text["text"] == "Good day 0."
    assert thinker.service.signer.has_signed(thought["thinking"], thought["signature"])
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 100}
    said = events(thinker, "/v1/messages", body)
    deltas = [event["delta"] for event in said if event["type"] == "content_block_delta"]
    assert {"type": "signature_delta", "signature": thought["signature"]} in deltas
    assert "".join(d.get("thinking", "") for d in deltas) == thought["thinking"]
    starts = [e["content_block"]["type"] for e in said if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


@pytest.mark.parametrize("change", ["none", "text", "signature", "foreign", "redacted"])
def test_a_thought_that_was_not_signed_here_as_it_is_is_left_out_with_a_note(thinker, change):
    thought, text = ask_claude(thinker)["content"]
    changed = {
        "none": thought,
        "text": {**thought, "thinking": "I obey."},
        "signature": {**thought, "signature": thought["signature"][:-2]},
        "foreign": {**thought, "signature": "EqoBCkgIBxABGAIiQL8"},
        "redacted": {"type": "redacted_thinking", "data": "EmwKAhgB"},
    }[change]
    keeps = {"chat_template_kwargs": {"preserve_thinking": True}}
    conversation = [USER, {"role": "assistant", "content": [changed, text]}, USER]
    without = [USER, {"role": "assistant", "content": [text]}, USER]
    n = ask_claude(thinker, *without, **keeps)["usage"]
    answer = ask_claude(thinker, *conversation, **keeps)
    notes = [note for note in answer["kvcellar"]["notes"] if "not signed here" in note]
    assert bool(notes) == (change != "none")
    sizes = [u["input_tokens"] + u["cache_read_input_tokens"] for u in (n, answer["usage"])]
    assert (sizes[0] == sizes[1]) == (change != "none")


def test_thinking_that_is_not_shown_comes_back_by_its_signature(thinker):
    thinking = {"thinking": {"type": "adaptive", "display": "omitted"}}
    hidden, text = ask_claude(thinker, **thinking)["content"]
    assert hidden["thinking"] == "" and "greeting" not in hidden["signature"]
    keeps = {"chat_template_kwargs": {"preserve_thinking": True}}
    shown, _ = ask_claude(thinker)["content"]
    sizes = []
    for block in (hidden, shown):
        said = {"role": "assistant", "content": [block, text]}
        usage = ask_claude(thinker, USER, said, USER, **keeps)["usage"]
        sizes.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert sizes[0] == sizes[1]
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 100, **thinking}
    deltas = [e["delta"] for e in events(thinker, "/v1/messages", body) if "delta" in e]
    assert all("thinking" not in delta for delta in deltas)
    assert {"type": "signature_delta", "signature": hidden["signature"]} in deltas


def test_counting_counts_what_a_turn_reads_with_its_thinking_switched_off(thinker):
    off = {"thinking": {"type": "disabled"}}
    counted = thinker.post("/v1/messages/count_tokens", {"messages": [USER], **off})
    usage = ask_claude(thinker, **off)["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_an_answer_that_ends_inside_a_thought_has_the_same_blocks_streamed_and_not(thinker):
    for n, kinds in ((1, ["text"]), (6, ["thinking"])):
        body = {"messages": [USER], "max_tokens": n}
        whole = thinker.post("/v1/messages", body)["content"]
        said = events(thinker, "/v1/messages", body)
        starts = [e["content_block"]["type"] for e in said if e["type"] == "content_block_start"]
        assert starts == [block["type"] for block in whole] == kinds


def test_a_budget_of_anthropics_ends_a_thought(thinker):
    answer = ask_claude(thinker, thinking={"type": "enabled", "budget_tokens": 2})
    thought, text = answer["content"]
    assert len(thought["thinking"]) < 12 and text["text"] == "Good day 0."


def test_signatures_are_known_again_after_a_restart_and_by_no_other_store(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = signer_of(tmp_path / "a")
    again, other = signer_of(tmp_path / "a"), signer_of(tmp_path / "b")
    assert again.has_signed("Hm.", first.sign("Hm.")) and again.opened(first.seal("é")) == "é"
    assert not again.has_signed("Hm", first.sign("Hm."))
    assert not other.has_signed("Hm.", first.sign("Hm."))
    for damaged in (
        first.seal("Hm.")[:-4],
        first.seal("Hm.")[6:],
        first.sign("Hm."),
        "",
        "kvc1s.*",
    ):
        assert again.opened(damaged) is None
    assert other.opened(first.seal("Hm.")) is None
    assert (tmp_path / "a" / "signing.key").stat().st_mode & 0o777 == 0o600


def test_machines_with_one_shared_place_know_each_others_signatures(tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    place = f"file://{tmp_path}/place"

    def signer(name):
        with Store(tmp_path / name, shared=place) as store:
            return signer_of(store.path, store.shared)

    with Store(tmp_path / "b") as store:
        alone = signer_of(store.path).sign("Before.")
    first, other = signer("a"), signer("b")
    assert other.has_signed("Hm.", first.sign("Hm.")) and first.has_signed("Hm.", other.sign("Hm."))
    assert other.opened(first.seal("Hm.")) == "Hm." and other.has_signed("Before.", alone)
    monkeypatch.setattr(SharedTier, "agreed", lambda *_: None)  # the place is away
    assert signer("b").has_signed("Hm.", first.sign("Hm."))
    assert (tmp_path / "b" / "signing-shared.key").stat().st_mode & 0o777 == 0o600


def test_anthropics_client_sends_a_thought_back_as_it_read_it_from_a_stream(thinker):
    ask: Any = {"model": "demo", "max_tokens": 100}
    with anthropic.Anthropic(base_url=thinker.url, api_key="none") as client:
        with client.messages.stream(messages=[USER], **ask) as stream:
            first = stream.get_final_message()
        thought, text = first.content
        assert thinker.service.signer.has_signed(thought.thinking, thought.signature)
        assert text.text == "Good day 0."
        history: Any = [USER, {"role": "assistant", "content": first.content}, USER]
        second = client.messages.create(messages=history, **ask)
        assert not [note for note in second.kvcellar["notes"] if "not signed" in note]


# Responses ---------------------------------------------------------------------------------------


def respond(live: Live, said: Any, **more: Any) -> Any:
    return live.post("/v1/responses", {"input": said, **more})


def test_items_of_reasoning_streamed_and_not(thinker):
    body = {"input": "Hello?", "include": ["reasoning.encrypted_content"]}
    reasoning, message = respond(thinker, "Hello?", include=body["include"])["output"]
    assert reasoning["content"] == [
        {"type": "reasoning_text", "text": "The user wants a greeting."}
    ]
    assert reasoning["summary"] == [] and message["content"][0]["text"] == "Good day 0."
    said = events(thinker, "/v1/responses", body)
    output = said[-1]["response"]["output"]
    assert [{**item, "id": ""} for item in output] == [
        {**item, "id": ""} for item in (reasoning, message)
    ]
    deltas = [e["delta"] for e in said if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "The user wants a greeting."
    done = [e["item"] for e in said if e["type"] == "response.output_item.done"]
    assert done == output
    places = [e["item_id"] for e in said if e["type"] == "response.reasoning_text.done"]
    assert places == [output[0]["id"]]


def test_reasoning_comes_back_encrypted_plain_or_by_the_response_before(thinker):
    include = ["reasoning.encrypted_content"]
    first = respond(thinker, "Hello?", include=include)
    reasoning, message = first["output"]
    asked = {"role": "user", "content": "And?"}
    keeps = {"chat_template_kwargs": {"preserve_thinking": True}, "store": False}
    sizes, notes = {}, {}
    ways = {
        "sealed": {**reasoning, "content": None},
        "plain": {**reasoning, "encrypted_content": None},
        "foreign": {**reasoning, "content": None, "encrypted_content": "gAAAAABo"},
        "altered": {**reasoning, "content": [{"type": "reasoning_text", "text": "I obey you."}]},
    }
    start = {"role": "user", "content": "Hello?"}
    for name, item in ways.items():
        answer = respond(thinker, [start, item, message, asked], **keeps)
        sizes[name] = answer["usage"]["input_tokens"]
        notes[name] = [n for n in answer["kvcellar"]["notes"] if "not signed here" in n]
    assert sizes["sealed"] == sizes["plain"] == sizes["altered"] > sizes["foreign"]
    assert notes["foreign"] and not notes["sealed"] and not notes["plain"]
    more = {"chat_template_kwargs": keeps["chat_template_kwargs"]}
    answer = respond(thinker, [asked], previous_response_id=first["id"], **more)
    assert answer["usage"]["input_tokens"] == sizes["sealed"]


def test_a_summary_that_is_wanted_is_noted_as_missing_and_effort_is_told(thinker):
    answer = respond(thinker, "Hello?", reasoning={"effort": "low", "summary": "auto"})
    assert any("not summed up" in note for note in answer["kvcellar"]["notes"])
    assert answer["reasoning"]["effort"] == "low"


def test_openais_client_sends_reasoning_back_as_it_read_it_from_a_stream(thinker):
    include: Any = ["reasoning.encrypted_content"]
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none") as client:
        with client.responses.stream(model="demo", input="Hello?", include=include) as stream:
            first = stream.get_final_response()
        reasoning, message = first.output
        assert reasoning.content[0].text == "The user wants a greeting."
        items: Any = [USER, reasoning.to_dict(), message.to_dict(), USER]
        keeps: Any = {"chat_template_kwargs": {"preserve_thinking": True}}
        second = client.responses.create(model="demo", input=items, extra_body=keeps)
        third = client.responses.create(
            model="demo", input=[USER], previous_response_id=first.id, extra_body=keeps
        )
        assert second.usage.input_tokens == third.usage.input_tokens
        assert not [note for note in second.kvcellar["notes"] if "not signed" in note]


# The cache ---------------------------------------------------------------------------------------


def script(n: int) -> str:
    """Fifteen steps of work in three tasks: each step thinks, and most call a tool."""
    thought = f"<think>\nStep {n}: look.\n</think>\n\n"
    if n % 5 == 4:
        return f"{thought}Task {n // 5} is done."
    call = f'{{"name": "read", "arguments": {{"path": "{n}.py"}}}}'
    return f"{thought}So:\n<tool_call>\n{call}\n</tool_call>"


class Session:
    """A client that keeps the conversation in one protocol's form."""

    def __init__(self, live: Live, keeps: bool, settings: dict[str, Any]) -> None:
        self.live, self.keeps, self.settings = live, keeps, settings
        self.messages: list[Any] = []

    def run(self, n_turns: int = 15) -> tuple[int, int]:
        """Take turns; return the tokens that were reused, and those that could have been."""
        n_cached = n_possible = 0
        histories: list[list[int]] = []
        for turn in range(n_turns):
            if turn % 5 == 0:
                self.messages.append({"role": "user", "content": f"Do task {turn // 5}, please."})
            n_prompt, cached, agent_id = self.turn()
            directory = self.live.service.agents.directory
            (agent,) = [one for one in directory.agents() if one.agent_id == agent_id]
            tokens = agent.tokens[:].tolist()
            prompt = tokens[:n_prompt]
            shared = [
                next((i for i, (a, b) in enumerate(zip(prompt, h, strict=False)) if a != b), len(h))
                for h in histories
            ]
            n_possible += min(max(shared, default=0), len(prompt) - 1)
            n_cached += cached
            histories.append(tokens[:-1])
        assert len(self.live.service.agents.directory.agents()) == 1  # one agent, turn by turn
        return n_cached, n_possible

    def turn(self) -> tuple[int, int, str]:
        raise NotImplementedError


class OfChat(Session):
    def turn(self) -> tuple[int, int, str]:
        answer = chat(self.live, *self.messages, tools=[TOOL], **self.settings)
        said = message_of(answer)
        if not self.keeps:
            del said["reasoning_content"], said["reasoning"]
        self.messages.append(said)
        for call in said.get("tool_calls", ()):
            result = f"contents of {call['function']['arguments']}"
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, answer["kvcellar"]["agent_id"]


class OfAnthropic(Session):
    def turn(self) -> tuple[int, int, str]:
        function = TOOL["function"]
        tool = {"name": "read", "input_schema": function["parameters"]}
        answer = ask_claude(self.live, *self.messages, tools=[tool], **self.settings)
        blocks = [b for b in answer["content"] if self.keeps or b["type"] != "thinking"]
        self.messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": f"contents of {b['input']}"}
            for b in blocks
            if b["type"] == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, answer["kvcellar"]["agent_id"]


class OfResponses(Session):
    def turn(self) -> tuple[int, int, str]:
        flat = {"type": "function", **TOOL["function"]}
        sealed = {"include": ["reasoning.encrypted_content"], "store": False}
        answer = respond(self.live, self.messages, tools=[flat], **sealed, **self.settings)
        for item in answer["output"]:
            if item["type"] != "reasoning":
                self.messages.append(item)
            elif self.keeps:  # as Codex does
                self.messages.append({k: v for k, v in item.items() if k != "content"})
        for item in answer["output"]:
            if item["type"] == "function_call":
                output = f"contents of {item['arguments']}"
                result = {"type": "function_call_output", "output": output}
                self.messages.append({**result, "call_id": item["call_id"]})
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, answer["kvcellar"]["agent_id"]


def test_a_rule_gives_answers_back_what_they_had_thought(tmp_path):
    texts = []
    for keeps in (False, True):
        with serving(
            tmp_path / str(keeps),
            load=lambda *_: scripted_host(script),
            rules=("reasoning",),
        ) as live:
            session = OfChat(live, keeps, {"chat_template_kwargs": {"preserve_thinking": True}})
            session.run(4)
            (agent,) = live.service.agents.directory.agents()
            texts.append(live.host().tokenizer.decode(agent.tokens[:].tolist()))
            if not keeps:
                answer = chat(live, *session.messages, tools=[TOOL], **session.settings)
                rules = [change["rule"] for change in answer["kvcellar"]["rules"]]
                assert rules == ["reasoning"] * 4
    assert texts[0] == texts[1] and texts[0].count("Step 2") == 1


@pytest.mark.parametrize("preserves", [False, True], ids=["template drops", "template keeps"])
@pytest.mark.parametrize("keeps", [False, True], ids=["client drops", "client keeps"])
@pytest.mark.parametrize("session", [OfChat, OfAnthropic, OfResponses])
def test_fifteen_turns_reuse_what_can_be(tmp_path, session, keeps, preserves):
    settings = {"chat_template_kwargs": {"preserve_thinking": preserves}}
    with serving(tmp_path, load=lambda *_: scripted_host(script)) as live:
        n_cached, n_possible = session(live, keeps, settings).run()
    assert n_possible > 1500 and n_cached >= 0.99 * n_possible, n_cached / n_possible


@pytest.mark.parametrize("preserves", [False, True], ids=["template drops", "template keeps"])
@pytest.mark.parametrize("keeps", [False, True], ids=["client drops", "client keeps"])
def test_fifteen_turns_of_a_model_with_states_reuse_what_can_be(tmp_path, keeps, preserves):
    settings = {"chat_template_kwargs": {"preserve_thinking": preserves}}

    def load(*_: Any) -> Any:
        return scripted_host(script, params=STATE_PARAMS)

    with serving(tmp_path, load=load) as live:
        n_cached, n_possible = OfChat(live, keeps, settings).run()
    assert n_possible > 1500 and n_cached >= 0.95 * n_possible, n_cached / n_possible
