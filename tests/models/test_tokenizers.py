"""Tokenizers are read without transformers, and give what transformers gives."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf import gguf_tokenizer_mapping as their_gguf
from transformers.models.auto import tokenization_auto as theirs

from kvcellar.errors import ModelError
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, read_gguf
from kvcellar.models.gguf.splits import SPLITS
from kvcellar.models.gguf.tokens import tokenizer_of
from kvcellar.models.text.loaded_tokenizer import LoadedTokenizer
from kvcellar.models.text.prompts import encode, render
from kvcellar.models.text.tokenizer import load_tokenizer, opening_tokens
from kvcellar.models.text.tokenizer_classes import CLASS_OF_TYPE, CLASSES, CORRECTED, PLAIN
from tests.models import test_prompts
from tests.real_models import GEMMA3, SMOLLM2

SAID = [{"role": "user", "content": "Hi  <s> there"}, {"role": "assistant", "content": "é 🙂"}]

HARD = [
    "",
    " ",
    "a",
    "Hello world",
    "  two before, two behind  ",
    "runs" + " " * 17 + "of" + "\t" * 5 + "white" + "\n" * 7 + "space\r\n\r\n \n \t\n",
    "\u00a0no-break\u2003em\u200bzero\u3000wide\ufeff",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-9 0xDEADBEEF ٣٤٥ ⅷ ²",
    "It's he'd I'LL we'VE they're DON'T 'tis o'clock ''quoted''",
    "camelCase HTTPServer snake_case SCREAMING_CASE kebab-case x86_64 v1.2.3-rc4",
    "def f(x: int) -> None:\n\tif x != 0 and y[0] <= {'a': 1}:\n        return f'{x!r:>10}'\n",
    '<div class="a">&amp;</div> \\n \\\\ C:\\path $PATH ${x} `ls | wc -l` @user #tag 100%',
    "漢字とひらがなとカタカナ、中文没有空格。한국어 문장입니다",
    "naïve café Å Å ﬁ ﬀ e\u0301 n\u0303 \u1e9b\u0323 ǆ Ω Ω Straße İstanbul ıI",  # noqa: RUF001
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪🏳️‍🌈 ❤️ ☃ 𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff",  # noqa: RUF001
    "Привет мир! Γειά σου שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดี ជំរាប",  # noqa: RUF001
    "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "\ufffd\ufdd0\ufffe noncharacters",
    "<s> </s><unk><pad>[INST]<|im_start|>user\n<|im_end|> <|endoftext|><bos><eos></s>tail",
    "<s>a</s> b<s>  c \n</s>\n",
    "▁under ▁▁ <0x0A> <0xE2><0x82> Ġspace",
    "x" * 300 + "é" * 40 + "!?" * 30,
]

TRAINED = [*HARD * 3, Path(__file__).read_text(encoding="utf-8")]


@cache
def byte_level(size: int = 700) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary and its merges, learnt from this file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TRAINED,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    return parts_of(made)


@cache
def with_spaces(specials: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary with byte fallback whose words have their spaces, as SentencePiece makes it."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        [text for text in TRAINED if text.isascii()],
        trainers.BpeTrainer(
            vocab_size=900, special_tokens=[*specials, *bytes_, "▁▁", "▁▁▁▁"], show_progress=False
        ),
    )
    return parts_of(made)


def parts_of(made: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


LLAMA, GEMMA = ("<unk>", "<s>", "</s>"), ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def made(name: str, **options: Any) -> Any:
    """A tokenizer of a class of transformers, with a vocabulary of its kind."""
    if name in ("LlamaTokenizer", "GemmaTokenizer"):
        vocab, merges = with_spaces(LLAMA if name == "LlamaTokenizer" else GEMMA)
    else:
        vocab, merges = byte_level()
        for special in CLASSES[name].special.values():
            vocab = {**vocab, special: vocab.get(special, len(vocab))}
    tokenizer = getattr(transformers, name)(vocab=dict(vocab), merges=list(merges), **options)
    tokenizer.chat_template = test_prompts.CHATML
    return tokenizer


def changed(folder: Path, file: str = "tokenizer_config.json", **fields: Any) -> None:
    """Write fields into a file of JSON; None takes one out."""
    path = folder / file
    value = {**(json.loads(path.read_text()) if path.is_file() else {}), **fields}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def hold_alike(ours: Any, other: Any, texts: list[str] = HARD) -> None:
    """Hold a tokenizer to another in all that is asked of one."""
    assert isinstance(ours, LoadedTokenizer) and not isinstance(other, LoadedTokenizer)
    for text in texts:
        for around in (True, False):
            ids = ours.encode(text, add_special_tokens=around)
            assert ids == other.encode(text, add_special_tokens=around), text
            for skip in (True, False):
                decoded = ours.decode(ids, skip_special_tokens=skip)
                assert decoded == other.decode(ids, skip_special_tokens=skip), text
        for at in range(0, len(ids), 7):
            assert ours.decode(ids[at : at + 3]) == other.decode(ids[at : at + 3]), text
    assert ours(texts)["input_ids"] == other(texts)["input_ids"]
    for name in (
        "special_tokens_map",
        "all_special_tokens",
        "all_special_ids",
        "chat_template",
        "model_max_length",
        "clean_up_tokenization_spaces",
    ):
        assert getattr(ours, name) == getattr(other, name), name
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "eos_token"):
        assert getattr(ours, name) == getattr(other, name), name
    assert ours.get_vocab() == other.get_vocab() and len(ours) == len(other)
    assert [
        (i, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in sorted(ours.added_tokens_decoder.items())
    ] == [
        (i, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in sorted(other.added_tokens_decoder.items())
    ]
    some = list(range(0, len(ours), 97))
    assert ours.convert_ids_to_tokens(some) == other.convert_ids_to_tokens(some)
    assert opening_tokens(ours) == opening_tokens(other)
    if ours.chat_template:
        rendered = render(ours, SAID)
        assert rendered.text == render(other, SAID).text
        assert encode(ours, rendered) == encode(other, rendered)


def hold_folder(folder: Path) -> Any:
    """Hold what is read of a folder to what transformers reads of it."""
    ours = load_tokenizer(folder)
    hold_alike(ours, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
    return ours


def test_the_bundled_models_tokenizer_is_that_of_transformers():
    hold_folder(DEMO_FOLDER)


@pytest.mark.parametrize("name", [name for name in test_prompts.NAMES if name != "demo"])
def test_a_tokenizer_without_a_class_is_as_its_file_says(tmp_path, name):
    test_prompts.tokenizer(name).save_pretrained(tmp_path)
    hold_folder(tmp_path)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_cuts_texts_in_its_own_way(tmp_path, name):
    made(name).save_pretrained(tmp_path)
    hold_folder(tmp_path)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    changed(  # a file that cuts otherwise
        tmp_path,
        "tokenizer.json",
        normalizer={"type": "Lowercase"},
        model={**own["model"], "ignore_merges": True, "fuse_unk": False},
    )
    hold_folder(tmp_path)


TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "gemma3", "olmo2", "starcoder2", "made_up")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_model_may_have_another_class_than_it_names(tmp_path, model_type, name):
    """Llama's kind of vocabulary is none for Qwen's class."""
    is_llama = name.startswith("Llama") and model_type != "qwen2"
    for at, base in enumerate(
        ("LlamaTokenizer", "Qwen2Tokenizer") if is_llama else ("Qwen2Tokenizer",)
    ):
        folder = tmp_path / str(at)
        made(base).save_pretrained(folder)
        changed(folder, tokenizer_class=name)
        changed(folder, "config.json", model_type=model_type)
        hold_folder(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"legacy": True},
        {"legacy": False},
        {"add_prefix_space": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"split_special_tokens": True},
        {"pad_token": "<|pad|>", "image_token": "<image>"},
        {"additional_special_tokens": ["<one>", "<two>"]},
        {"extra_special_tokens": {"boi_token": "<start_of_image>"}},
        {"clean_up_tokenization_spaces": True},
        {"unk_token": None, "bos_token": None},
        {
            "added_tokens_decoder": {
                "2": {"content": "</s>", "special": True, "rstrip": True},
                "1": {"content": "<s>", "special": True, "lstrip": True},
                "900": {"content": "tail", "special": False, "normalized": True},
            }
        },
        {
            "chat_template": [
                {"name": "default", "template": "{{ messages[0].content }}"},
                {"name": "tool_use", "template": "{{ tools | tojson }}"},
            ]
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_what_the_config_says_is_heeded(tmp_path, name, fields):
    made("LlamaTokenizer").save_pretrained(tmp_path)
    if "chat_template" in fields:
        (tmp_path / "chat_template.jinja").unlink()
    changed(tmp_path, tokenizer_class=name, **fields)
    hold_folder(tmp_path)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer"])
def test_what_is_written_is_read_as_it_was(tmp_path, name):
    made(name, model_max_length=64).save_pretrained(tmp_path)
    changed(tmp_path, additional_special_tokens=["<one>", "<two>"])
    ours = load_tokenizer(tmp_path)
    ours.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    (tmp_path / "again").mkdir()
    ours.save_pretrained(tmp_path / "again")
    again = hold_folder(tmp_path / "again")
    assert [again.encode(text) for text in HARD] == [ours.encode(text) for text in HARD]
    assert again.special_tokens_map == ours.special_tokens_map
    assert again.chat_template == ours.chat_template and again.model_max_length == 64


def test_files_of_older_checkpoints_are_read(tmp_path):
    made("LlamaTokenizer").save_pretrained(tmp_path)
    changed(tmp_path, added_tokens_decoder=None, bos_token=None, extra_special_tokens=None)
    changed(
        tmp_path,
        "special_tokens_map.json",
        bos_token={"content": "<s>", "lstrip": False, "rstrip": True, "normalized": False},
        pad_token="<pad>",
    )
    changed(tmp_path, "added_tokens.json", **{"<pad>": 900, "<more>": 901})
    ours = hold_folder(tmp_path)
    assert ours.pad_token == "<pad>" and ours.bos_token == "<s>"


def test_templates_in_files_count_before_the_config(tmp_path):
    made("Qwen2Tokenizer").save_pretrained(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    changed(tmp_path, chat_template="{{ 1 }}")
    assert hold_folder(tmp_path).chat_template["rag"] == "{{ documents }}"


def test_the_classes_of_models_are_those_of_transformers():
    known = theirs.TOKENIZER_MAPPING_NAMES
    plain = (*PLAIN, "MistralCommonBackend")
    for model_type, name in CLASS_OF_TYPE.items():
        assert known[model_type] == name or {known[model_type], name} <= {*plain}, model_type
    incorrect = theirs.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert incorrect >= CORRECTED
    generating = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type in known.keys() & generating.keys():
        if known[model_type] in (*plain, *CLASSES) and model_type not in CLASS_OF_TYPE:
            assert model_type in RARE, f"{model_type} is new: {known[model_type]}"
        assert (model_type in incorrect) <= (model_type in CORRECTED or model_type in RARE)


_RARE = (
    "beam bigbird_pegasus dots3_note emu3 fuyu got_ocr2 minicpm_ocr moss_transcribe_diarize "
    "qwen4_exp xlm-roberta-xl"
)
RARE = frozenset(_RARE.split())
"""Types with a head for text that nobody runs here: their class is the one that they name."""


def test_a_tokenizer_without_a_file_of_its_own_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x00")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"tokenizer\.model alone.*transformers.*save_pretrained"):
        load_tokenizer(tmp_path)
    made("LlamaTokenizer").save_pretrained(tmp_path)
    changed(tmp_path, tokenizer_class="CodeLlamaTokenizer")
    with pytest.raises(
        ModelError, match="of the class CodeLlamaTokenizer, which only transformers"
    ):
        load_tokenizer(tmp_path)


def test_a_class_that_is_not_known_is_left_to_transformers(tmp_path):
    made("LlamaTokenizer").save_pretrained(tmp_path)
    changed(tmp_path, tokenizer_class="CodeLlamaTokenizer")
    assert isinstance(load_tokenizer(tmp_path), transformers.CodeLlamaTokenizer)


def gguf(architecture: str, kind: str, **fields: Any) -> GgufFile:
    """The metadata of a GGUF file with a vocabulary of SentencePiece."""
    specials = GEMMA if architecture.startswith("gemma") or kind == "gemma4" else LLAMA
    vocab, merges = with_spaces((*specials, "<|user|>", "<think>"))
    tokens = list(vocab)
    kinds = [3 if t in (*specials, "<|user|>") else 4 if t == "<think>" else 1 for t in tokens]
    ranks = {"".join(pair): at for at, pair in reversed(list(enumerate(merges)))}
    said: dict[str, Any] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-float(ranks.get(t, 10_000)) for t in tokens]),
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        **fields,
    }
    path = Path("tiny.gguf")
    embedding = GgufTensor(path, (len(tokens), 32), 0, 0, len(tokens) * 128)
    return GgufFile(path, (path,), said, {"token_embd.weight": embedding})


@pytest.mark.parametrize(
    ("architecture", "kind"), [("llama", "llama"), ("phi3", "llama"), ("gemma4", "gemma4")]
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_vocabulary_of_sentencepiece_is_cut_as_transformers_cuts_it(
    architecture, kind, is_listed
):
    if kind == "gemma4" and not is_listed:
        pytest.skip("files of this kind list their merges")
    specials = GEMMA if kind == "gemma4" else LLAMA
    merges = [" ".join(pair) for pair in with_spaces((*specials, "<|user|>", "<think>"))[1]]
    file = gguf(architecture, kind, **({"tokenizer.ggml.merges": merges} if is_listed else {}))
    ours = tokenizer_of(file)
    said = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": "default",
        "tokens": file.metadata["tokenizer.ggml.tokens"],
        "scores": file.metadata["tokenizer.ggml.scores"].tolist(),
        "token_type": file.metadata["tokenizer.ggml.token_type"].tolist(),
    }
    if is_listed:
        said["merges"] = merges
    backend, _ = their_gguf.convert_gguf_tokenizer(architecture, said)
    special = ours.special_tokens_map
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    other.backend_tokenizer.post_processor = ours.backend_tokenizer.post_processor
    hold_alike(ours, other, [*HARD, "a <|user|> b<think>  c"])
    assert opening_tokens(ours) == ([] if kind == "gemma4" else [1])


def test_a_gemmas_runs_of_spaces_are_single_tokens():
    tokenizer = tokenizer_of(gguf("gemma3", "llama"))
    assert tokenizer.encode("a    b", add_special_tokens=False)[1] == tokenizer.get_vocab()["▁▁▁▁"]


def test_merges_that_were_found_once_are_kept_whole_or_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))

    def made() -> str:
        return tokenizer_of(gguf("gemma3", "llama")).backend_tokenizer.to_str()

    first = made()
    (path,) = (tmp_path / "models").glob("merges-*.json")
    kept = path.read_text()
    path.write_text(kept.replace("AA", "BA", 1))
    assert made() == first
    assert path.read_text() == kept, "a damaged file is written again"
    for text in ("", "[]", "[1, 2]", kept[:-40]):
        path.write_text(text)
        assert made() == first
        assert path.read_text() == kept
    written = path.stat().st_mtime_ns
    assert made() == first
    assert path.stat().st_mtime_ns == written, "what is whole is read"


@pytest.mark.parametrize("name", sorted(their_gguf.GGUF_PRE_TOKENIZER_SPLITS))
def test_a_byte_level_vocabulary_is_cut_as_transformers_cuts_it(name):
    vocab, merges = byte_level()
    said = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*vocab, "<s>"],
        "tokenizer.ggml.token_type": np.array([1] * len(vocab) + [3]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.ggml.eos_token_id": len(vocab),
    }
    path = Path("tiny.gguf")
    embedding = GgufTensor(path, (len(vocab) + 1, 32), 0, 0, len(vocab) * 128)
    ours = tokenizer_of(GgufFile(path, (path,), said, {"token_embd.weight": embedding}))
    other = Tokenizer(
        models.BPE(
            {**vocab, "<s>": len(vocab)},
            merges,
            ignore_merges=ours.backend_tokenizer.model.ignore_merges,
        )
    )
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(their_gguf.GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    other.decoder = decoders.ByteLevel()
    other.add_tokens([AddedToken("<s>", special=True)])
    special = ours.special_tokens_map
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=other, **special)
    hold_alike(ours, wrapped)


def test_every_rule_is_a_pattern_that_compiles():
    for name, rule in SPLITS.items():
        for pattern in rule:
            pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(name)


@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=["smollm2", "gemma3"])
def test_a_real_models_tokens_are_those_of_transformers(model):
    """Held to the class that the model was published with, made of the file's vocabulary."""
    ours = tokenizer_of(read_gguf(model.found()))
    parts = json.loads(ours.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in parts["merges"]]
    make = transformers.GemmaTokenizer if model is GEMMA3 else transformers.GPT2Tokenizer
    other = make(vocab=parts["vocab"], merges=merges, **ours.special_tokens_map)
    if model is SMOLLM2:
        other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    other.add_tokens([token for _, token in sorted(ours.added_tokens_decoder.items())])
    other.backend_tokenizer.post_processor = ours.backend_tokenizer.post_processor
    other.mask_token, other.chat_template = None, ours.chat_template
    hold_alike(ours, other)
