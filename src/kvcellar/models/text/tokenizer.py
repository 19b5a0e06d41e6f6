"""Loads a model's tokenizer, whoever runs the model, and keeps transformers quiet where it is used.

Needs no tensor library, and transformers only for tokenizers that are not read here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.installed import pip_command
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.gguf.tokens import ends_of, tokenizer_of
from kvcellar.models.text.tokenizer_classes import UnknownTokenizerError
from kvcellar.models.text.tokenizer_files import read_tokenizer

_NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that speak up when transformers imports a torchao that was built for another Python."""

_PROCESSORS = ("chat_template.json", "processor_config.json")
"""Files of a model that sees or hears as well, in which its chat template may be."""

_lock = threading.RLock()
"""Held while loading: the verbosity and the progress hook of transformers are process-wide."""


def load_tokenizer(folder: Path) -> Any:
    """Load the checkpoint's tokenizer, with the template of its processor where it has none itself.

    Raises:
        ModelError: it cannot be read.
    """
    if folder.is_file():
        return tokenizer_of(read_gguf(folder))
    tokenizer: Any
    try:
        try:
            tokenizer = read_tokenizer(folder)
        except UnknownTokenizerError as what:
            tokenizer = _by_transformers(folder, str(what))
    except ModelError:
        raise
    except Exception as error:  # of many kinds: JSON, tokenizers' own, missing packages
        raise ModelError(
            f"the tokenizer in {folder} cannot be read: {error}; copy its files again from where "
            f"the model came from"
        ) from error
    for name in _PROCESSORS if not getattr(tokenizer, "chat_template", None) else ():
        said = read_json(folder / name) if (folder / name).is_file() else {}
        if isinstance(said.get("chat_template"), str):
            tokenizer.chat_template = said["chat_template"]
            break
    return tokenizer


def _by_transformers(folder: Path, what: str) -> Any:
    """Have transformers read a tokenizer of a kind that is not read here.

    Raises:
        ModelError: transformers is not installed.
        Exception: of many kinds: it does not read it either.
    """
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"the tokenizer in {folder} is {what}, which only transformers reads; install it with: "
            f"{pip_command('torch')}, and pip install sentencepiece protobuf; or convert it where "
            f"that is installed: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) "
            f'writes tokenizer.json, and "tokenizer_class": "PreTrainedTokenizerFast" in '
            f"tokenizer_config.json has that file read as it is"
        ) from None
    with quiet(lambda part: None):
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def opening_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before a text, such as a BOS; often none."""
    whole = [int(token) for token in tokenizer.encode("a")]
    plain = [int(token) for token in tokenizer.encode("a", add_special_tokens=False)]
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at]
    return []


@contextmanager
def quiet(progress: Callable[[float], None]) -> Iterator[None]:
    """Let transformers neither log nor draw bars; tell ``progress`` how far the weights are."""
    from transformers.utils import logging as hf_logging

    class LoadingBar(hf_logging.EmptyTqdm):
        def __iter__(self) -> Iterator[Any]:
            items: list[Any] = list(self._iterator or ())
            for done, item in enumerate(items):
                progress(done / len(items))
                yield item

    def make_bar(factory: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_ours = kwargs.get("desc") == "Loading weights"
        make: Any = LoadingBar if is_ours else hf_logging.EmptyTqdm
        return make(*args, **kwargs)

    with _lock:
        verbosity = hf_logging.get_verbosity()
        hook = hf_logging.set_tqdm_hook(make_bar)
        levels = {name: logging.getLogger(name).level for name in _NOISY}
        hf_logging.set_verbosity(logging.ERROR)
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            hf_logging.set_tqdm_hook(hook)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def check_vocabulary(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Refuse a tokenizer of another model.

    Special tokens past the embedding are let through: Gemma 3's tokenizer has one for images that
    its smallest model lacks. A runner refuses them when they come.
    """
    if folder.is_file():
        return  # reading a GGUF's tokenizer has compared the two
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    beyond = sorted(
        i for i in tokenizer.get_vocab().values() if i >= vocab_size and i not in special
    )
    if beyond:
        raise ModelError(
            f"the tokenizer in {folder} has token ids up to {beyond[-1]} and the model's embedding "
            f"has {vocab_size} rows; they are of different models, copy the model's own tokenizer"
        )


def find_eos_token_ids(folder: Path, raw: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Return every token that one of the checkpoint's files calls an end; they often differ."""
    if folder.is_file():
        return ends_of(read_gguf(folder))
    sources = [raw, raw.get("text_config") or {}]
    if (folder / "generation_config.json").is_file():
        sources.append(read_json(folder / "generation_config.json"))
    found: set[int] = set()
    for value in [*(source.get("eos_token_id") for source in sources), tokenizer.eos_token_id]:
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)
