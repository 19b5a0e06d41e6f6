"""Classes of tokenizers that cut texts in their own way, whatever ``tokenizer.json`` says.

Published files disagree with transformers, which reads most of them: it takes some classes' own way
in place of the file's, and for some models another class than they name. With it these models are
tried, so the same classes are known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from kvcellar.models.gguf.splits import SPLITS
from kvcellar.models.text.loaded_tokenizer import str_of

Said = dict[str, Any]
"""Settings of a tokenizer that are read from the files beside ``tokenizer.json``."""


class UnknownTokenizerError(Exception):
    """A folder's tokenizer is not read here; the message says what it is."""


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A class of tokenizers: how it cuts texts, whatever the file says.

    Attributes:
        rebuild: sets how texts are cut and put together, by what ``tokenizer_config.json`` says.
        special: special tokens that it has unless the files say otherwise.
    """

    rebuild: Callable[[Tokenizer, Said], None]
    special: Mapping[str, str] = field(default_factory=dict)


def _as_llama(backend: Tokenizer, said: Said) -> None:
    """Cut at spaces that are part of the words, with one before the text."""
    has_prefix = said.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if said.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    backend.normalizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if has_prefix else steps
    )
    _set_model(backend, fuse_unk=True, byte_fallback=True)


def _as_gemma(backend: Tokenizer, said: Said) -> None:
    """Cut at nothing, with spaces that are part of the words and none before the text."""
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _set_model(
        backend,
        unk_token=str_of(said.get("unk_token") or "<unk>"),
        fuse_unk=True,
        byte_fallback=True,
    )


def _as_gpt2(backend: Tokenizer, said: Said) -> None:
    """Cut as GPT-2 does."""
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(said.get("add_prefix_space"))
    )
    backend.decoder = decoders.ByteLevel()
    _set_model(backend)


def _as_neox(backend: Tokenizer, said: Said) -> None:
    """Cut as GPT-2 does, composed characters for decomposed ones, and nothing around a text."""
    _as_gpt2(backend, said)
    backend.normalizer = normalizers.NFC()
    backend.post_processor = None


def _as_cohere(backend: Tokenizer, said: Said) -> None:
    """Cut as GPT-2 does, between digits as well."""
    _as_gpt2(backend, said)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(said.get("add_prefix_space"))),
        ]
    )


def _as_qwen(rule: str) -> Callable[[Tokenizer, Said], None]:
    def rebuild(backend: Tokenizer, said: Said) -> None:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[rule][0]), behavior="isolated"),
                pre_tokenizers.ByteLevel(
                    add_prefix_space=bool(said.get("add_prefix_space")), use_regex=False
                ),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        _set_model(backend)

    return rebuild


def _set_model(
    backend: Tokenizer,
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
) -> None:
    """Set how a BPE merges.

    Raises:
        UnknownTokenizerError: it is another kind of model.
    """
    model: Any = backend.model
    if type(model).__name__ != "BPE":
        raise UnknownTokenizerError(f"a tokenizer of BPE's class with a {type(model).__name__}")
    model.dropout = None
    model.unk_token = unk_token
    model.continuing_subword_prefix = None
    model.end_of_word_suffix = None
    model.fuse_unk, model.byte_fallback, model.ignore_merges = fuse_unk, byte_fallback, False


_END = "<|endoftext|>"
_QWEN = {"eos_token": _END, "unk_token": _END, "pad_token": _END}
_GPT2 = {"bos_token": _END, "eos_token": _END, "unk_token": _END}

CLASSES = {
    "LlamaTokenizer": TokenizerClass(
        _as_llama, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ),
    "GemmaTokenizer": TokenizerClass(
        _as_gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "GPT2Tokenizer": TokenizerClass(_as_gpt2, _GPT2),
    "GPTNeoXTokenizer": TokenizerClass(_as_neox, {**_GPT2, "pad_token": "<|padding|>"}),
    "CohereTokenizer": TokenizerClass(
        _as_cohere,
        {
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "Qwen2Tokenizer": TokenizerClass(_as_qwen("qwen2"), _QWEN),
    "Qwen3_5Tokenizer": TokenizerClass(_as_qwen("qwen35"), _QWEN),
}
"""Classes of tokenizers that cut texts in their own way."""

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend", "PreTrainedTokenizer")
"""Names of classes that do all as ``tokenizer.json`` says."""

AS_FILED = "TokenizersBackend"

_TYPES = {
    AS_FILED: (
        "aria ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
        "gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm3 "
        "iquestcoder jamba kimi_linear llava llava_next mimo_v2_flash minicpm3 minimax_m2 "
        "ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert "
        "modernbert-decoder nemotron olmo2 olmo3 olmo_hybrid paddleocr_vl persimmon phi3 phimoe "
        "pixtral smolvlm stablelm voxtral"
    ),
    "CohereTokenizer": "aya_vision cohere cohere2",
    "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": ("gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma zaya"),
    "Qwen2Tokenizer": (
        "internvl qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe "
        "qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe"
    ),
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
}

CLASS_OF_TYPE = {one: name for name, types in _TYPES.items() for one in types.split()}
"""The tokenizer's class by ``model_type``; a type that is not here has the class that it names."""

OF_MISTRAL = frozenset(
    ("ministral", "ministral3", "mistral", "mistral3", "mistral_large4", "mixtral")
)
"""Model types whose files name Llama's class and are byte-level all the same."""

_MISNAMED = (
    "ernie4_5 ernie4_5_moe hyperclovax internlm3 iquestcoder jamba llava llava_next minicpm3 "
    "minimax_m2 modernbert modernbert-decoder nemotron paddleocr_vl phi3 phimoe qwen2 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text smolvlm"
)
CORRECTED = frozenset(_MISNAMED.split())
"""Model types whose published files name a wrong class, so that the type's own counts."""
