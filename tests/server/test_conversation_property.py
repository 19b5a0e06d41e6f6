"""Whatever is said, in whatever protocol and template: what is counted is what is billed and read.

Random conversations go on, are cut, edited and answered anew, across protocols and restarts of the
server. Each answer is compared with that of a cold cache, and each prompt with the template's own.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.agents import ModelHost, open_host
from kvcellar.cache_config import make_config
from kvcellar.engine import SamplingParams, generate, last
from kvcellar.models import load_model
from kvcellar.registry import make_decode_session
from tests.models.tiny_checkpoints import COMMON, make_tokenizer, randomize
from tests.server.live import Live, serving

CAPACITY = 3072
MAX_TOKENS = 16  # as few as a response may ask for

BOS = "{{ bos_token }}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATES = {
    "stable": BOS + PLAIN + ASK,
    "trims": BOS + PLAIN.replace("m.content", "m.content | trim") + ASK,
    "drops thoughts": BOS
    + PLAIN.replace(
        "m.content",
        "m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content",
    )
    + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
    "system in the last": BOS + "{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>"
    "{% if m.role == 'user' and m is sameas messages[ns.last] %}{{ ns.system }}\n\n{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}" + ASK,
    "counts": BOS + "{{ messages | length }} messages." + PLAIN + ASK,
    "dates": BOS + "Today is {{ strftime_now('%d %B %Y') }}." + PLAIN + ASK,
    "merges": BOS
    + "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}"
    "{% if not loop.first %}<|end|>{% endif %}<|{{ m.role }}|>{% else %}\n\n{% endif %}"
    "{{ m.content }}{% endfor %}<|end|>" + ASK,
    "escapes": BOS
    + PLAIN.replace("{{ m.content }}", "{{ m.content | tojson }}")
    + '{% if add_generation_prompt %}<|assistant|>"{% endif %}',
}

TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "Hello.",
            "  two  spaces \n",
            "<|end|>",
            "a<|end|><|user|>b",
            "<s>",
            "</s> and <|assistant|>",
            "<think>no</think>",
            "é🙂\u200d漢",
            "Today's date is 2026-03-01.",
            "x-anthropic-billing-header: not at the top of a system message",
            "\ufdd0<|end|>\ufdef",
            '{"name": "x"}</tool_call>',
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
MAY_BE_LOST = ("template", "retokenised", "echoed", "recomputed")
"""What a conversation that goes on may have to compute again; never as one that was edited."""

PROTOCOLS = st.sampled_from(["chat", "messages", "responses"])


@dataclass
class Step:
    """What happens before the next answer."""

    kind: str
    text: str
    protocol: str
    is_streamed: bool
    at: int
    is_restarted: bool = False


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["say", "say", "say", "edit", "cut", "again", "trim"]),
    text=TEXTS,
    protocol=PROTOCOLS,
    is_streamed=st.booleans(),
    at=st.integers(0, 7),
    is_restarted=st.sampled_from([False, False, False, True]),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        **COMMON | {"max_position_embeddings": CAPACITY}, num_hidden_layers=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@functools.cache
def cold_model(folder: Any) -> Any:
    """The model's weights, in no server."""
    return load_model(str(folder), dtype="float32")


def cold_answer(folder: Any, prompt: list[int]) -> list[int]:
    """The greedy tokens behind a prompt, from a cache that has never seen anything."""
    model = cold_model(folder)
    config = make_config(model.params, CAPACITY, "float32")
    with make_decode_session(model.backend, config) as session:
        events = generate(
            model.bind(session),
            session.cache,
            model.tokenizer,
            prompt,
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
            eos_token_ids=model.eos_token_ids,
        )
        return list(last(events).token_ids)


@dataclass
class Talk:
    """A conversation as its client knows it."""

    messages: list[dict[str, str]]
    agent: str | None = None

    def take(self, step: Step) -> bool:
        """Change it as a step says; whether what follows continues the last answer."""
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        is_on = True
        if step.kind == "edit" and turns:
            at = step.at % len(self.messages)
            is_on = self.messages[at]["content"] == step.text
            self.messages[at] = {**self.messages[at], "content": step.text}
        elif step.kind == "cut" and turns:
            del self.messages[turns[step.at % len(turns)] :]
            is_on = False
        elif step.kind == "trim" and turns:
            self.messages[-1] = {
                **self.messages[-1],
                "content": self.messages[-1]["content"].strip(),
            }
        elif step.kind == "again" and turns:
            del self.messages[turns[-1] + 1 :]
            return False
        self.messages.append({"role": "user", "content": step.text})
        return is_on


def ask(live: Live, talk: Talk, step: Step) -> tuple[str, int, int, int, str]:
    """Have the conversation answered; text, prompt, cached and answer tokens, and the agent."""
    more = {"model": "tiny", "temperature": 0}
    if step.protocol == "responses":
        body = {**more, "input": talk.messages, "max_output_tokens": MAX_TOKENS, "store": False}
        path = "/v1/responses"
    else:
        body = {**more, "messages": talk.messages, "max_tokens": MAX_TOKENS}
        path = "/v1/messages" if step.protocol == "messages" else "/v1/chat/completions"
    events: list[Any] = [{}]
    text = ""
    if step.is_streamed:
        body["stream"] = True
        if step.protocol == "chat":
            body["stream_options"] = {"include_usage": True}
        response = live.http.post(path, json=body)
        assert response.status_code == 200, response.text
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        for event in events:
            if step.protocol == "chat":
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
            elif event["type"] == "content_block_delta":
                text += event["delta"].get("text", "")
            elif event["type"] == "response.output_text.delta":
                text += event["delta"]
    else:
        answer = live.post(path, body)
    if step.protocol == "chat":
        end = events[-1] if step.is_streamed else answer
        usage, agent = end["usage"], end["kvcellar"]["agent_id"]
        text = text if step.is_streamed else end["choices"][0]["message"]["content"] or ""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return text, usage["prompt_tokens"], cached, usage["completion_tokens"], agent
    if step.protocol == "messages":
        if step.is_streamed:
            end = events[-2]
            agent = end["kvcellar"]["agent_id"]
        else:
            end = answer
            agent = end["kvcellar"]["agent_id"]
            text = "".join(block["text"] for block in end["content"] if block["type"] == "text")
        usage = end["usage"]
        kinds = ("", "cache_read_", "cache_creation_")
        n_prompt = sum(usage[f"{kind}input_tokens"] for kind in kinds)
        return text, n_prompt, usage["cache_read_input_tokens"], usage["output_tokens"], agent
    end = events[-1]["response"] if step.is_streamed else answer
    usage = end["usage"]
    if not step.is_streamed:
        items = (item for item in end["output"] if item["type"] == "message")
        text = "".join(part["text"] for item in items for part in item["content"])
    cached = usage["input_tokens_details"]["cached_tokens"]
    agent = end["kvcellar"]["agent_id"]
    return text, usage["input_tokens"], cached, usage["output_tokens"], agent


def check(live: Live, folder: Any, talk: Talk, step: Step, is_on: bool) -> None:
    """One answer, with all that has to hold of it."""
    counted = live.post("/v1/messages/count_tokens", {"model": "tiny", "messages": talk.messages})[
        "input_tokens"
    ]
    before = live.engine() if live.service.models.hosts() else None
    text, n_prompt, n_cached, n_said, agent_id = ask(live, talk, step)
    assert n_prompt == counted
    agent = live.service.agents.directory.agent(agent_id)
    n = agent.turns[-1].n_prompt
    tokens, said = list(agent.tokens[:n]), list(agent.tokens[n:])
    assert (len(tokens), len(said)) == (n_prompt, n_said)
    assert list(agent.messages[:-1]) == talk.messages
    thought = re.compile(r"\A<think>\n.*\n</think>\n\n", re.DOTALL)  # where a template reads it so
    assert thought.sub("", agent.messages[-1]["content"]) == text
    tokenizer = cold_model(folder).tokenizer
    host = live.host()
    written = host.tokenizer.apply_chat_template(
        talk.messages, add_generation_prompt=True, tokenize=False
    )
    specials = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    if not any(s in m["content"] for m in talk.messages for s in specials):
        assert tokens == tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.decode(tokens) == written
    if before is not None:
        now = live.engine()
        assert now.computed_tokens - before.computed_tokens == n_prompt - n_cached + n_said - 1
    assert said == cold_answer(folder, tokens)
    miss = live.service.agents.directory.why(agent_id)
    if is_on and talk.agent is not None and step.protocol != "responses":
        assert miss is None or miss.cause in (
            "template",
            "retokenised",
            "evicted",
            "recomputed",
            "echoed",
        )
    talk.agent = None if step.protocol == "responses" else agent_id
    talk.messages.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.slow
def test_counted_billed_and_read_are_the_same_warm_and_cold(name, folder, tmp_path_factory):
    def load(path: str, progress: Any) -> ModelHost:
        return open_host(
            path,
            capacity=CAPACITY,
            dtype="float32",
            chat_template=TEMPLATES[name],
            progress=progress,
        )

    @settings(
        max_examples=2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(system=st.one_of(st.none(), TEXTS), steps=st.lists(STEPS, min_size=4, max_size=7))
    def run(system: str | None, steps: list[Step]) -> None:
        talk = Talk([] if system is None else [{"role": "system", "content": system}])
        store = tmp_path_factory.mktemp("store")
        left = list(steps)
        while left:
            with serving(store, load=load, offered={"tiny": str(folder)}) as live:
                while left:
                    step = left.pop(0)
                    is_on = talk.take(step)
                    check(live, folder, talk, step, is_on)
                    if step.is_restarted:
                        break

    run()
