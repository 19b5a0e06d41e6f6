"""Tokenizers of GGUF files, made for the library ``tokenizers``."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvcellar.errors import ModelError
from kvcellar.home import default_home
from kvcellar.models.gguf.reader import GgufFile, wrong
from kvcellar.models.gguf.splits import OPENED, SPLITS, WHOLE
from kvcellar.models.known import keep, read_kept
from kvcellar.models.text.loaded_tokenizer import LoadedTokenizer
from kvcellar.version import __version__

_LISTS = ("tokens", "merges", "scores", "token_type")
_TEMPLATE = "tokenizer.chat_template"

_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL, _USER = 3, 4
"""Numbers of ``token_type`` for tokens that text is never cut into."""

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<|tool_response>",
        "<|flush|>",
        "<|calls|>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
"""Texts of control tokens that end an answer: older files say no more of them."""

_GO_ON = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""Pairs of which both are there where ``<|end|>`` ends a message, and the answer goes on."""


def tokenizer_of(file: GgufFile) -> LoadedTokenizer:
    """Return the tokenizer that a GGUF file describes, with its chat template.

    Raises:
        ModelError: there is none, one of a kind that is not read, or one that cannot be right.
    """
    said = _said(file)
    named = {name: _token(file, said["tokens"], key) for name, key in _NAMES.items()}
    special = {name: token for name, token in named.items() if token is not None}
    try:
        tokenizer = LoadedTokenizer(_backend(file, said), special, _templates(file))
    except ModelError:
        raise
    except Exception as error:  # of many kinds, tokenizers' own
        raise wrong(file.path, f"has a tokenizer that cannot be made ({error})") from error
    if len(tokenizer) != len(said["tokens"]):
        n_all, n_known = len(said["tokens"]), len(tokenizer)
        raise wrong(file.path, f"has {n_all} tokens, of which {n_known} can be told apart")
    _open_and_close(file, tokenizer)
    return tokenizer


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """Return a file's chat template; by their names, where it has others such as ``tool_use``."""
    default = file.text(_TEMPLATE)
    names = [key for key in file.metadata if key.startswith(f"{_TEMPLATE}.")]
    named = {key.removeprefix(f"{_TEMPLATE}."): file.text(key) for key in names}
    found = {name: text for name, text in named.items() if text}
    if not found:
        return default
    return {"default": default or found.get("tool_use") or next(iter(found.values())), **found}


def _said(file: GgufFile) -> dict[str, Any]:
    """Return what a file says of its tokenizer.

    Raises:
        ModelError: too little, or what cannot be.
    """
    tokens = file.texts("tokenizer.ggml.tokens")
    model = file.text("tokenizer.ggml.model")
    if not tokens or model is None:
        raise ModelError(
            f"{file.path} has no tokenizer; take a file that was converted with its vocabulary"
        )
    found = {
        "tokenizer_type": model,
        "pre_tokenizer_type": file.text("tokenizer.ggml.pre"),
        "tokens": tokens,
    }
    n_rows = file.tensors["token_embd.weight"].shape[0]
    if len(tokens) > n_rows:
        raise wrong(file.path, f"has {len(tokens)} tokens and an embedding of {n_rows} rows")
    for name in ("scores", "token_type"):
        values = file.numbers(f"tokenizer.ggml.{name}")
        if values is not None and len(values) != len(tokens):
            raise wrong(file.path, f"has {len(values)} numbers in {name} for {len(tokens)} tokens")
        if values is not None:
            found[name] = values
    merges = file.texts("tokenizer.ggml.merges")
    if merges is not None:
        found["merges"] = merges
    elif model == "gpt2" or "scores" not in found:
        raise wrong(file.path, "has a vocabulary, and nothing that says how text is cut into it")
    return found


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    """Return the text of a token that the file names by its number.

    Raises:
        ModelError: there is no such token.
    """
    number = file.whole(f"tokenizer.ggml.{key}")
    if number is None or (key != "eos_token_id" and number in (-1, 0xFFFFFFFF)):
        return None
    if not 0 <= number < len(tokens):
        raise wrong(file.path, f"has {key}={number} of {len(tokens)} tokens")
    return tokens[number]


def _backend(file: GgufFile, said: dict[str, Any]) -> Tokenizer:
    """Make what encodes and decodes.

    Raises:
        ModelError: it is of a kind, or cuts texts in a way, that is not known.
    """
    kind = said["tokenizer_type"]
    make = _KINDS.get(kind)
    if make is None:
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {kind[:40]!r}, and {', '.join(_KINDS)} are "
            f"read here; take the model's own safetensors"
        )
    return make(file, said)


def _sentencepiece(file: GgufFile, said: dict[str, Any]) -> Tokenizer:
    """Make a SentencePiece tokenizer: spaces are part of the words, one is put before a text.

    Phi-3 has one before each part of a text between special tokens. Gemmas have none.
    """
    if file.architecture.startswith("gemma"):
        return _gemma(file, said)
    tokens = said["tokens"]
    merges = _pairs(said) if "merges" in said else _merges_by_score(tokens, said["scores"])
    backend = Tokenizer(models.BPE(_numbered(tokens), merges, fuse_unk=True, byte_fallback=True))
    if file.architecture == "phi3":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    _add_special(backend, ("<unk>", "<s>", "</s>"))
    _add_whole(backend, said)
    return backend


def _gemma(file: GgufFile, said: dict[str, Any]) -> Tokenizer:
    """Make a SentencePiece tokenizer of a Gemma, whose runs of spaces are tokens by themselves.

    Where the file lists no merges, they come in the order of the vocabulary, and those of one token
    by their left parts, the longest first.
    """
    vocabulary = _numbered(said["tokens"])
    merges = _pairs(said) if "merges" in said else _merges_in_order(said["tokens"], vocabulary)
    backend = Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_special(backend, ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"))
    _add_whole(backend, said)
    return backend


def _merges_in_order(tokens: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary in their order implies.

    Finding them takes most of the time until a Gemma's first word, so the numbers of their halves
    are kept in the user's folder, for this version, under a digest of the vocabulary.
    """
    digest = xxhash.xxh3_128_hexdigest(json.dumps([__version__, tokens]).encode())
    path = default_home() / "models" / f"merges-{digest}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        text, checksum = map(str, read_kept(path))
        if checksum == xxhash.xxh3_128_hexdigest(text.encode()):
            lefts, rights = np.frombuffer(base64.b64decode(text), "<i4").reshape(2, -1).tolist()
            return [(tokens[a], tokens[b]) for a, b in zip(lefts, rights, strict=True)]
    merges = [
        (left, right)
        for token in tokens
        for at in range(len(token) - 1, 0, -1)
        if (left := token[:at]) in vocabulary and (right := token[at:]) in vocabulary
    ]
    halves = [[vocabulary[pair[i]] for pair in merges] for i in (0, 1)]
    coded = base64.b64encode(np.array(halves, "<i4").tobytes())
    keep(path, [coded.decode(), xxhash.xxh3_128_hexdigest(coded)])
    return merges


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary with scores implies, best score first.

    Of those that make tokens of one score, the one with the longest left part comes first.
    """
    vocabulary = _numbered(tokens)
    found = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(a, b, score) for a, b in pairs]
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(a, b) for a, b, _ in found]


def _pairs(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges that a file lists."""
    return [(left, right) for left, right in (merge.split(" ") for merge in said["merges"])]


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    """Return the ids of tokens that come in their order."""
    return {token: at for at, token in enumerate(tokens)}


def _byte_level(file: GgufFile, said: dict[str, Any]) -> Tokenizer:
    """Make a byte-level BPE, with its special tokens spelled as the file has them.

    Raises:
        ModelError: it cuts texts in a way that is not known.
    """
    cut = said["pre_tokenizer_type"]
    rule = SPLITS.get(cut)
    if rule is None:
        raise ModelError(
            f"{file.path} cuts texts by the rule {str(cut)[:40]!r}, which is not known here; with "
            f"another, the model would be asked something else; take its own safetensors"
        )
    vocabulary = _numbered(said["tokens"])
    try:
        backend = Tokenizer(models.BPE(vocabulary, _pairs(said), ignore_merges=cut in WHOLE))
    except Exception as error:  # of many kinds, tokenizers' own
        for merge in said["merges"]:
            if (
                merge.count(" ") != 1
                or not {*merge.split(" "), merge.replace(" ", "")} <= vocabulary.keys()
            ):
                raise wrong(
                    file.path,
                    f"has the merge {merge[:80]!r}, which is not of two tokens of its own that "
                    f"make a third",
                ) from error
        raise
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in rule),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_whole(backend, said)
    return backend


_KINDS: dict[str, Callable[[GgufFile, dict[str, Any]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma,
}
"""Makers by the format's names of kinds of tokenizers."""


def _add_special(backend: Tokenizer, names: Iterable[str]) -> None:
    """Tell a tokenizer of special tokens, as far as its vocabulary has them."""
    backend.add_tokens(
        [AddedToken(name, special=True) for name in names if backend.token_to_id(name) is not None]
    )


def _add_whole(backend: Tokenizer, said: dict[str, Any]) -> None:
    """Tell a tokenizer of which tokens a text is never cut inside."""
    tokens = said["tokens"]
    kinds = said.get("token_type") or [0] * len(tokens)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER)
        ]
    )


def _open_and_close(file: GgufFile, tokenizer: LoadedTokenizer) -> None:
    """Have the tokenizer put the tokens before and behind a text that the file wants there."""
    model = file.text("tokenizer.ggml.model")
    is_opened = file.flag("tokenizer.ggml.add_bos_token")
    if is_opened is None:
        is_opened = model == "llama" or file.text("tokenizer.ggml.pre") in OPENED
    is_closed = bool(file.flag("tokenizer.ggml.add_eos_token"))
    special, backend = tokenizer.special_tokens_map, tokenizer.backend_tokenizer
    first = special.get("bos_token") if is_opened and model != "gemma4" else None
    last = special.get("eos_token") if is_closed else None
    around = [one for one in (first, last) if one is not None]
    parts = [first, "$A", last]
    backend.post_processor = TemplateProcessing(
        single=[one for one in parts if one is not None],
        special_tokens=[(one, backend.token_to_id(one)) for one in around],
    )


def ends_of(file: GgufFile) -> frozenset[int]:
    """Return every token that ends an answer: those that the file names, and those known by text.

    Raises:
        ModelError: one that is none of its tokens.
    """
    tokens = file.texts("tokenizer.ggml.tokens") or []
    found = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        number = file.whole(f"tokenizer.ggml.{key}")
        if number is not None and _token(file, tokens, key) is not None:
            found.add(number)
    kinds = file.numbers("tokenizer.ggml.token_type") or []
    texts = {
        tokens[at]: at
        for at, kind in enumerate(kinds[: len(tokens)])
        if kind in (_CONTROL, _USER) and tokens[at] in _ENDS
    }
    if any(one in texts and other in texts for one, other in _GO_ON):
        texts.pop("<|end|>", None)
    return frozenset(found | set(texts.values()))
