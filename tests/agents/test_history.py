"""Conversations that come back as text keep their tokens; what is lost is explained."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.agents import RULES, check_template
from kvcellar.engine import SamplingParams
from tests.agents.fakes import ByteTokenizer, make_host, manager, run, tokens_of, turn

SYSTEM = {"role": "system", "content": "You help.\nToday's date is 2026-03-01.\nBe brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Forgetful(ByteTokenizer):
    """A template that drops thoughts and puts a newline before old answers."""

    def apply_chat_template(self, conversation: Any, **more: Any) -> str:
        import re

        def shown(i: int, m: Any) -> str:
            text = m["content"].strip()
            if m["role"] == "assistant":
                text = "\n" + re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).strip()
            return f"<{m['role']}>{text}<end>\n"

        tools = more.get("tools")
        head = f"[{tools}]" if tools else ""
        text = head + "".join(shown(i, m) for i, m in enumerate(conversation))
        return text + ("<assistant>" if more["add_generation_prompt"] else "")


def load(name: str) -> Any:
    return make_host(name, tokenizer=Forgetful())


async def three_turns(agents: Any) -> list[dict[str, Any]]:
    await agents.create("a")
    messages = [SYSTEM]
    for i in range(3):
        messages.append(user(f"question {i}"))
        before = len(tokens_of(agents, "a"))
        end = await turn(agents, "a", messages=messages)
        assert end.usage.cached_tokens >= before - 1
        assert end.usage.miss is None
        messages.append({"role": "assistant", "content": end.finish.text.strip() + "\n"})
    return messages


def test_a_conversation_that_comes_back_as_text_keeps_its_tokens(tmp_path):
    with manager(tmp_path, load) as agents:
        messages = run(three_turns(agents))
        before = tokens_of(agents, "a")
        messages[2] = {
            "role": "assistant",
            "content": "<think>new</think>" + messages[2]["content"],
        }
        end = run(turn(agents, "a", messages=[*messages, user("and now?")]))
        assert tokens_of(agents, "a")[: len(before)] == before
        assert end.usage.cached_tokens == len(before) - 1
        assert end.usage.miss is None
        assert any("chat template" in note for note in end.usage.notes)
    with manager(tmp_path, load) as agents:  # also after a restart
        own = list(agents.conversation("a"))
        before = tokens_of(agents, "a")
        assert agents.identify(messages=[*own, user("?")]) == "a"
        end = run(turn(agents, "a", messages=[*own, user("?")]))
        assert tokens_of(agents, "a")[: len(before)] == before


def test_a_changed_date_or_header_costs_nothing_and_is_reported(tmp_path):
    other = {
        "role": "system",
        "content": "x-billing-header: cch=af31;\n" + SYSTEM["content"].replace("03-01", "03-02"),
    }
    with manager(tmp_path, load) as agents:
        messages = run(three_turns(agents))
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", messages=[other, *messages[1:], user("next")]))
        assert end.usage.cached_tokens == len(before) - 1 and end.usage.miss is None
        said = " ".join(end.usage.notes)
        assert "rule header" in said and "rule date" in said
        own = agents.conversation("a")
        assert agents.identify(messages=[other, *own[1:], user("?")]) == "a"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_can_be_left_out(tmp_path, rule):
    rules = [name for name in RULES if name != rule]
    tools = [{"name": "b", "x": 1}, {"name": "a"}]
    with manager(tmp_path, load, rules=rules) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", messages=[SYSTEM, user("q")], tools=tools))
        own = list(agents.conversation("a"))
        system = dict(SYSTEM)
        if rule == "date":
            system["content"] = system["content"].replace("03-01", "03-02")
        elif rule == "header":
            system["content"] = "x-some-header: 1\n" + system["content"]
        else:
            tools = tools[::-1]
        end = run(turn(agents, "a", messages=[system, *own[1:], user("n")], tools=tools))
        assert end.usage.miss is not None
        assert end.usage.miss.cause == ("tools" if rule == "tool-order" else "system")


def test_tool_definitions_in_another_order_cost_nothing(tmp_path):
    tools = [{"name": "b", "x": 1, "y": {"p": 1, "q": 2}}, {"name": "a"}]
    again = [{"name": "a"}, {"y": {"q": 2, "p": 1}, "x": 1, "name": "b"}]
    with manager(tmp_path, load) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", messages=[SYSTEM, user("q")], tools=tools))
        before = tokens_of(agents, "a")
        own = list(agents.conversation("a"))
        end = run(turn(agents, "a", messages=[*own, user("n")], tools=again))
        assert end.usage.miss is None and end.usage.cached_tokens == len(before) - 1


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("system", lambda m: [{"role": "system", "content": "Be long."}, *m[1:]]),
        ("truncated", lambda m: [m[0], *m[3:]]),
        ("edited", lambda m: [*m[:3], user("another"), *m[4:]]),
    ],
)
def test_what_was_lost_is_explained_with_both_texts(tmp_path, cause, change):
    with manager(tmp_path, load) as agents:
        messages = run(three_turns(agents))
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", messages=[*change(messages), user("next")]))
        miss = end.usage.miss
        assert miss == agents.why("a")
        after = tokens_of(agents, "a")
        assert miss.cause == cause
        assert before[: miss.position] == after[: miss.position]
        assert before[miss.position] != after[miss.position]
        assert miss.tokens_lost == len(before) - 1 - miss.position
        assert miss.was != miss.became and miss.advice
    with manager(tmp_path, load) as agents:
        assert agents.why("a") == miss


def test_kv_that_is_nowhere_any_more_is_said_to_be_evicted(tmp_path):
    with manager(tmp_path, load) as agents:
        run(three_turns(agents))
        run(agents.pause("a"))
    for file in (tmp_path / "blocks").rglob("*.safetensors"):
        file.unlink()
    with manager(tmp_path, load) as agents:
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", "next"))
        assert end.usage.cached_tokens == 0
        assert end.usage.miss.cause == "evicted"
        assert end.usage.miss.tokens_lost == len(before) - 1


def test_a_template_that_rewrites_old_turns_is_reported_when_it_is_loaded():
    report = check_template(Forgetful())
    assert not report.is_prefix_stable
    assert any("thoughts" in found for found in report.findings)

    class Stable(ByteTokenizer):
        def apply_chat_template(self, conversation: Any, **more: Any) -> str:
            text = "".join(f"<{m['role']}>{m['content']}<end>" for m in conversation)
            return text + ("<assistant>" if more["add_generation_prompt"] else "")

    assert check_template(Stable()).is_prefix_stable


def test_a_line_that_is_not_about_the_date_is_not_taken_for_it(tmp_path):
    one = {"role": "system", "content": "The contract ends on 2026-03-01."}
    two = {"role": "system", "content": "The contract ends on 2027-03-01."}
    with manager(tmp_path, load) as agents:
        run(agents.create("a"))
        run(turn(agents, "a", messages=[one, user("q")]))
        own = list(agents.conversation("a"))
        end = run(turn(agents, "a", messages=[two, *own[1:], user("n")]))
        assert end.usage.miss.cause == "system"


def test_an_answer_that_the_model_ended_itself_is_not_ended_twice(tmp_path):
    def ends_at_once(name: str) -> Any:
        host = make_host(name)
        host.engine.runner.bias[ByteTokenizer.END] = 1e6
        return host

    with manager(tmp_path, ends_at_once) as agents:
        run(agents.create("a"))
        for text in ("one", "two", "three"):
            end = run(turn(agents, "a", text, params=SamplingParams(max_tokens=4)))
            assert end.finish.reason == "stop"
        text = ByteTokenizer().decode(tokens_of(agents, "a"))
        assert text == "".join(f"<user>{t}<end>\n<assistant><end>\n" for t in _said)[:-1]


_said = ("one", "two", "three")
