"""A tokenizer on the library ``tokenizers``, with what a checkpoint says beside its vocabulary.

Its methods are named and mean as those of transformers' fast tokenizers, so that either can stand
in the other's place; that library is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from tokenizers import AddedToken, Tokenizer

from kvcellar.models.text.rendering import ask_renderer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that every checkpoint may have."""

_TIDIED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Spaces that a vocabulary of words puts before punctuation, and what stands there without."""


_UNLIMITED = int(1e30)
"""Length in tokens that transformers gives a tokenizer whose files name none."""


class LoadedTokenizer:
    """The tokens of a model: texts to ids and back, its special tokens, its chat templates.

    Attributes:
        backend_tokenizer: what encodes and decodes, of the library ``tokenizers``.
        chat_template: in Jinja; several by their names, None: there is none.
        special_tokens_map: texts of special tokens by name, such as ``bos_token``.
        extra_special_tokens: texts of those without a name.
        model_max_length: most tokens of a text that the model knows, as its files have it.
        clean_up_tokenization_spaces: take spaces before punctuation out of decoded texts; BPE
            vocabularies never do.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, AddedToken | str],
        chat_template: str | dict[str, str] | None = None,
        *,
        extra: Sequence[AddedToken | str] = (),
        added: Iterable[AddedToken] = (),
        clean_up: bool = False,
        max_length: int | None = None,
    ) -> None:
        """Take a tokenizer, which is changed: it gets the tokens that it lacks.

        Args:
            backend: knows the vocabulary, and how texts are cut into it.
            special: special tokens by name.
            chat_template: one, or several by name.
            extra: special tokens without a name.
            added: tokens that texts are never cut inside, which the backend may know otherwise.
            clean_up: see ``clean_up_tokenization_spaces``.
            max_length: see ``model_max_length``; None: the files do not say.
        """
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = {name: str_of(token) for name, token in special.items()}
        self.extra_special_tokens = [str_of(token) for token in extra]
        self.clean_up_tokenization_spaces = clean_up
        self.model_max_length = _UNLIMITED if max_length is None else max_length
        backend.no_truncation()
        backend.no_padding()
        named = set(self.special_tokens_map.values())
        wanted = [_special_if(token, named) for token in added]
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        known.update(token.content for token in wanted)
        for token in [*special.values(), *extra]:
            if str_of(token) not in known:
                known.add(str_of(token))
                wanted.append(_special_if(token, named))
        if wanted:
            backend.add_tokens(wanted)

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        """Return true: a tokenizer without tokens is one."""
        return True

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        """Return the tokens of a text, or of each of several, as ``input_ids``."""
        texts = [text] if isinstance(text, str) else list(text)
        found = [
            encoding.ids
            for encoding in self.backend_tokenizer.encode_batch(  # encode() would keep the GIL
                texts, add_special_tokens=add_special_tokens
            )
        ]
        return {"input_ids": found[0] if isinstance(text, str) else found}

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return the tokens of a text; with those that the model wants around one."""
        found: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return found

    def decode(
        self,
        token_ids: int | Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of some tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        tidy = clean_up_tokenization_spaces
        tidy = self.clean_up_tokenization_spaces if tidy is None else tidy
        if tidy and type(self.backend_tokenizer.model).__name__ != "BPE":
            for spaced, plain in _TIDIED:
                text = text.replace(spaced, plain)
        return text

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that texts are never cut inside, by their ids."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens by their spelling."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return how tokens are spelled in the vocabulary; None for an id that it lacks."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int] | None:
        """Return the ids of tokens by their spelling; ``unk_token``'s for one that is none."""
        if not isinstance(tokens, str):
            found = [self.convert_tokens_to_ids(token) for token in tokens]
            return [i for i in found if i is not None]
        number = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.special_tokens_map.get("unk_token")
        if number is None and unknown is not None:
            number = self.backend_tokenizer.token_to_id(unknown)
        return number

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which transformers reads too."""
        said: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens_map,
            "clean_up_tokenization_spaces": self.clean_up_tokenization_spaces,
            "model_max_length": self.model_max_length,
        }
        if self.extra_special_tokens:
            said["extra_special_tokens"] = self.extra_special_tokens
        templates = self.chat_template
        if isinstance(templates, dict):
            said["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
        elif templates is not None:
            said["chat_template"] = templates
        self.backend_tokenizer.save(str(Path(folder) / "tokenizer.json"))
        text = json.dumps(said, ensure_ascii=False, indent=2)
        (Path(folder) / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the chat template for a conversation.

        Args:
            chat_template: the name of one of several, or a template, which is returned.
            tools: of the conversation; with some, ``tool_use`` is taken where there is one.

        Raises:
            ValueError: there is none, or none of several is for it.
        """
        own = self.chat_template
        if isinstance(own, dict):
            name = "tool_use" if tools is not None and "tool_use" in own else "default"
            found = own.get(name if chat_template is None else chat_template, chat_template)
            if found is None:
                raise ValueError(
                    f"the model has the chat templates {', '.join(sorted(own))} and none of them "
                    f"is named {name!r}; name one"
                )
            return found
        found = own if chat_template is None else chat_template
        if found is None:
            raise ValueError("the model has no chat template; give one")
        return found

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **template_kwargs: Any,
    ) -> Any:
        """Render messages by the chat template.

        Args:
            conversation: messages, oldest first.
            tools: definitions of tools, as the template takes them.
            chat_template: as :meth:`get_chat_template` takes it.
            add_generation_prompt: end with the opening of an answer.
            tokenize: return tokens; else the text.
            return_dict: return tokens as ``input_ids`` of a dictionary; else alone.
            template_kwargs: what else the template takes.

        Raises:
            ValueError: there is no template.
            ModelError: it refuses these messages.
            TemplateLimitError: it takes more than is allowed.
        """
        job = {
            "conversations": [conversation],
            "tools": tools,
            "chat_template": self.get_chat_template(chat_template, tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = ask_renderer({**self.special_tokens_map, **template_kwargs, **job})
        if not tokenize:
            return text
        found = self(text, add_special_tokens=False)
        return found if return_dict else found["input_ids"]


def _named(name: str) -> tuple[property, property]:
    """Make the properties of a named special token: its text, and its id."""

    def get(self: LoadedTokenizer) -> str | None:
        return self.special_tokens_map.get(name)

    def put(self: LoadedTokenizer, token: str | None) -> None:
        if token is None:
            self.special_tokens_map.pop(name, None)
        else:
            self.special_tokens_map[name] = token

    def number(self: LoadedTokenizer) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.convert_tokens_to_ids(token)

    return property(get, put), property(number)


for _name in NAMED:
    _text, _id = _named(_name)
    setattr(LoadedTokenizer, _name, _text)
    setattr(LoadedTokenizer, f"{_name}_id", _id)


def str_of(token: AddedToken | str) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else token.content


def _special_if(token: AddedToken | str, named: Collection[str]) -> AddedToken:
    """Return a token that is to be added; special if it has a name."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.content in named and not token.special:
        token.special = True
    return token
