"""Titles: what people read in place of an agent's id."""

from __future__ import annotations

import itertools

import pytest

from kvcellar.agents.records.names import checked_id, is_chosen, new_ids
from kvcellar.agents.records.titles import MOST_CHARS, checked_title, said_title
from kvcellar.errors import AgentNameError


def user(*texts):
    return [{"role": "user", "content": text} for text in texts]


def test_a_title_is_the_first_words_said_cut_behind_a_word():
    said = "Write one line about rain, and one about the sun that follows it every time."
    assert said_title(user(said)) == "Write one line about rain, and one about the sun…"
    assert said_title(user("  Two\n words ")) == "Two words"
    assert said_title(user("x" * 300)) == "x" * 48 + "…"
    assert said_title([{"role": "system", "content": "You plan."}]) == ""
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    assert said_title(user(parts)) == "What is it?"


def test_a_chat_of_pictures_alone_is_called_by_their_number():
    pictures = [{"name": f"{n:020x}", "at": 0} for n in range(3)]

    def shown(n, text=""):
        return {"role": "user", "content": text, "pictures": pictures[:n]}

    assert said_title([shown(1), {"role": "assistant", "content": "A tree."}]) == "a picture"
    assert said_title([shown(3)]) == "3 pictures"
    assert said_title([shown(3), *user("Which?")]) == "Which?", "as soon as there are words"


def test_what_clients_wrap_around_a_persons_words_is_no_title():
    wrapped = "<environment_context>\n<cwd>/src</cwd>\n</environment_context>"
    assert said_title(user(wrapped, "Mend the test.")) == "Mend the test."
    assert said_title(user(f"{wrapped}\n\nMend the test.")) == "Mend the test."
    assert said_title(user("<b>bold</b>")) == "<b>bold</b>", "all that there is"


def test_a_fork_is_called_by_its_own_words():
    assert said_title(user("Plan a trip.", "To the sea."), 1) == "To the sea."
    assert said_title(user("Plan a trip."), 1) == "Plan a trip.", "until it has some"


def test_any_title_makes_a_name_that_can_be_one():
    titles = (
        "My chat",
        "Küche & Bad",
        "你好",
        "  ",
        "-",
        "~" * 9,
        "a" * 300,
        "poet_2",
        "chat-0123456789ab",
    )
    for title in titles:
        first, second = itertools.islice(new_ids(title), 2)
        assert checked_id(first) == first and checked_id(second) == second and first != second
    assert list(itertools.islice(new_ids("My chat"), 2)) == ["my-chat", "my-chat-2"]
    assert next(new_ids("Küche & Bad")) == "kuche-bad"
    assert next(new_ids("Poet_2")) == "Poet_2"


def test_a_title_that_is_too_long_is_refused():
    assert checked_title(" a\n b ") == "a b"
    with pytest.raises(AgentNameError, match="at most 200 characters, this one has 201"):
        checked_title("x" * (MOST_CHARS + 1))


def test_ids_that_nobody_chose_are_known():
    for agent_id in (
        "agent-5b648fbc",
        "agent-5b648fbc-0a1b2c",
        "chat-0123456789ab.2",
        "poet-0a1b2c",
    ):
        assert not is_chosen(agent_id), agent_id
    for agent_id in ("poet", "poet.2", "agent-smith", "chat-bot", "my-chat-2"):
        assert is_chosen(agent_id), agent_id
