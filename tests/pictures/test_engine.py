"""The engine with pictures: what it says is what a model says that reads their rows as tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.agents import ModelHost
from kvcellar.engine import Conversation, EngineConfig, FinishEvent, Request, SamplingParams, last
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.engine.speculate import NgramDrafter
from kvcellar.errors import PictureError
from kvcellar.hosting.pictures import HostLooks
from kvcellar.models.seeing import EncodedPicture
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.shelf import PictureShelf
from kvcellar.pictures.tokens import placeholders
from kvcellar.space import Space
from tests.agents.fakes import LETTERS
from tests.engine.fakes import FULL_PARAMS, MIXED_PARAMS, PARAMS, logits_of, make_cache, wanted
from tests.pictures.fakes import (
    PAD,
    VOCAB,
    FakeReader,
    PictureTokenizer,
    SeeingRunner,
    as_read,
    make_seeing_host,
    picture_file,
)

SIZES = [(16, 16), (32, 24), (64, 64), (80, 72)]
PICTURES = [Picture.read(picture_file(i, *size)) for i, size in enumerate(SIZES)]


@contextmanager
def host_of(**settings: Any) -> Iterator[ModelHost]:
    host = make_seeing_host(**settings)
    try:
        for picture in PICTURES:
            host.shelf.add(picture)
        yield host
    finally:
        host.close()


def reader_of(host: ModelHost) -> Any:
    assert host.looks is not None
    return host.looks.reader


def tokens_of(host: ModelHost, i: int) -> list[int]:
    """A picture as a prompt has it."""
    look = reader_of(host).look(PICTURES[i])
    rows = placeholders(PAD, PICTURES[i].name, look.n_rows, look.grid)
    return [ord("["), *rows.tolist(), ord("]")]


def said_after(prompt: Sequence[int], n: int, params: Any = FULL_PARAMS) -> list[int]:
    tokens = as_read(np.array(list(prompt), np.int64))
    for _ in range(n):
        logits = logits_of(tokens, VOCAB, params)
        logits[list(LETTERS)] += 100.0
        tokens.append(int(np.argmax(logits)))
    return tokens[-n:]


def ends_of(host: ModelHost, prompts: Sequence[Sequence[int]], n: int = 4) -> list[FinishEvent]:
    """The ends of requests that came at once, in their order."""
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    ends: dict[int, FinishEvent] = {}
    done = threading.Event()

    def take(event: FinishEvent) -> None:
        ends[event.request_id] = event
        if len(ends) == len(prompts):
            done.set()

    ids = [host.service.submit_quietly(Request(p, params), take).result() for p in prompts]
    assert done.wait(120)
    return [ends[i] for i in ids]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.one_of(st.integers(0, 3), st.binary(max_size=30)), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    is_whole=st.booleans(),
    budget=st.sampled_from([16, 64]),
    params=st.sampled_from([FULL_PARAMS, PARAMS, MIXED_PARAMS]),
    rounds=st.integers(1, 2),
    kind=st.sampled_from(["cells", "paged"]),
)
def test_any_texts_and_pictures_are_read_as_they_are(
    texts: list[list[int | bytes]],
    is_whole: bool,
    budget: int,
    params: Any,
    rounds: int,
    kind: str,
) -> None:
    """In chunks, in flat batches, beside others that begin alike, and a second time."""
    config = EngineConfig(max_num_batched_tokens=budget)
    with host_of(is_whole=is_whole, config=config, params=params, kind=kind) as host:
        prompts = [
            [
                1,
                *(
                    token
                    for part in parts
                    for token in (tokens_of(host, part) if isinstance(part, int) else part)
                ),
            ]
            for parts in texts
        ]
        for _ in range(rounds):
            for prompt, end in zip(prompts, ends_of(host, prompts), strict=True):
                assert end.error is None, end.error
                assert list(end.token_ids) == said_after(prompt, 4, params)
        assert host.service.run(lambda engine: engine.cache.seq_ids()).result() == []


def test_a_picture_is_encoded_once_wherever_it_stands() -> None:
    with host_of() as host:
        one = tokens_of(host, 2)
        prompts = [[1, *one, *b"what is it?"], [*b"and here", *one], [*one, *one]]
        for prompt in prompts:
            (end,) = ends_of(host, [prompt])
            assert list(end.token_ids) == said_after(prompt, 4)
        assert reader_of(host).encoded == [PICTURES[2].name]
        assert reader_of(host).n_loads == 1


def test_what_the_cache_holds_of_a_picture_is_not_encoded_again() -> None:
    with host_of() as host:
        prompt = [1, *tokens_of(host, 2), *b"what is it?"]
        ends_of(host, [prompt])
        host.engine.scheduler.rows._kept.clear()  # type: ignore[union-attr]
        (end,) = ends_of(host, [[*prompt, *b" and why?"]])
        assert end.usage is not None and end.usage.cached_tokens >= len(prompt)
        assert reader_of(host).encoded == [PICTURES[2].name]


def test_another_picture_shares_what_is_before_it_alone() -> None:
    first, second = (Picture.read(picture_file(seed, 64, 64)) for seed in (7, 8))
    with host_of() as host:
        ends = []
        for picture in (first, second):
            host.shelf.add(picture)
            rows = placeholders(PAD, picture.name, 64, (8, 8)).tolist()
            ends += ends_of(host, [[*b"look at this: ", *rows, *b"what is it?"]])
        assert ends[0].token_ids != ends[1].token_ids
        assert ends[1].usage is not None and ends[1].usage.cached_tokens == len(b"look at this: ")


@pytest.mark.parametrize("is_whole", [False, True])
def test_names_that_begin_alike_are_other_pictures_from_their_first_row(is_whole: bool) -> None:
    """A digest is spread over the first rows: what two share of it is not reused."""
    names = ["0123456789" + letter * 10 for letter in "abc"]
    data = picture_file(5, 32, 32)
    with host_of(is_whole=is_whole) as host:
        for name in names:
            host.shelf.add(Picture(name, data, "image/png", 32, 32))
            prompt = [*b"look: ", *placeholders(PAD, name, 16, (4, 4)).tolist(), *b"well?"]
            for more in (b"", b" and then?"):  # the second time behind what is kept of the first
                (end,) = ends_of(host, [[*prompt, *more]])
                assert list(end.token_ids) == said_after([*prompt, *more], 4)
            (end,) = ends_of(host, [[*prompt, *b"."]])
            if name != names[0]:
                assert end.usage is not None and end.usage.cached_tokens == len(b"look: ")


def test_others_go_on_while_a_picture_is_encoded() -> None:
    with host_of() as host:
        reader_of(host).may_encode.clear()
        late: list[FinishEvent] = []
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompt = [*b"before it ", *tokens_of(host, 3), *b"behind it"]
        host.service.submit_quietly(Request(prompt, params), late.append).result()
        for text in (b"one", b"two", b"three"):
            (end,) = ends_of(host, [[*text]], 8)
            assert list(end.token_ids) == said_after(text, 8)
        assert not late
        reader_of(host).may_encode.set()
        until = time.monotonic() + 60
        while not late and time.monotonic() < until:
            time.sleep(0.01)
        assert list(late[0].token_ids) == said_after(prompt, 4)


def test_a_picture_on_its_way_holds_no_place_that_a_text_could_use() -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=2)
    with host_of(config=config) as host:
        forward, widest = host.engine.cache.begin_step, []

        def counted(counts: Any) -> Any:
            widest.append(len(counts))
            return forward(counts)

        host.engine.cache.begin_step = counted  # type: ignore[method-assign]
        reader_of(host).may_encode.clear()
        late: list[FinishEvent] = []
        done = threading.Event()

        def take(event: FinishEvent) -> None:
            late.append(event)
            if len(late) == 5:
                done.set()

        params = SamplingParams(max_tokens=8, ignore_eos=True)
        prompts = [[*b"before ", *tokens_of(host, i), *b"behind"] for i in (0, 1, 2)]
        ids = [host.service.submit_quietly(Request(p, params), take).result() for p in prompts]
        texts = [[*b"one"], [*b"two"], [*b"three"], [*b"four"]]
        for text, end in zip(texts, ends_of(host, texts, 8), strict=True):
            assert list(end.token_ids) == said_after(text, 8)
        assert not late
        more = [[*b"five"], [*b"six"]]
        reader_of(host).may_encode.set()
        ids += [host.service.submit_quietly(Request(p, params), take).result() for p in more]
        assert done.wait(60)
        said = {event.request_id: list(event.token_ids) for event in late}
        assert [said[i] for i in ids] == [said_after(p, 8) for p in (*prompts, *more)]
        assert max(widest) == 2, "no step has more sequences than were allowed"


def test_a_picture_that_cannot_be_encoded_ends_its_request_alone() -> None:
    with host_of() as host:
        reader_of(host).error = PictureError("too narrow for this model")
        prompts = [[*tokens_of(host, 1), *b"what?"], [*b"a text"]]
        bad, good = ends_of(host, prompts)
        assert bad.reason == "error" and isinstance(bad.error, PictureError)
        assert list(good.token_ids) == said_after(prompts[1], 4)
        reader_of(host).error = None
        (again,) = ends_of(host, prompts[:1])
        assert list(again.token_ids) == said_after(prompts[0], 4)


def test_a_model_that_reads_text_alone_refuses_pictures() -> None:
    with host_of() as host:
        prompt = [1, *tokens_of(host, 1)]
        host.engine.scheduler.rows = None
        with pytest.raises(PictureError, match="reads text alone"):
            host.service.submit_quietly(Request(prompt), lambda end: None).result()


def test_scores_of_pictures_are_refused() -> None:
    with host_of() as host, pytest.raises(PictureError, match="prompt_logprobs"):
        request = Request([1, *tokens_of(host, 1)], prompt_logprobs=0)
        host.service.submit_quietly(request, lambda end: None).result()


def test_no_guess_is_a_row_of_a_picture() -> None:
    """What repeats is guessed, but never a placeholder; and guesses change nothing."""
    config = EngineConfig(max_num_batched_tokens=64, verify_all_drafts=True)
    with host_of(drafter=NgramDrafter(), config=config) as host:
        one = tokens_of(host, 1)
        said = said_after([*b"abc"], 6)
        prompt = [*b"abc", *said, *one, *b"abc", *said, *one, *b"abc"]
        (end,) = ends_of(host, [prompt], 24)
        assert list(end.token_ids) == said_after(prompt, 24)
    drafter = NgramDrafter()
    (draft,) = drafter.propose([wanted(0, [*b"abcde", *one, *b"abcde"], 8)])
    assert draft.tokens == (ord("["),)


def test_sequences_with_pictures_give_way_and_come_back() -> None:
    with host_of(capacity=320) as host:
        prompts = [[i, *tokens_of(host, 3), *b"what is it?"] for i in range(4)]
        for prompt, end in zip(prompts, ends_of(host, prompts, 30), strict=True):
            assert end.error is None, end.error
            assert list(end.token_ids) == said_after(prompt, 30)


def test_rows_are_kept_as_far_as_there_is_room() -> None:
    made: list[str] = []

    def encode(name: str) -> EncodedPicture:
        made.append(name)
        return EncodedPicture(np.zeros(1), (), 100)

    rows = PictureRows(encode, most_bytes=250)

    def taken(name: str) -> None:
        rows.begin_step()
        while rows.take(name) is None:
            rows.wait(0.01)
            rows.begin_step()

    for name in ("a", "b", "c", "c", "a"):
        taken(name)
    assert made == ["a", "b", "c", "a"] and rows.counts.picture_bytes <= 250
    assert rows.counts.encoded_pictures == 4 and rows.counts.reused_pictures == 1
    rows.close()


def test_nothing_is_done_or_kept_for_those_who_left() -> None:
    made: list[str] = []
    may_go = threading.Event()

    def encode(name: str) -> EncodedPicture:
        made.append(name)
        assert may_go.wait(60)
        if name == "bad":
            raise PictureError("bad")
        return EncodedPicture(np.zeros(1), (), 100)

    rows = PictureRows(encode, most_bytes=150)
    rows.begin_step()
    for name in ("bad", "a", "b"):
        assert rows.take(name) is None
    while not made:
        time.sleep(0.001)
    for _ in range(3):  # all three leave
        rows.begin_step()
    may_go.set()
    while rows._queued:
        time.sleep(0.001)
    assert made == ["bad"] and not rows._kept
    rows.begin_step()
    assert rows.take("bad") is None, "who asks anew is not told what others were told"
    for name in ("a", "b", "c"):
        assert rows.take(name) is None
    for _ in range(1000):
        rows.begin_step()
        if rows.take("c") is not None:
            break
        rows.wait(0.01)
    assert rows.counts.picture_bytes <= 200
    rows.close()


def test_closing_waits_for_one_picture_and_not_for_all() -> None:
    made: list[str] = []

    def encode(name: str) -> EncodedPicture:
        made.append(name)
        time.sleep(0.05)
        return EncodedPicture(np.zeros(1), (), 100)

    rows = PictureRows(encode)
    rows.begin_step()
    for i in range(20):
        assert rows.take(str(i)) is None
    while not made:
        time.sleep(0.001)
    rows.close()
    assert len(made) <= 2


def test_guests_do_not_learn_what_others_have_shown() -> None:
    with host_of() as host:
        prompt = [*tokens_of(host, 2), *b"what is it?"]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for salt in ("a", "b", "a"):
            ends: list[FinishEvent] = []
            request = Request(prompt, params, space=Space(salt=salt))
            host.service.submit_quietly(request, ends.append).result()
            while not ends:
                time.sleep(0.002)
            assert list(ends[0].token_ids) == said_after(prompt, 4)
        assert reader_of(host).encoded == [PICTURES[2].name] * 2


def test_a_text_goes_on_beside_a_picture_whatever_the_policy() -> None:
    config = EngineConfig(max_num_batched_tokens=64, policy="prefill-first")
    with host_of(config=config) as host:
        reader_of(host).may_encode.clear()
        late: list[FinishEvent] = []
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompt = [*b"before it ", *tokens_of(host, 3)]
        host.service.submit_quietly(Request(prompt, params), late.append).result()
        (end,) = ends_of(host, [[*b"one"]], 8)
        assert list(end.token_ids) == said_after(b"one", 8) and not late
        reader_of(host).may_encode.set()


def test_a_prompt_does_not_end_inside_of_a_picture() -> None:
    with host_of() as host, pytest.raises(PictureError, match="ends inside of a picture"):
        request = Request([1, *tokens_of(host, 1)[:3]])
        host.service.submit_quietly(request, lambda end: None).result()


@pytest.mark.parametrize("kind", ["contiguous", "seq", "tree", "paged"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_the_plain_loop_reads_pictures_as_the_engine_does(kind: str, is_whole: bool) -> None:
    """In chunks smaller than a picture, with undo, and going on behind one."""
    cache = make_cache(kind, 512, FULL_PARAMS)
    runner = SeeingRunner(cache, VOCAB)
    runner.is_whole, runner.bias = is_whole, dict(LETTERS)
    shelf = PictureShelf()
    for picture in PICTURES:
        shelf.add(picture)
    eyes = HostLooks(FakeReader(is_whole=is_whole), shelf)
    talk = Conversation(runner, cache, PictureTokenizer(), prefill_chunk=16, eyes=eyes)
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def say(text: str, *names: str) -> None:
        end = last(talk.say(text, params, pictures=names))
        n = len(end.token_ids)
        assert list(end.token_ids) == said_after(talk.tokens.tokens[:-n].tolist(), n)

    say("what is this?", PICTURES[2].name)
    say("and these?", PICTURES[1].name, PICTURES[3].name)
    assert talk.undo() == "and these?"
    say("and that?", PICTURES[1].name)
    say("no picture")
    names = [PICTURES[i].name for i in (2, 1, 3, 1)]
    reader: Any = eyes.reader
    assert reader.encoded == names
