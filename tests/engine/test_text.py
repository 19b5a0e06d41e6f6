"""Text that comes piece by piece: whole characters, exact spaces, and no leak of a stop text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.loop.text import REPLACEMENT, Detokenizer, StopMatcher, TextStream
from kvcellar.errors import ConfigError
from kvcellar.history import History
from tests.engine.fakes import ByteTokenizer

TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters=REPLACEMENT),
        st.sampled_from("aé€😀👩‍👩‍👧 \n▁"),
    ),
    max_size=30,
)


class PieceTokenizer:
    """Token i is the i-th of some byte strings, cut anywhere: what a byte-level BPE learns."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")


@st.composite
def pieces(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes, cut at any places; some pieces are empty, as special tokens are."""
    data = draw(source)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def stream_of(tokenizer: Any, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, History(context))
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(cut=pieces(TEXT.map(str.encode)))
def test_the_stream_is_the_text_and_has_no_half_character(cut: list[bytes]) -> None:
    stream = stream_of(PieceTokenizer(cut), range(len(cut)))
    assert "".join(stream) == b"".join(cut).decode()
    assert not any(REPLACEMENT in piece for piece in stream)


@given(cut=pieces(TEXT.map(str.encode)))
def test_text_comes_with_the_token_that_makes_it_whole(cut: list[bytes]) -> None:
    stream = stream_of(PieceTokenizer(cut), range(len(cut)))
    for i in range(len(cut)):
        so_far = b"".join(cut[: i + 1]).decode(errors="ignore")
        assert "".join(stream[: i + 1]) == so_far


@given(cut=pieces(st.binary(max_size=60)))
def test_bytes_that_are_no_text_come_out_as_they_are_decoded_at_once(cut: list[bytes]) -> None:
    stream = stream_of(PieceTokenizer(cut), range(len(cut)))
    assert "".join(stream) == b"".join(cut).decode(errors="replace")


@given(
    data=st.lists(st.integers(0x80, 0xFF), min_size=100, max_size=400),
    tail=TEXT.map(lambda text: list(text.encode())),
)
def test_a_long_run_of_bytes_that_are_no_text_neither_stalls_nor_loses_any(
    data: list[int], tail: list[int]
) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for token_id in [*data, *tail]:
        text += detokenizer.push(token_id)
        assert len(detokenizer._window) < 140
    assert text + detokenizer.flush() == tokenizer.decode([*data, *tail])


@given(cut=pieces(TEXT.map(str.encode)), at=st.integers(0, 20))
def test_behind_a_prompt_only_the_new_text_comes(cut: list[bytes], at: int) -> None:
    at = min(at, len(cut))
    while b"".join(cut[:at]).decode(errors="replace").endswith(REPLACEMENT):
        at -= 1
    stream = stream_of(PieceTokenizer(cut), range(at, len(cut)), context=range(at))
    assert "".join(stream) == b"".join(cut[at:]).decode()


def test_a_character_that_the_prompt_began_comes_whole() -> None:
    euro = list("€".encode())
    assert stream_of(ByteTokenizer(), [*euro[2:], 0x61], context=[0x62, *euro[:2]]) == [
        "€",
        "a",
        "",
    ]


def test_special_tokens_have_no_text() -> None:
    ids = [0x61, ByteTokenizer.END, 0x62, *[ByteTokenizer.END] * 50, *"é".encode()]
    detokenizer = Detokenizer(ByteTokenizer())
    assert "".join(detokenizer.push(token_id) for token_id in ids) == "abé"
    assert len(detokenizer._window) < 8


# Decoders of real tokenizers ----------------------------------------------------------------------


def sentencepiece_like() -> Any:
    """Words with a leading ▁, and a token for each byte of everything else, as Llama 2 has."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["▁", "▁the", "▁cat", "s", "▁sat", ",", "▁a", "b", "é"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return _Fast(tokenizer)


def metaspace() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["▁", "▁the", "▁cat", "s", "▁sat", ",", "▁a", "b", "é"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return _Fast(tokenizer)


class _Fast:
    """A ``tokenizers.Tokenizer`` with the face of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


WORD_IDS = st.lists(st.integers(256, 264), max_size=20)
UNITS = st.lists(
    st.one_of(
        st.integers(256, 264).map(lambda i: [i]),
        st.sampled_from("€😀é漢").map(lambda c: list(c.encode())),  # byte by byte
    ),
    max_size=12,
)


@given(units=UNITS, n_context=st.integers(0, 12))
def test_words_with_leading_spaces_and_bytes_stream_as_they_decode_at_once(
    units: list[list[int]], n_context: int
) -> None:
    tokenizer = sentencepiece_like()
    context = [i for unit in units[:n_context] for i in unit]
    ids = [i for unit in units[n_context:] for i in unit]
    whole, before = tokenizer.decode([*context, *ids]), tokenizer.decode(context)
    stream = stream_of(tokenizer, ids, context)
    assert before + "".join(stream) == whole
    assert not any(REPLACEMENT in piece for piece in stream)


@given(ids=st.lists(st.integers(0, 8), max_size=20), n_context=st.integers(0, 10))
def test_metaspace_words_stream_as_they_decode_at_once(ids: list[int], n_context: int) -> None:
    tokenizer = metaspace()
    stream = stream_of(tokenizer, ids[n_context:], ids[:n_context])
    assert tokenizer.decode(ids[:n_context]) + "".join(stream) == tokenizer.decode(ids)


# Stop texts ---------------------------------------------------------------------------------------

AB = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The oracle: read one more character at a time until some stop text is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(chunks=st.lists(AB, max_size=8), stops=STOPS)
def test_stop_texts_cut_where_a_search_over_the_whole_text_does(
    chunks: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    want, stop = cut_at_first_stop("".join(chunks), stops)
    for chunk in chunks:
        shown += matcher.push(chunk)
        assert want.startswith(shown), "nothing of a stop text leaks"
    assert shown + matcher.flush() == want
    assert matcher.matched == stop


@given(chunks=st.lists(AB, max_size=8), stops=STOPS)
def test_only_what_may_become_a_stop_text_is_held_back(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for chunk in chunks:
        text += chunk
        shown += matcher.push(chunk)
        if matcher.matched is None:
            held = text[len(shown) :]
            assert text == shown + held
            assert not held or any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one character"):
        StopMatcher(["a", ""])


@given(text=TEXT, stop=st.text(st.sampled_from("aé€😀"), min_size=1, max_size=2))
def test_a_stop_text_is_found_across_the_bytes_of_its_characters(text: str, stop: str) -> None:
    stream = TextStream(ByteTokenizer(), [stop])
    shown = ""
    for token_id in text.encode():
        shown += stream.push(token_id)
        if stream.matched_stop:
            break
    shown += stream.flush()
    assert shown == stream.text == text.partition(stop)[0]
    assert (stream.matched_stop is not None) == (stop in text)


def test_a_character_is_looked_at_once_however_many_stop_texts_there_are() -> None:
    stops = ["a" * n + "b" for n in range(1, 200)] + [f"never {i}" for i in range(20_000)]
    text = "a" * 20_000
    started = time.process_time()
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(char) for char in text)
    assert text.startswith(shown) and len(shown) == len(text) - 199 and matcher.matched is None
    assert matcher.push("b") == "" and matcher.matched == "a" * 199 + "b"
    assert time.process_time() - started < 20, "a search for each of them takes minutes"


@given(cut=pieces(TEXT.map(str.encode)), data=st.data())
def test_a_mark_stands_where_its_token_came_and_nothing_else_changes(
    cut: list[bytes], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(cut)))
    mark, n = len(cut), len(b"".join(cut[:at]))
    stream = TextStream(PieceTokenizer([*cut, b"never shown"]), marks={mark: "\udc00"})
    text = "".join(map(stream.push, [*range(at), mark, *range(at, mark)])) + stream.flush()
    before, _, behind = text.partition("\udc00")
    whole = b"".join(cut)
    assert before == whole[:n].decode(errors="replace")
    if not before.endswith(REPLACEMENT):  # which stands for half a character
        assert before + behind == whole.decode()
    assert stream.text == text


def test_a_stop_text_may_have_a_mark() -> None:
    tokenizer = PieceTokenizer([b"a", b"b", b""])
    stream = TextStream(tokenizer, ["\udc00b"], marks={2: "\udc00"})
    assert [stream.push(i) for i in (0, 2, 0, 2)] == ["a", "", "\udc00a", ""]
    assert stream.push(1) == "" and stream.matched_stop == "\udc00b"
