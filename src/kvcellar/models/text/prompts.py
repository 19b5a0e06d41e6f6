"""From messages to tokens: the one way by which a conversation becomes a prompt.

``render`` writes a conversation as its template does, ``encode`` makes tokens of that. Whoever
counts, answers or continues a conversation calls these two, so that all mean the same tokens.

Text of messages stays text: where it spells a control token (``<|im_end|>``), the model reads these
characters, and not the token. Only what the template itself writes becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcellar.errors import ModelError, TemplateLimitError
from kvcellar.models.seeing import Look
from kvcellar.models.text.controls import controls_of, free_mark, is_rendered_here
from kvcellar.models.text.fitting import (
    apart_from_results,
    fit,
    has_result_pictures_moved,
    in_parts,
    reads_parts_alone,
    reads_thoughts,
    takes,
    thinking_in_parts,
    writes_text_alone,
)
from kvcellar.models.text.pictures import (
    behind_results,
    left_out,
    marked_pictures,
    names_in,
    picture_parts,
    with_looks,
)
from kvcellar.models.text.rendering import ask_renderer
from kvcellar.models.text.templates import check_template_kwargs, template_for
from kvcellar.pictures.tokens import placeholders
from kvcellar.valid import valid_text

_THOUGHT = "<think>"


class PromptTokenizer(Protocol):
    """Protocol of a tokenizer for prompts; those of transformers have it."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """Render messages as the text that the model was trained on."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the tokens of a text."""
        ...


class Looks(Protocol):
    """Protocol of what a model makes of pictures in a prompt."""

    @property
    def written(self) -> str:
        """The text that its chat template writes where a picture stands."""
        ...

    @property
    def in_text(self) -> str:
        """The text that stands for a picture where the template writes messages' text alone."""
        ...

    @property
    def token_id(self) -> int:
        """Id of the placeholder for a row of a picture."""
        ...

    def look(self, name: str) -> Look:
        """Return what stands in the prompt for a picture.

        Raises:
            PictureError: it is not here any more, or the model cannot read it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as its template writes it.

    Attributes:
        text: all of it.
        marked: the same with a mark before each control token that a message spells; None where
            none does.
        mark: that mark.
        is_literal: whether control tokens in messages become tokens, as the user wished.
        notes: what the template takes otherwise than it was sent, in sentences.
        pictures: names of the pictures in it and what stands for them, in their order.
        placeholder: id of the token for a row of a picture; -1 where there is none.
    """

    text: str
    marked: str | None = None
    mark: str = ""
    is_literal: bool = False
    notes: tuple[str, ...] = ()
    pictures: tuple[tuple[str, Look], ...] = ()
    placeholder: int = -1

    def behind(self, other: Rendered) -> Rendered:
        """Return what follows the beginning that it has in common with another of the same mark.

        Neither of them has pictures.
        """
        mine, its = self.marked or self.text, other.marked or other.text
        n = len(its)
        if not mine.startswith(its):
            n = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), n)
        rest = mine[n:]
        if not self.mark:
            return Rendered(rest, is_literal=self.is_literal)
        return Rendered(rest.replace(self.mark, ""), rest, self.mark)


def render(
    tokenizer: PromptTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    is_asking: bool = True,
    control_tokens_in_text: bool = False,
    looks: Looks | None = None,
) -> Rendered:
    """Write a conversation by the model's chat template.

    Where a message has ``pictures``, each a ``name`` and ``at``, the place in its content where it
    stands, the template is given parts in their place; one that writes text alone is given text
    with what stands for them.

    Args:
        tokenizer: of the model.
        messages: the conversation, oldest first.
        tools: definitions of tools, as the template takes them.
        template_kwargs: what else the template takes, such as ``enable_thinking``.
        is_asking: end with the opening of an answer; where the last message is an answer, with that
            answer as far as it goes.
        control_tokens_in_text: let messages spell control tokens.
        looks: at the pictures; None: the model reads text alone, and a line in their place.

    Raises:
        ModelError: there is no chat template, it refuses these messages, or it leaves pictures out.
        PictureError: a picture is not here any more, or the model cannot read it.
        TemplateLimitError: it takes more time, memory or output than is allowed; it was stopped.
        PromptError: the template takes no argument of such a name, or a text has so many
            noncharacters that its control tokens cannot be marked.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "the model has no chat template, so it is no chat model; give tokens or plain text, or "
            "load a model that is tuned for chat"
        )
    check_template_kwargs(tokenizer, template_kwargs or ())
    said = [dict(message) for message in messages]
    rest: Any = (None if tools is None else [dict(tool) for tool in tools], template_kwargs or {})
    picture_mark = ""
    names: list[str] = []
    lines: tuple[str, ...] = ()
    if any(message.get("pictures") for message in said):
        if looks is None:
            said, lines = left_out(said)
        else:
            picture_mark = free_mark((said, rest))
            names = names_in(said)
            said = marked_pictures(said, picture_mark)
    controls = None if control_tokens_in_text else controls_of(tokenizer)
    mark = ""
    if controls is not None and controls.is_spelt(said, rest, picture_mark):
        mark = free_mark((said, rest))
        said, rest = controls.marked(said, rest, mark, picture_mark)
    try:
        is_begun = is_asking and begun_of(said) is not None
        write = _continued if is_begun else _apply
        order: list[int] = []
        said_of = (looks.written, looks.in_text) if names and looks else ("", "")
        pictures = _Marked(picture_mark, order, *said_of)
        text, notes = write(tokenizer, said, rest[0], rest[1], is_asking, pictures)
    except TemplateLimitError:
        raise
    except Exception as error:  # templates raise errors of jinja's
        raise ModelError(f"the model's chat template refuses these messages: {error}") from error
    text, notes = valid_text(text), (*notes, *lines)  # templates may spell half of a character
    if mark:
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # what a template escaped
    seen: tuple[tuple[str, Look], ...] = ()
    if names:
        assert looks is not None, "else there are lines in their place"
        seen = tuple((names[i], looks.look(names[i])) for i in order)
        text = with_looks(text, looks.written, [look for _, look in seen], mark)
    found = Rendered(text, is_literal=control_tokens_in_text, notes=notes)
    if mark:
        found = Rendered(text.replace(mark, ""), text, mark, notes=notes)
    return replace(found, pictures=seen, placeholder=looks.token_id if seen and looks else -1)


def begun_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of an answer that a conversation ends with, which is to be gone on with.

    None where it ends otherwise, or with calls, behind which only their results may come.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    content = last.get("content")
    return content if isinstance(content, str) else None if content else ""


def encode_plain(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text that goes through no template.

    A text that spells the model's BOS at its beginning has it, and no second one before it.
    """
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=add_special_tokens)]
    bos = getattr(tokenizer, "bos_token_id", None)
    if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
        return ids[1:]
    return ids


def encode(tokenizer: PromptTokenizer, rendered: Rendered) -> list[int]:
    """Return the tokens of a rendered conversation, which has its special tokens already.

    Placeholders of pictures say which picture they stand for; see ``kvcellar.pictures.tokens``.

    Raises:
        PromptError: the text has noncharacters that are needed to tell its control tokens apart.
        PictureError: a picture is too small, or too large, to be told from others.
        ModelError: the tokenizer makes other tokens of placeholders.
    """
    ids = _encoded(tokenizer, rendered)
    if not rendered.pictures:
        return ids
    tokens = np.array(ids, np.int64)
    places = np.flatnonzero(tokens == rendered.placeholder)
    n_rows = sum(look.n_rows for _, look in rendered.pictures)
    if len(places) != n_rows:
        raise ModelError(
            f"the model's tokenizer makes {len(places)} placeholders of {n_rows} for "
            f"{len(rendered.pictures)} pictures, so they cannot be read; where the messages may "
            f"spell control tokens, leave that out"
        )
    at = 0
    for name, look in rendered.pictures:
        stop = at + look.n_rows
        tokens[places[at:stop]] = placeholders(rendered.placeholder, name, look.n_rows, look.grid)
        at = stop
    return [int(token) for token in tokens]


def _encoded(tokenizer: PromptTokenizer, rendered: Rendered) -> list[int]:
    """Return the ids of a rendered conversation in the vocabulary."""
    controls = None if rendered.is_literal else controls_of(tokenizer)
    if rendered.marked is None:
        ids = [int(i) for i in tokenizer.encode(rendered.text, add_special_tokens=False)]
        if controls is None or controls.are_all_written(rendered.text, ids):
            return ids
    assert controls is not None
    return controls.encode(rendered.marked or rendered.text, rendered.mark)


class _Marked(NamedTuple):
    """Pictures of a conversation on its way into a template.

    Attributes:
        mark: stands in texts before and behind the number of each; empty: there are none.
        order: gets their numbers in the order in which the template is given them.
        written: what the template writes for one.
        in_text: stands in a text for one, where the template writes text alone.
    """

    mark: str
    order: list[int]
    written: str
    in_text: str

    def is_in(self, message: Mapping[str, Any]) -> bool:
        """Return true if the text of a message has the mark of one."""
        return bool(self.mark) and self.mark in str(message.get("content") or "")


_MOVED = (
    "the model's chat template takes no pictures in results of tools; they are read in a message "
    "of the user behind them"
)

_APART = (
    "the model's chat template takes no user behind a result of a tool; a short answer is read "
    "between the result and its pictures"
)


def _continued(
    tokenizer: PromptTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
    is_asking: bool,
    pictures: _Marked,
) -> tuple[str, tuple[str, ...]]:
    """Write a conversation up to the end of its last answer, which is read as it was sent.

    As the template writes such an answer, where it writes all of it; else behind the opening of
    one, such as where it begins with a thought that it has not ended.
    """
    begun = begun_of(messages) or ""
    if begun and not begun.lstrip().startswith(_THOUGHT):
        end = free_mark((messages, tools, template_kwargs), 1)
        last = {**messages[-1], "content": begun + end}
        said = [*messages[:-1], last]
        text, notes = _apply(tokenizer, said, tools, template_kwargs, False, pictures)
        text = text.rpartition(end)[0]
        if text.endswith(begun):
            return text, notes
        if text.endswith(begun.lstrip()):  # templates trim
            return text.removesuffix(begun.lstrip()) + begun, notes
    text, notes = _apply(tokenizer, messages[:-1], tools, template_kwargs, is_asking, pictures)
    n = next((n for n in range(len(begun), 0, -1) if text.endswith(begun[:n])), 0)
    is_opened = n and begun[:n].strip() == _THOUGHT
    return text + begun[n if is_opened else 0 :], notes


def _apply(
    tokenizer: PromptTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template_kwargs: Mapping[str, Any],
    is_asking: bool,
    pictures: _Marked,
) -> tuple[str, tuple[str, ...]]:
    """Render a conversation by ``apply_chat_template``, made so that the template takes it.

    Where a text has the mark of pictures, the template is given a part for each, or what stands for
    one where it writes text alone.
    """
    if not is_rendered_here(tokenizer):
        more: dict[str, Any] = {} if tools is None else {"tools": tools}
        messages = picture_parts(messages, pictures.mark, pictures.order)
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=is_asking, tokenize=False, **more
        )
        return str(text), ()
    known: Any = tokenizer
    if not messages:
        raise ValueError("there is no message")
    template = template_for(known, messages, tools)
    special = {k: v for k, v in known.special_tokens_map.items() if isinstance(v, str)}
    words = tuple(special.items())
    said = [{k: v for k, v in m.items() if v is not None} for m in messages]
    moved: tuple[str, ...] = ()
    if any(m.get("role") == "tool" and pictures.is_in(m) for m in said) and (
        has_result_pictures_moved(template, words, pictures.written)
    ):
        said, moved = behind_results(said, pictures.mark), (_MOVED,)

    def taken(name: str) -> bool:
        return takes(template, words, name)

    apart = apart_from_results(said, pictures.is_in, taken)
    if len(apart) > len(said):
        moved = (*moved, _APART)
    said, notes = fit(apart, taken)
    has_thoughts = any(message.get("reasoning_content") for message in said)
    if has_thoughts and reads_thoughts(template, words) == "parts":
        said = [thinking_in_parts(message) for message in said]
    is_text = pictures.mark and writes_text_alone(template, words, pictures.written)
    in_text = pictures.in_text if is_text else ""
    said = picture_parts(said, pictures.mark, pictures.order, in_text)
    if reads_parts_alone(template, words):
        said = [in_parts(message) for message in said]
    job = {
        "conversations": [said],
        "tools": tools,
        "chat_template": template,
        "add_generation_prompt": is_asking,
    }
    text = ask_renderer({**known.special_tokens_map, **template_kwargs, **job})
    return text, (*moved, *notes)
