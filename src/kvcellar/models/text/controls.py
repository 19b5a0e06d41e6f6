"""Control tokens of a model: text of messages that spells one stays text.

Where a message has `<|im_end|>`, the model reads these characters, and not the token. Only what the
template itself writes becomes one.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from kvcellar.errors import ModelError, PromptError
from kvcellar.models.text.loaded_tokenizer import LoadedTokenizer
from kvcellar.models.text.rendering import ask_renderer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDEE)]
"""Put before a control token that a message spells. Noncharacters: no text should have them, one
that a text has is not taken, and no template trims them."""

_STANDS = ("\ufdee", "\ufdef")
"""How the names begin by which the template's own control tokens are told from others."""

_SAID = ("content", "reasoning", "reasoning_content", "thinking")
"""Fields of an answer's message that hold text of the model, with tags such as ``<think>``."""


@dataclass(slots=True)
class Controls:
    """The control tokens of a tokenizer, and how text is encoded without meeting them.

    Attributes:
        tokenizer: whose, without keeping it alive.
        ids: of each of them.
        everything: finds all of them.
        in_texts: finds them in one text of a message, and their beginnings at its end, since what
            a template writes behind it may be the rest.
        in_answers: the same without the tags (``<think>``) that only answers of the model may have.
    """

    tokenizer: weakref.ref[Any]
    ids: dict[str, int]
    everything: re.Pattern[str]
    in_texts: re.Pattern[str]
    in_answers: re.Pattern[str]
    twins: dict[str, tuple[Any, dict[int, int]]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def is_spelt(self, messages: Sequence[Mapping[str, Any]], tools: Any, joint: str = "") -> bool:
        """Return true if any text spells one of the control tokens.

        Args:
            messages: of a conversation.
            tools: and what else has texts.
            joint: stands where a text is taken apart, for a picture in it; empty: none is.
        """
        return any(
            pattern.search(piece)
            for value, pattern in self._parts(messages, tools)
            for text in _texts(value)
            for piece in (text.split(joint) if joint else [text])
        )

    def marked(self, messages: Any, tools: Any, mark: str, joint: str = "") -> tuple[Any, Any]:
        """Return messages and tools with a mark before each control token that they spell.

        Arguments as of ``is_spelt``, and the mark.
        """

        def put(value: Any, pattern: re.Pattern[str]) -> Any:
            return _marked(value, pattern, mark, joint)

        said = [
            {
                put(key, self.in_texts): put(value, self._pattern_of(message, key))
                for key, value in message.items()
            }
            for message in messages
        ]
        return said, put(tools, self.in_texts)

    def are_all_written(self, text: str, ids: Collection[int]) -> bool:
        """Return true if each control token stands in the text as such.

        They do not where a tokenizer normalises text into them (wide characters, capitals).
        """
        own = set(self.ids.values())
        return sum(i in own for i in ids) <= sum(1 for _ in self.everything.finditer(text))

    def encode(self, text: str, mark: str) -> list[int]:
        """Return the tokens of a text in which what is marked is no control token."""
        stand = next((stand for stand in _STANDS if stand not in text), None)
        if stand is None:
            raise PromptError(
                "a text that spells control tokens has the noncharacters U+FDEE and U+FDEF; leave "
                "one of them out"
            )
        names = {content: _stand_in(stand, i) for i, content in enumerate(self.ids)}
        words = self.everything.pattern
        pattern = re.compile(f"({mark})?(?:{words})|{mark}" if mark else f"()(?:{words})")

        def written(found: re.Match[str]) -> str:
            if found[0] == mark:
                return ""
            return found[0][len(mark) :] if found[1] else names[found[0]]

        return self._encode_with(pattern.sub(written, text), stand, names)

    def _encode_with(self, text: str, stand: str, names: Mapping[str, str]) -> list[int]:
        known = self.tokenizer()
        backend = getattr(known, "backend_tokenizer", None)
        if backend is None:
            return self._encode_in_parts(known, text, stand, names)
        with self.lock:
            if stand not in self.twins:
                self.twins[stand] = _twin_of(backend, names)
            twin, ids = self.twins[stand]
        (found,) = twin.encode_batch([text], add_special_tokens=False)  # encode() keeps the GIL
        return [ids.get(i, i) for i in found.ids]

    def _encode_in_parts(
        self, known: Any, text: str, stand: str, names: Mapping[str, str]
    ) -> list[int]:
        """Encode with a tokenizer written in Python: part by part between control tokens."""
        ids: list[int] = []
        own = {name: content for content, name in names.items()}
        for part in re.split(f"({stand}.)", text):
            if part in own:
                ids.append(self.ids[own[part]])
            elif part:
                ids += known.encode(part, add_special_tokens=False, split_special_tokens=True)
        return ids

    def _parts(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> Iterable[tuple[Any, re.Pattern[str]]]:
        yield tools, self.in_texts
        for message in messages:
            for key, value in message.items():
                yield key, self.in_texts
                yield value, self._pattern_of(message, key)

    def _pattern_of(self, message: Mapping[str, Any], key: str) -> re.Pattern[str]:
        is_own = message.get("role") == "assistant" and key in _SAID
        return self.in_answers if is_own else self.in_texts


_known: weakref.WeakKeyDictionary[Any, tuple[Any, Controls | None]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def controls_of(tokenizer: Any) -> Controls | None:
    """Return the control tokens of a tokenizer; None: it has none, or renders by itself."""
    if not is_rendered_here(tokenizer):
        return None
    state = (str(tokenizer.chat_template), len(tokenizer))
    with _lock:
        known = _known.get(tokenizer)
    if known is None or known[0] != state:
        known = (state, _find_controls(tokenizer))
        with _lock:
            _known[tokenizer] = known
    return known[1]


def _find_controls(tokenizer: Any) -> Controls | None:
    templates = tokenizer.chat_template
    templates = list(templates.values()) if isinstance(templates, dict) else [templates]
    said = ""
    for template in templates:
        try:
            said += ask_renderer({"literals": template}) + "\0"
        except ModelError:  # it will not render either, and say why
            continue
    added = {
        token.content: int(i)
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or (len(token.content) > 1 and not token.content.isspace() and token.content in said)
    }
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    if not added:
        return None
    tags = {content for content in added if content not in special and _is_tag(content, added)}
    if "tool_calls" not in str(templates):  # calls stand in the text of answers
        tags |= {content for content in added if "tool_call" in content}
    return Controls(
        weakref.ref(tokenizer),
        added,
        _one_of(added.keys()),
        _whole_or_begun(added.keys()),
        _whole_or_begun(added.keys() - tags),
    )


def _is_tag(content: str, added: Collection[str]) -> bool:
    """Return true if a token opens or closes a stretch of text, as ``<think>`` does."""
    return content[:1] + "/" + content[1:] in added or (
        content[1:2] == "/" and content[:1] + content[2:] in added
    )


def _twin_of(backend: Any, names: Mapping[str, str]) -> tuple[Any, dict[int, int]]:
    """Make a tokenizer that knows control tokens by other names; and its ids where they differ."""
    value = json.loads(backend.to_str())
    model = value["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    elif model.get("vocab"):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("merges"):
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & names.keys()]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for token in value["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    value.update(post_processor=None, truncation=None, padding=None)
    twin = Tokenizer.from_str(json.dumps(value))
    added = value["added_tokens"]
    return twin, {twin.token_to_id(token["content"]) or 0: int(token["id"]) for token in added}


def _stand_in(stand: str, number: int) -> str:
    return stand + chr(0xF0000 + number)


def free_mark(value: Any, number: int = 0) -> str:
    """Return a mark that no text has, the ``number``-th of those.

    Raises:
        PromptError: the texts have all of them.
    """
    taken = {mark for text in _texts(value) for mark in _MARKS if mark in text}
    taken |= {
        mark for text in _texts(value) for mark in _MARKS if f"\\u{ord(mark):04x}" in text.lower()
    }
    free = [mark for mark in _MARKS if mark not in taken]
    if len(free) > number:
        return free[number]
    raise PromptError(
        "the texts of this conversation have all noncharacters from U+FDD0 to U+FDED and spell "
        "control tokens; leave one of the noncharacters out"
    )


def _texts(value: Any) -> Iterable[str]:
    """Yield every text in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _marked(value: Any, pattern: re.Pattern[str], mark: str, joint: str) -> Any:
    """Return a value of JSON with a mark before each match in its texts, keys too."""
    put: Callable[[re.Match[str]], str] = lambda found: mark + found[0]  # noqa: E731
    if isinstance(value, str):
        pieces = value.split(joint) if joint else [value]
        return joint.join(pattern.sub(put, piece) for piece in pieces)
    again = partial(_marked, pattern=pattern, mark=mark, joint=joint)
    if isinstance(value, Mapping):
        return {again(key): again(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [again(part) for part in value]
    return value


def _whole_or_begun(words: Collection[str]) -> re.Pattern[str]:
    """Compile a pattern that finds words, and at the end of a text what they begin with.

    Letters and digits alone are no such beginning: templates compare short words.
    """
    begun = {word[:n] for word in words for n in range(1, len(word))}
    ends = _one_of({text for text in begun if not text.isalnum()})
    return re.compile(rf"{_one_of(words).pattern}|(?:{ends.pattern})\Z")


def _one_of(words: Collection[str]) -> re.Pattern[str]:
    """Write a pattern that finds the longest of some words at a place, in one pass over a text.

    Words that begin alike share their beginning, since tokenizers have hundreds that do.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_pattern_of(tree) if words else "(?!)")


def _pattern_of(node: Mapping[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:  # a chain: without a level of its own
        ((char, node),) = node.items()
        run += re.escape(char)
    if not node or list(node) == [""]:
        return run
    branches = [re.escape(c) + _pattern_of(below) for c, below in sorted(node.items()) if c]
    return f"{run}(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def is_rendered_here(tokenizer: Any) -> bool:
    """Return true if its template is Jinja that we render; others render theirs themselves.

    Those of transformers are, unless a class has a way of its own.
    """
    if isinstance(tokenizer, LoadedTokenizer):
        return True
    base = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
    if base is None or not isinstance(tokenizer, base):
        return False
    own: Any = type(tokenizer).apply_chat_template
    return own is base.apply_chat_template


def encode_text(tokenizer: Any, text: str, names: Collection[str] = ()) -> list[int]:
    """Return the tokens of a text that spells no special token, nor one of some names.

    Raises:
        PromptError: it has the noncharacters that are needed to tell.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    ids = {t.content: int(i) for i, t in added if t.special or t.content in names}
    words = _one_of(ids.keys())
    if not words.search(text):
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    mark = free_mark(text)
    controls = Controls(weakref.ref(tokenizer), ids, words, words, words)
    return controls.encode(words.sub(lambda found: mark + found[0], text), mark)
