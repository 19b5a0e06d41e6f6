"""Filling in the middle: the tokens with which a model was trained to write between two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.models.text.controls import encode_text
from kvcellar.models.text.tokenizer import opening_tokens


@dataclass(frozen=True, slots=True)
class FillWords:
    """Names of a family's tokens.

    Attributes:
        prefix: before the text that comes before.
        suffix: before the text that comes behind.
        middle: where the model writes.
        ends: what it writes at its end, besides the end of a text.
        file: before the name of another file.
        is_suffix_first: whether the text behind is read first.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    file: str = ""
    is_suffix_first: bool = False


FAMILIES = (
    FillWords(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        "<|file_sep|>",
    ),
    FillWords(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<repo_name>"),
        "<file_sep>",
    ),
    FillWords("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),
    FillWords("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillWords("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillWords("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    FillWords("[PREFIX]", "[SUFFIX]", "[MIDDLE]", is_suffix_first=True),
)
"""Qwen's coders and CodeGemma, StarCoder and Granite, the first StarCoder, DeepSeek, GLM, Code
Llama, Codestral."""


@dataclass(frozen=True, slots=True)
class FillTokens:
    """Ids of these tokens in one vocabulary.

    Attributes:
        words: their names.
        ids: of each name that the vocabulary has.
    """

    words: FillWords
    ids: dict[str, int]

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens with which a filling ends."""
        return tuple(self.ids[name] for name in self.words.ends if name in self.ids)


def fill_tokens(tokenizer: Any) -> FillTokens | None:
    """Return a model's tokens for filling in; None: it was not trained to."""
    vocabulary = tokenizer.get_vocab()
    for words in FAMILIES:
        if all(name in vocabulary for name in (words.prefix, words.suffix, words.middle)):
            names = {words.prefix, words.suffix, words.middle, words.file, *words.ends}
            return FillTokens(words, {n: int(vocabulary[n]) for n in names if n in vocabulary})
    return None


def fill_prompt(
    tokenizer: Any,
    fill: FillTokens,
    before: str,
    behind: str,
    *,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the prompt behind which a model writes what belongs between two texts.

    Args:
        tokenizer: of the model.
        fill: its tokens for filling in.
        before: text before the gap.
        behind: text behind it.
        begun: text with which the filling begins.
        files: names and texts of others, which are read first.
    """
    words, ids = fill.words, fill.ids

    def plain(text: str) -> list[int]:
        return encode_text(tokenizer, text, ids) if text else []

    head: list[int] = opening_tokens(tokenizer)
    for name, text in files:
        head += [ids[words.file]] if words.file in ids else []
        head += plain(f"{name}\n{text}" if words.file in ids else f"{text}\n")
    if files and words.file in ids:
        head += [ids[words.file], *plain("filename\n")]
    first = [ids[words.prefix], *plain(before)]
    second = [ids[words.suffix], *plain(behind)]
    if words.is_suffix_first:
        first, second = second, first
        return [*head, *first, *second, *plain(begun)]
    return [*head, *first, *second, ids[words.middle], *plain(begun)]
