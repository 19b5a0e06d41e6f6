"""A chat whose history is its tokens: reuse, undo, and templates that do odd things."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.engine import Conversation, GeneratedToken, Generation, SamplingParams, last
from kvcellar.errors import ModelError, PromptError
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import FULL_PARAMS, STATE_PARAMS, ByteTokenizer, HashRunner, make_cache

VOCAB = ByteTokenizer.vocab_size
END = ByteTokenizer.END
SAY = SamplingParams(max_tokens=8)

every_cache = pytest.mark.parametrize("kind", ["contiguous", "seq", "tree"])


def make_chat(
    kind: str = "contiguous",
    capacity: int = 512,
    params: ModelCacheParams = FULL_PARAMS,
    n_slots: int = 64,
    **options: Any,
) -> tuple[Conversation, HashRunner, ByteTokenizer]:
    cache = make_cache(kind, capacity, params, n_slots=n_slots)
    runner = HashRunner(cache, VOCAB)
    runner.bias = dict.fromkeys(range(ord("a"), ord("z") + 1), 100.0)
    tokenizer = ByteTokenizer()
    chat = Conversation(runner, cache, tokenizer, eos_token_ids={END}, **options)
    return chat, runner, tokenizer


def rendered(chat: Conversation, tokenizer: ByteTokenizer) -> list[int]:
    text = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=False, tokenize=False)
    return tokenizer.encode(text)


@every_cache
@pytest.mark.parametrize("params", [FULL_PARAMS, STATE_PARAMS], ids=["full", "state"])
def test_the_history_is_that_of_the_template_and_only_new_tokens_are_computed(
    kind: str, params: ModelCacheParams
) -> None:
    chat, runner, tokenizer = make_chat(kind, params=params, system="be brief")
    for turn in range(4):
        before = list(chat.tokens)
        cached = chat.cached_tokens
        runner.forwards.clear()
        result = last(chat.say(f"message {turn}", SAY))
        assert list(chat.tokens)[: len(before)] == before
        assert result.usage.cached_tokens == cached >= len(before) - 1
        assert runner.n_tokens == len(chat.tokens) - cached - 1
        # the answer ended for want of room, so the template's end is missing
        assert rendered(chat, tokenizer) == [*chat.tokens, END, *b"\n"]
    assert chat.n_turns == 4
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 4]


@every_cache
def test_an_answer_that_the_model_ends_is_not_ended_twice(kind: str) -> None:
    chat, runner, tokenizer = make_chat(kind)
    for _ in range(3):
        runner.bias[END] = -100.0
        events = chat.say("hello", SamplingParams())
        tokens = [next(events) for _ in range(5)]
        assert all(isinstance(token, GeneratedToken) for token in tokens)
        runner.bias[END] = 1000.0
        assert last(events).finish.cause == "eos"
        assert rendered(chat, tokenizer) == [*chat.tokens, *b"\n"]


def prompt_of(chat: Conversation, tokenizer: ByteTokenizer, text: str) -> list[int]:
    """What a cold cache would be given for the next message."""
    messages = [*chat.messages, {"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(written)


def test_an_answer_whose_text_is_read_in_other_tokens_is_computed_again() -> None:
    chat, runner, tokenizer = make_chat()
    runner.bias = dict.fromkeys(range(128, 256), 100.0)  # no text at all
    before = len(prompt_of(chat, tokenizer, "hello"))
    last(chat.say("hello", SAY))
    want = prompt_of(chat, tokenizer, "again")
    result = last(chat.say("again", SAY))
    assert list(chat.tokens)[: len(want)] == want
    assert result.usage.cached_tokens == before


def test_a_template_that_rewrites_old_answers_is_read_as_it_writes_them() -> None:
    chat, _, tokenizer = make_chat()

    def forgetful(conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        kept = [
            {**m, "content": m["content"][:3] + "..."} if m["role"] == "assistant" else m
            for m in conversation
        ]
        return ByteTokenizer.apply_chat_template(
            tokenizer, kept, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    tokenizer.apply_chat_template = forgetful  # type: ignore[method-assign,assignment]
    for turn in range(3):
        want, before = prompt_of(chat, tokenizer, f"message {turn}"), list(chat.tokens)
        result = last(chat.say(f"message {turn}", SAY))
        assert list(chat.tokens)[: len(want)] == want
        assert result.usage.cached_tokens == max(0, len(before) - 8 + 3)


def test_a_template_that_leaves_out_old_answers_is_read_without_them() -> None:
    chat, _, tokenizer = make_chat()

    def only_users(conversation: Any, **options: Any) -> str:
        kept = [m for m in conversation if m["role"] == "user"]
        return ByteTokenizer.apply_chat_template(tokenizer, kept, **options)

    tokenizer.apply_chat_template = only_users  # type: ignore[method-assign,assignment]
    last(chat.say("hello", SAY))
    last(chat.say("again", SAY))
    assert tokenizer.decode(list(chat.tokens)[:-8]) == (
        "<user>hello<end>\n<user>again<end>\n<assistant>"
    )


def test_a_template_that_refuses_is_quoted() -> None:
    chat, _, tokenizer = make_chat()

    def refuse(*args: object, **options: object) -> str:
        raise ValueError("roles must alternate")

    tokenizer.apply_chat_template = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ModelError, match="refuses these messages: roles must alternate"):
        chat.say("hello", SAY)
    assert (chat.messages, chat.tokens, chat.n_turns) == ([], [], 0)


def test_without_a_template_there_is_no_chat() -> None:
    cache = make_cache("seq")
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="the model has no chat template"):
        Conversation(HashRunner(cache, VOCAB), cache, tokenizer)


def test_an_answer_with_another_end_is_ended_as_the_template_does() -> None:
    other_end = ord("q")
    cache = make_cache("seq", 512, FULL_PARAMS)
    runner = HashRunner(cache, VOCAB)
    tokenizer = ByteTokenizer()
    chat = Conversation(runner, cache, tokenizer, eos_token_ids={END, other_end})
    runner.bias = {other_end: 1000.0}
    last(chat.say("hello", SAY))
    assert chat.tokens[-1] == other_end
    last(chat.say("again", SAY))
    assert other_end not in chat.tokens[:-1]
    chat.undo()
    assert chat.tokens[-1] == other_end
    last(chat.say("again", SAY))
    assert other_end not in chat.tokens[:-1]
    assert rendered(chat, tokenizer) == [*chat.tokens[:-1], END, *b"\n"]


# Going back ---------------------------------------------------------------------------------------


@every_cache
def test_undo_takes_back_the_last_turn_and_keeps_the_cache_of_those_before(kind: str) -> None:
    chat, runner, _ = make_chat(kind)
    last(chat.say("one", SAY))
    want = last(chat.say("two", SAY))
    state = (list(chat.tokens), [dict(message) for message in chat.messages])
    last(chat.say("three", SAY))
    assert chat.undo() == "three"
    assert (chat.tokens, chat.messages) == state
    assert chat.undo() == "two"
    n_first = len(chat.tokens)
    assert chat.cached_tokens == n_first
    runner.forwards.clear()
    again = last(chat.say("two", SAY))
    assert again.token_ids == want.token_ids
    assert again.usage.cached_tokens == n_first
    assert (chat.tokens, chat.messages) == state


def test_undo_of_a_turn_that_read_the_answer_before_it_in_other_tokens_keeps_what_is_true() -> None:
    chat, runner, tokenizer = make_chat()
    runner.bias = dict.fromkeys(range(128, 256), 100.0)  # no text at all
    before = len(prompt_of(chat, tokenizer, "hello"))
    last(chat.say("hello", SAY))
    last(chat.say("again", SAY))
    chat.undo()
    assert chat.cached_tokens == before
    want = prompt_of(chat, tokenizer, "other")
    result = last(chat.say("other", SAY))
    assert chat.tokens == [*want, *result.token_ids]
    cold, _, _ = make_chat()
    cold._runner.bias = runner.bias  # type: ignore[attr-defined]
    cold.messages = chat.messages[:2]
    assert last(cold.say("other", SAY)).token_ids == result.token_ids


def test_undo_of_nothing_is_none() -> None:
    chat, _, _ = make_chat()
    assert chat.undo() is None


@every_cache
def test_undo_behind_a_window_computes_the_history_again(kind: str) -> None:
    cache = make_cache(kind, 600)
    runner = HashRunner(cache, VOCAB)
    chat = Conversation(runner, cache, ByteTokenizer(), eos_token_ids={END})
    want = last(chat.say("one", SAY))
    first = list(chat.tokens)
    want = last(chat.say("two", SAY))
    chat.undo()
    last(chat.say("a longer message " * 20, SamplingParams(max_tokens=60)))
    chat.undo()
    assert chat.tokens == first
    again = last(chat.say("two", SAY))
    assert again.token_ids == want.token_ids


@every_cache
def test_reset_forgets_all_but_the_system_message(kind: str) -> None:
    chat, _, _ = make_chat(kind, system="be brief")
    want = last(chat.say("one", SAY))
    last(chat.say("two", SAY))
    chat.reset()
    assert (chat.n_turns, chat.cached_tokens, chat.tokens) == (0, 0, [])
    again = last(chat.say("one", SAY))
    assert again.token_ids == want.token_ids
    assert again.usage.cached_tokens == 0


@every_cache
def test_an_answer_that_is_given_up_stays_as_far_as_it_came(kind: str) -> None:
    chat, _, tokenizer = make_chat(kind)
    events = chat.say("hello", SamplingParams())
    answer = ""
    for _ in range(4):
        event = next(events)
        assert isinstance(event, GeneratedToken)
        answer += event.text
    assert chat.messages[-1] == {"role": "assistant", "content": answer}
    result = last(chat.say("go on", SAY))
    assert result.usage.cached_tokens == 9 + 4 - 1
    assert rendered(chat, tokenizer) == [*chat.tokens, END, *b"\n"]


@every_cache
def test_a_message_without_room_changes_nothing(kind: str) -> None:
    chat, runner, _ = make_chat(kind, capacity=60)
    last(chat.say("one", SAY))
    state = (list(chat.tokens), [dict(m) for m in chat.messages], chat.n_turns)
    runner.forwards.clear()
    with pytest.raises(PromptError, match="of them new; the cache has"):
        chat.say("x" * 60, SAY)
    assert (chat.tokens, chat.messages, chat.n_turns) == state
    assert runner.forwards == []
    assert isinstance(last(chat.say("two", SAY)), Generation)


def test_a_message_may_hold_any_text() -> None:
    chat, _, _ = make_chat()
    last(chat.say("hello", SAY))
    before = len(chat.tokens)
    last(chat.say("kvcellar-answer", SAY))
    assert b"kvcellar-answer" in bytes(token for token in chat.tokens[before:] if token < 256)


# Models that cannot be cut back everywhere --------------------------------------------------------


def without_thoughts(tokenizer: ByteTokenizer) -> None:
    """Make the template leave out what old answers begin with."""

    def forgetful(conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        kept = [
            {**m, "content": m["content"][3:]} if m["role"] == "assistant" else m
            for m in conversation
        ]
        return ByteTokenizer.apply_chat_template(
            tokenizer, kept, add_generation_prompt=add_generation_prompt, tokenize=tokenize
        )

    tokenizer.apply_chat_template = forgetful  # type: ignore[method-assign,assignment]


def fresh(chat: Conversation) -> Generation:
    """What the last answer would be with nothing in the cache."""
    cold, _, _ = make_chat("seq", params=STATE_PARAMS)
    cold.messages = chat.messages[:-2]
    without_thoughts(cold._tokenizer)  # type: ignore[arg-type]
    return last(cold.say(chat.messages[-2]["content"], SAY))


@every_cache
@pytest.mark.parametrize("n_slots", [2, 3, 64])
def test_a_turn_whose_thoughts_are_dropped_goes_on_from_what_the_user_said(
    kind: str, n_slots: int
) -> None:
    chat, _, tokenizer = make_chat(kind, params=STATE_PARAMS, n_slots=n_slots)
    without_thoughts(tokenizer)
    for turn in range(5):
        said = tokenizer.apply_chat_template(
            chat.messages[:-1], add_generation_prompt=False, tokenize=False
        )
        result = last(chat.say(f"message {turn}", SAY))
        assert result.token_ids == fresh(chat).token_ids
        want = len(tokenizer.encode(said)) if n_slots > 2 else 0  # there is no slot to spare
        assert result.usage.cached_tokens == want


@every_cache
def test_undo_goes_back_to_the_states_before_the_turn(kind: str) -> None:
    chat, _, _ = make_chat(kind, params=STATE_PARAMS)
    for turn in range(3):
        held = chat.cached_tokens
        last(chat.say(f"message {turn}", SAY))
    chat.undo()
    assert chat.cached_tokens == held > 0
    result = last(chat.say("message 2", SAY))
    assert result.usage.cached_tokens == held
