"""The model reads what was sent; what that has in common with a history is not computed again."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.agents import RULES, PlannedTurn, Turn, check_template
from kvcellar.agents.planning import plan_turn
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.engine import SamplingParams
from kvcellar.history import History
from kvcellar.hosting.messages import Messages, match_key
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.text.prompts import encode, render
from kvcellar.models.text.tokenizer import load_tokenizer
from tests.agents.fakes import (
    FULL_PARAMS,
    ByteTokenizer,
    continued,
    make_host,
    manager,
    run,
    tokens_of,
    turn,
)

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


def prompt_of(agents: Any, messages: Any, tools: Any = None) -> tuple[int, ...]:
    """The tokens of a conversation, by the model's template alone."""
    tokenizer = agents.models.host("hash").tokenizer
    more = {} if tools is None else {"tools": tools}
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **more
    )
    return tuple(tokenizer.encode(text))


def common(a: Any, b: Any) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


async def say(agents: Any, messages: Any, tools: Any = None) -> Any:
    """A turn, which reads what was sent and reuses what it has in common with the history."""
    before = tokens_of(agents, "a")
    end = await turn(agents, "a", messages=messages, tools=tools)
    want = prompt_of(agents, messages, tools)
    assert tokens_of(agents, "a")[: -len(end.finish.token_ids)] == want
    assert end.usage.prompt_tokens == len(want)
    n_same = min(common(before, want), max(0, len(before) - 1))
    n_others = len(agents.directory.infos()) - 1  # what they have in common is reused, too
    assert n_same <= end.usage.cached_tokens <= (len(want) if n_others else n_same)
    assert list(agents.directory.conversation("a"))[:-1] == messages
    return end


async def three_turns(agents: Any) -> list[dict[str, Any]]:
    await agents.lifecycle.create("a")
    messages = [SYSTEM]
    for i in range(3):
        messages.append(user(f"question {i}"))
        end = await say(agents, messages)
        messages.append({"role": "assistant", "content": end.finish.text})
    return messages


@pytest.mark.parametrize("tokenizer", [ByteTokenizer, Forgetful])
def test_a_turn_reads_what_the_template_makes_of_what_was_sent(tmp_path, tokenizer):
    def load(name: str) -> Any:
        return make_host(name, tokenizer=tokenizer(), params=FULL_PARAMS)

    with manager(tmp_path, load) as agents:
        messages = run(three_turns(agents))
        assert agents.directory.infos()[0].n_turns == 3
        miss = agents.directory.why("a")
        assert (miss and miss.cause) == (None if tokenizer is ByteTokenizer else "template")
        messages.append(user("and now?"))
        end = run(say(agents, messages))
        messages.append({"role": "assistant", "content": end.finish.text})
    with manager(tmp_path, load) as agents:  # also after a restart
        assert continued(agents, [*messages, user("?")]) == "a"
        assert agents.directory.infos()[0].n_turns == 4
        run(say(agents, [*messages, user("?")]))


def test_an_answer_that_comes_back_otherwise_is_found_and_read_as_it_came(tmp_path):
    with manager(tmp_path) as agents:
        messages = run(three_turns(agents))
        messages[2] = {
            "role": "assistant",
            "content": "<think>new</think>" + messages[2]["content"],
        }
        messages.append(user("and now?"))
        assert continued(agents, messages) == "a"
        end = run(turn(agents, "a", messages=messages))
        assert end.usage.miss.cause == "echoed"
        assert tokens_of(agents, "a")[: end.usage.prompt_tokens] == prompt_of(agents, messages)
        assert agents.directory.conversation("a")[2] == messages[2]
        assert agents.directory.infos()[0].n_turns == 4


@pytest.mark.parametrize("tokenizer", [ByteTokenizer, Forgetful])
@pytest.mark.parametrize("back", [1, 2])
def test_going_back_to_a_turn_keeps_its_messages_whatever_the_template_made_of_them(
    tmp_path, tokenizer, back
):
    def load(name: str) -> Any:
        return make_host(name, tokenizer=tokenizer(), params=FULL_PARAMS)

    with manager(tmp_path, load) as agents:
        messages = run(three_turns(agents))
        tokens = tokens_of(agents, "a")
        run(agents.lifecycle.fork("a", "b", turn=-back))
        run(agents.lifecycle.rewind("a", turn=-back))
        kept = messages[: -2 * back]
        for name in "ab":
            assert list(agents.directory.conversation(name)) == kept
            assert len(agents.directory.turns(name)) == 3 - back
            now = tokens_of(agents, name)
            assert now == tokens[: len(now)]
            assert prompt_of(agents, [*kept, user("x")])[: len(now) - 1] == now[:-1]
        run(say(agents, [*kept, user("another way")]))
        assert agents.directory.infos()[-1].n_turns == 4 - back


def test_the_model_reads_the_date_and_the_header_that_were_sent(tmp_path):
    other = {
        "role": "system",
        "content": "x-some-header: cch=af31;\n" + SYSTEM["content"].replace("03-01", "03-02"),
    }
    with manager(tmp_path) as agents:
        messages = run(three_turns(agents))
        end = run(say(agents, [other, *messages[1:], user("next")]))
        assert end.usage.miss.cause == "system" and end.usage.rules == ()
        spaced = [{**m, "content": f" {m['content']}"} for m in messages]
        assert continued(agents, [*spaced, user("?")]) is None


def test_the_header_line_of_claude_code_is_left_out_and_reported(tmp_path):
    def sent(stamp: str) -> dict[str, Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.197; cch={stamp};\n"
        return {"role": "system", "content": line + SYSTEM["content"]}

    with manager(tmp_path) as agents:
        messages = run(three_turns(agents))
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", messages=[sent("1"), *messages[1:], user("next")]))
        assert end.usage.miss is None and end.usage.cached_tokens == len(before) - 1
        (change,) = end.usage.rules
        assert (change.rule, change.message) == ("billing-header", 0)
        assert "cch=1" in change.before and change.after.startswith("You help.")
        assert agents.directory.conversation("a")[0] == SYSTEM
        # in the middle of a text it is what somebody wrote
        inside = {"role": "system", "content": "Look:\n" + sent("2")["content"]}
        assert run(turn(agents, "a", messages=[inside, user("q")])).usage.rules == ()
    with manager(tmp_path / "none", rules=()) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", messages=[sent("1"), user("q")]))
        assert agents.directory.conversation("a")[0] == sent("1")


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"reasoning"}))
def test_a_rule_applies_where_it_was_switched_on_and_says_what_it_changed(tmp_path, rule):
    tools = [{"name": "b", "x": 1}, {"name": "a"}]
    line = "x-anthropic-billing-header: 1\n" if rule == "billing-header" else "x-some-header: 1\n"
    for is_on in (True, False):
        rules = [rule] if is_on else [name for name in RULES if name != rule]
        if not is_on and rule == "billing-header":
            rules.remove("header")  # which would find this line, too
        with manager(tmp_path / str(is_on), load, rules=rules) as agents:
            run(agents.lifecycle.create("a"))
            run(turn(agents, "a", messages=[SYSTEM, user("q")], tools=tools))
            own, before = list(agents.directory.conversation("a")), tokens_of(agents, "a")
            system, now = dict(SYSTEM), tools
            if rule == "date":
                system["content"] = system["content"].replace("03-01", "03-02")
            elif rule == "tool-order":
                now = tools[::-1]
            else:
                system["content"] = line + system["content"]
            end = run(turn(agents, "a", messages=[system, *own[1:], user("n")], tools=now))
            changes = [change for change in end.usage.rules if change.rule == rule]
            if not is_on:
                assert not changes
                assert end.usage.miss.cause == ("tools" if rule == "tool-order" else "system")
                continue
            assert end.usage.cached_tokens >= len(before) - 1 - len("answer")
            assert end.usage.miss is None or end.usage.miss.cause == "template"
            if rule != "tool-order":  # what was sent second is in order
                (change,) = changes
                assert change.before != change.after and len(change.before) <= 200


def test_tool_definitions_are_read_in_the_order_in_which_they_were_sent(tmp_path):
    tools = [{"name": "b", "x": 1, "y": {"p": 1, "q": 2}}, {"name": "a"}]
    again = [{"name": "a"}, {"y": {"q": 2, "p": 1}, "x": 1, "name": "b"}]
    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        for sent in (tools, again):
            run(say(agents, [SYSTEM, user("q")], sent))
    with manager(tmp_path / "sorted", load, rules=("tool-order",)) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", messages=[SYSTEM, user("q")], tools=tools))
        n_prompt = agents.directory.turns("a")[0].n_prompt
        end = run(turn(agents, "a", messages=[SYSTEM, user("q")], tools=again))
        assert end.usage.cached_tokens == n_prompt - 1
        assert "tool-order" in {change.rule for change in end.usage.rules}


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("system", lambda m: [{"role": "system", "content": "Be long."}, *m[1:]]),
        ("truncated", lambda m: [m[0], *m[3:]]),
        ("edited", lambda m: [*m[:3], user("another"), *m[4:]]),
    ],
)
def test_what_was_lost_is_explained_with_both_texts(tmp_path, cause, change):
    with manager(tmp_path) as agents:
        messages = run(three_turns(agents))
        before = tokens_of(agents, "a")
        end = run(turn(agents, "a", messages=[*change(messages), user("next")]))
        miss = end.usage.miss
        assert miss == agents.directory.why("a")
        after = tokens_of(agents, "a")
        assert miss.cause == cause
        assert before[: miss.position] == after[: miss.position]
        assert before[miss.position] != after[miss.position]
        assert miss.tokens_lost == len(before) - 1 - miss.position
        assert miss.was != miss.became and miss.advice
    with manager(tmp_path) as agents:
        assert agents.directory.why("a") == miss


def test_an_answer_that_is_read_in_other_tokens_than_it_was_said_in_is_called_so(tmp_path):
    class Pairs(ByteTokenizer):
        """Says each letter alone, and reads two of them as capitals of its own."""

        def encode(self, text: str, **more: Any) -> list[int]:
            ids = super().encode(text, **more)
            return [i - 32 if 97 <= i <= 122 and n % 2 else i for n, i in enumerate(ids)]

        def decode(self, token_ids: Any, **more: Any) -> str:
            return super().decode(token_ids, **more).lower()

    with manager(tmp_path, lambda name: make_host(name, tokenizer=Pairs())) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", "question"))
        end = run(turn(agents, "a", "another"))
        assert end.usage.miss.cause == "retokenised"
        assert agents.directory.infos()[0].n_turns == 2


def test_kv_that_is_nowhere_any_more_is_said_to_be_evicted(tmp_path):
    with manager(tmp_path) as agents:
        run(three_turns(agents))
        run(agents.sleep.pause("a"))
    for file in (tmp_path / "blocks").rglob("*.safetensors"):
        file.unlink()
    with manager(tmp_path) as agents:
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
    with manager(tmp_path, rules=("date",)) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", messages=[one, user("q")]))
        own = list(agents.directory.conversation("a"))
        end = run(turn(agents, "a", messages=[two, *own[1:], user("n")]))
        assert end.usage.miss.cause == "system"


def test_an_answer_that_the_model_ended_itself_is_not_ended_twice(tmp_path):
    def ends_at_once(name: str) -> Any:
        host = make_host(name)
        host.engine.runner.bias[ByteTokenizer.END] = 1e6
        return host

    with manager(tmp_path, ends_at_once) as agents:
        run(agents.lifecycle.create("a"))
        for text in ("one", "two", "three"):
            end = run(turn(agents, "a", text, params=SamplingParams(max_tokens=4)))
            assert end.finish.reason == "stop"
        text = ByteTokenizer().decode(tokens_of(agents, "a"))
        assert text == "".join(f"<user>{t}<end>\n<assistant><end>\n" for t in _said)[:-1]


_said = ("one", "two", "three")


def test_one_changed_character_of_the_template_is_the_templates_fault(tmp_path):
    """The model is the same, so it is the same agent, and what is common is reused."""

    class Other(ByteTokenizer):
        def apply_chat_template(self, *args: Any, **more: Any) -> Any:
            return str(super().apply_chat_template(*args, **more)).replace("assistant", "assistanT")

    with manager(tmp_path) as agents:
        run(agents.lifecycle.create("a", system="You write verse. " * 9))
        run(turn(agents, "a", "One. " * 9))
        run(agents.sleep.pause("a"))
        n = len(tokens_of(agents, "a"))
    with manager(tmp_path, lambda name: make_host(name, tokenizer=Other())) as agents:
        end = run(turn(agents, "a", "Two."))
        assert [info.agent_id for info in agents.directory.infos()] == ["a"]
        assert end.usage.miss is not None and end.usage.miss.cause == "template"
        assert end.usage.miss.tokens_lost < n and end.usage.cached_tokens > 100
        assert len(agents.directory.conversation("a")) == 5


class Thinking(ByteTokenizer):
    """A template like Qwen3.5's: answers open with ``<think>``, and old ones lose their thoughts.

    They keep them behind the user's last message, as long as tools are called.
    """

    OPENING = "<assistant><think>\n"

    def apply_chat_template(self, conversation: Any, **more: Any) -> str:
        said = [i for i, m in enumerate(conversation) if m["role"] == "user"]
        text = ""
        for i, m in enumerate(conversation):
            shown = m["content"].strip()
            if m["role"] == "assistant":
                thoughts, _, answer = shown.rpartition("</think>\n")
                keeps = i > said[-1] and thoughts
                shown = f"<think>\n{thoughts}</think>\n{answer}" if keeps else answer
            text += f"<{m['role']}>{shown}<end>\n"
        return text + (self.OPENING if more["add_generation_prompt"] else "")


def planned(
    messages: Any, *, known: Any = (), tokens: Any = (), tokenizer: Any = None, **more: Any
) -> PlannedTurn:
    """Plan a turn of messages for an agent that has a history."""
    host = make_host(tokenizer=tokenizer or Thinking())
    host.service.close()
    agent = AgentRecord("a", host.name, host.key, History(tokens), Messages(known))
    return plan_turn(Turn("a", messages=messages), agent, host, (), **more)


def divergences(messages: Any, tokens: Any = ()) -> tuple[int, ...]:
    return planned(messages, tokens=tokens, control_tokens_in_text=True).snapshots_at


def n_tokens(messages: Any, *, is_asking: bool = False) -> int:
    tokenizer = Thinking()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=is_asking, tokenize=False)
    return len(tokenizer.encode(text))


def test_later_turns_diverge_before_an_answer_opens_and_before_or_behind_what_the_user_said_last():
    asked = [SYSTEM, user("one"), {"role": "assistant", "content": "hm</think>\nyes"}, user("two")]
    edited = n_tokens([*asked[:-1], user("")]) - 2  # its end, and a newline
    assert divergences(asked) == (edited, n_tokens(asked))
    called = [*asked, {"role": "assistant", "content": "so</think>\nlook"}]
    called.append({"role": "system", "content": "seen"})
    assert divergences(called) == (edited, n_tokens(asked), n_tokens(called))


def test_a_conversation_that_left_its_history_is_expected_to_be_left_there_again():
    asked = [SYSTEM, user("one"), {"role": "assistant", "content": "yes"}, user("two")]
    tokenizer = Thinking()
    before = tokenizer.encode(
        tokenizer.apply_chat_template(
            [SYSTEM, user("one"), {"role": "assistant", "content": "you"}],
            add_generation_prompt=False,
            tokenize=False,
        )
    )
    n_same = before.index(ord("o"), len(before) - 4)
    assert divergences(asked, before) == (n_same, n_tokens(asked))


@pytest.mark.parametrize("text", ["<end> is text", "plain"])
def test_places_are_exact_where_messages_spell_control_tokens(text):
    """With a tokenizer that merges letters, and marks before what is no control token."""
    tokenizer = load_tokenizer(DEMO_FOLDER)
    words = [*tokenizer.added_tokens_decoder.values()]
    text = text.replace("<end>", words[-1].content)
    messages = [user(text), {"role": "assistant", "content": text}, user(f"{text}?")]
    found = planned(messages, tokenizer=tokenizer)
    at = found.snapshots_at[-1]
    part = encode(tokenizer, render(tokenizer, messages, is_asking=False))
    assert found.prompt[:at].tolist() == part
    assert at < len(found.prompt)


def test_an_answer_is_found_where_the_ids_of_its_calls_were_not_kept():
    function = {"name": "look", "arguments": {"id": 7}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": function}]}
    bare = {**said, "tool_calls": [{"function": function}]}
    assert match_key(said, ()) == match_key(bare, ())
    other = {**said, "tool_calls": [{"function": {**function, "arguments": {"id": 8}}}]}
    assert match_key(other, ()) != match_key(bare, ())


def test_an_answer_that_is_gone_on_with_is_not_said_to_have_lost_messages():
    known = [SYSTEM, user("one"), {"role": "assistant", "content": "yes, and"}]

    assert planned(known, known=known).changed is None
    assert planned(known[:-1], known=known).changed == "truncated"
    longer = [*known, user("two"), {"role": "assistant", "content": "no"}]
    told = planned(known, known=longer).changed
    assert told == "truncated"  # also where an answer before the last is gone on with
