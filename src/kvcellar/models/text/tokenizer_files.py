"""Reads the tokenizer files of a checkpoint's folder, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.text.loaded_tokenizer import NAMED, LoadedTokenizer, str_of
from kvcellar.models.text.tokenizer_classes import (
    AS_FILED,
    CLASS_OF_TYPE,
    CLASSES,
    CORRECTED,
    OF_MISTRAL,
    PLAIN,
    Said,
    TokenizerClass,
    UnknownTokenizerError,
)

TOKENIZER_FILE = "tokenizer.json"
_CONFIG, _SPECIALS, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"


def read_tokenizer(folder: Path) -> LoadedTokenizer:
    """Read a folder's ``tokenizer.json`` and what its other files add.

    Raises:
        UnknownTokenizerError: there is no ``tokenizer.json``, or its class is not known here.
        Exception: of many kinds, tokenizers' own too: a file is damaged.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise UnknownTokenizerError(_without_file(folder))
    said = _json(folder / _CONFIG)
    if said.get("fix_mistral_regex") or said.get("fast_tokenizer_files"):
        raise UnknownTokenizerError("a tokenizer.json that is to be patched when it is read")
    name = _class_name(folder, said)
    own = CLASSES.get(name or "")
    if own is None and name is not None:
        raise UnknownTokenizerError(f"of the class {name}")
    backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    added, found = _added_of(folder, said)
    by_text = {token.content: token for token in (*_known(backend), *added)}
    special = {
        key: by_text.get(str_of(token), token)
        for key, token in _special_of(found, by_text, own).items()
    }
    padding = backend.padding
    if padding is not None:
        special.setdefault("pad_token", str(padding["pad_token"]))
    if own is not None:
        own.rebuild(backend, found | {"unk_token": special.get("unk_token")})
    backend.encode_special_tokens = bool(said.get("split_special_tokens", False))
    extra = found.get("extra_special_tokens") or []
    return LoadedTokenizer(
        backend,
        special,
        _template_of(folder, said),
        extra=[_token(one) or one for one in extra] if isinstance(extra, list) else [],
        added=added,
        clean_up=bool(said.get("clean_up_tokenization_spaces", False)),
        max_length=said.get("model_max_length", said.get("max_len")),
    )


def _class_name(folder: Path, said: Said) -> str | None:
    """Return the name of the class that reads a tokenizer; None: all is as its file says."""
    config = _json(folder / "config.json")
    model_type = str(config.get("model_type") or "")
    named = str(said.get("tokenizer_class") or config.get("tokenizer_class") or "")
    named = named.removesuffix("Fast")
    registered = CLASS_OF_TYPE.get(model_type, "")
    is_corrected = model_type in CORRECTED
    found = named or registered
    if named == "LlamaTokenizer" and model_type not in OF_MISTRAL and not is_corrected:
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        if '"ByteLevel"' in text:  # the class cuts otherwise
            return None
    if named and registered and registered != named:
        found = AS_FILED if registered == AS_FILED else registered if is_corrected else named
    return None if found in ("", *PLAIN) or f"{found}Fast" in PLAIN else found


def _added_of(folder: Path, said: Said) -> tuple[list[AddedToken], Said]:
    """Return the tokens that other files add, and what these say of special ones.

    Older checkpoints have a file for each of these, which newer ones have in one.
    """
    found = {key: _token(value) or value for key, value in said.items()}
    if "additional_special_tokens" in found and not found.get("extra_special_tokens"):
        found["extra_special_tokens"] = found.pop("additional_special_tokens")
    if "added_tokens_decoder" in said:
        numbered = {int(i): token for i, token in said["added_tokens_decoder"].items()}
        return [_token(numbered[i]) or numbered[i] for i in sorted(numbered)], found
    for key, value in _json(folder / _SPECIALS).items():
        is_list = isinstance(value, list)
        key = "extra_special_tokens" if key == "additional_special_tokens" else key
        found[key] = [_special(one) for one in value] if is_list else _special(value)
    numbers: dict[str, int] = _json(folder / _ADDED)
    special = {str_of(found[key]) for key in NAMED if found.get(key)}
    more: Any = found.get("extra_special_tokens") or ()
    special |= {str_of(_token(one) or one) for one in more}
    added = [
        AddedToken(text, normalized=text not in special, special=text in special)
        for text, _ in sorted(numbers.items(), key=lambda item: item[1])
    ]
    return added, found


def _special_of(
    said: Said, known: Mapping[str, AddedToken], own: TokenizerClass | None
) -> dict[str, AddedToken | str]:
    """Return the special tokens that have names, the usual names first."""
    found: dict[str, AddedToken | str] = {}
    for key in NAMED:
        default = own.special.get(key) if own is not None and key not in said else None
        token = said.get(key) or (default if default in known else None)
        if isinstance(token, str | AddedToken):
            found[key] = token
    more = said.get("extra_special_tokens")
    named = dict(more) if isinstance(more, dict) else {}
    named |= {key: value for key, value in said.items() if key.endswith("_token")}
    for key, value in named.items():
        token = _token(value) or value
        if key not in NAMED and isinstance(token, str | AddedToken):
            found[key] = token
    return found


def _known(backend: Tokenizer) -> list[AddedToken]:
    decoder = backend.get_added_tokens_decoder()
    return [decoder[i] for i in sorted(decoder)]


def _token(value: Any) -> AddedToken | None:
    """Return the token that a value of JSON describes; None: it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    return AddedToken(**{key: said for key, said in value.items() if key not in ("__type", "id")})


def _special(value: Any) -> Any:
    token = _token(value)
    if token is not None:
        token.special = True
    return value if token is None else token


def _template_of(folder: Path, said: Said) -> str | dict[str, str] | None:
    """Return a folder's chat templates: those in files of their own count before the config's."""
    found = {}
    if (folder / _TEMPLATE).is_file():
        found["default"] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / _TEMPLATES).glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if found:
        return found["default"] if list(found) == ["default"] else found
    given = said.get("chat_template")
    if isinstance(given, list):
        return {one["name"]: one["template"] for one in given}
    return given


def _without_file(folder: Path) -> str:
    """Say what a folder without ``tokenizer.json`` has."""
    others = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")
    there = [name for name in others if (folder / name).is_file()]
    return f"{' and '.join(there) or 'none of its files'} alone, and no {TOKENIZER_FILE}"


def _json(path: Path) -> Said:
    return dict(read_json(path)) if path.is_file() else {}
