"""Networks of transformers: which classes run a checkpoint's text, on the meta device or in memory.

Many checkpoints are *wrappers*: a language model beside towers for images or sound. A wrapper's own
class knows how its folder is laid out, so that class reads the weights; its towers are taken away
before, and their tensors are never read. What is left is handed to the class that transformers has
for the language model alone, or runs as it is where there is none.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from kvcellar.backends.torch.cpu.modules.mixtures import reads_shipped
from kvcellar.backends.torch.load.recurrent_kernels import choose_by_device
from kvcellar.backends.torch.load.weights import load_weights
from kvcellar.errors import ModelError
from kvcellar.models.files.configs import whole_config
from kvcellar.models.files.formats import MXFP4, format_of, without_format

log = logging.getLogger(__name__)

# Which classes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NetworkClasses:
    """Classes that make a network of one config.

    Attributes:
        config: of the whole checkpoint.
        text: of its language model; the same object where there is nothing else.
        whole: the class that checkpoints are saved by, so that their tensors have its names.
        alone: the class that runs a wrapper's language model alone; None: there is none.
    """

    config: Any
    text: Any
    whole: type[Any]
    alone: type[Any] | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> NetworkClasses:
        """Find the classes for a ``config.json``.

        Raises:
            ModelError: the config cannot be read, or no class generates text with it.
        """
        config = whole_config(raw)
        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder or text.is_encoder_decoder:
            raise ModelError(
                f"{config.model_type} reads with an encoder, and is no model that goes on with a "
                f"text; choose one that is a decoder alone"
            )
        from transformers.models.auto import modeling_auto as auto

        causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING
        known = [*_classes(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING, config), *_classes(causal, config)]
        if text is not config:
            known += _classes(auto.MODEL_FOR_PRETRAINING_MAPPING, config)
        named = raw.get("architectures") or []
        if not known:
            raise ModelError(
                f"transformers {transformers.__version__} generates no text with a config of type "
                f"{config.model_type!r}; choose a language model"
            )
        if text is config:
            _check_named(named, known)
            return cls(config, text, next((k for k in known if k.__name__ in named), known[0]))
        parts = [*_classes(causal, text), *known]
        alone = next((part for part in parts if part.config_class is type(text)), None)
        wholes = [each for each in known if each is not alone]
        _check_named(named, [*wholes, *([alone] if alone else [])])
        return cls(config, text, wholes[0] if wholes else known[0], alone)


def _classes(mapping: Any, config: Any) -> list[type[Any]]:
    """Return the classes that a mapping of transformers has for a config."""
    if type(config) not in mapping:
        return []
    found = mapping[type(config)]
    return list(found) if isinstance(found, tuple | list) else [found]


def _check_named(named: Any, known: list[type[Any]]) -> None:
    """Refuse a config that names a class of transformers which does something else.

    Raises:
        ModelError: so it does.
    """
    names = [each.__name__ for each in known]
    others = [name for name in named if isinstance(name, str) and name not in names]
    foreign = [name for name in others if hasattr(transformers, name)]
    if foreign and len(others) == len(named):
        raise ModelError(
            f"the checkpoint is a {', '.join(foreign)}; to generate text it must be a {names[0]}"
        )


# Networks ----------------------------------------------------------------------------------------


def empty_network(
    raw: Mapping[str, Any], *, attention: str | None = None, device: str = "meta"
) -> Any:
    """Build the network that runs a checkpoint's text on the meta device: shapes, and no weights.

    Args:
        raw: its ``config.json``.
        attention: name of one that is registered with transformers; None: the op.
        device: another one for a network with the weights that its class starts with.

    Returns:
        A module in evaluation mode with ``config`` (of the language model), ``model`` (all but the
        head), ``get_input_embeddings()`` and ``get_output_embeddings()``, called with
        ``input_ids``, ``position_ids``, ``use_cache`` and ``logits_to_keep``.

    Raises:
        ModelError: the config cannot be read, or makes no network that generates text.
    """
    return empty_networks(raw, attention=attention, device=device)[1]


def empty_networks(
    raw: Mapping[str, Any], *, attention: str | None = None, device: str = "meta"
) -> tuple[Any, Any]:
    """Build what reads a checkpoint, and the network that runs its text; they share parameters.

    Args and errors are those of :func:`empty_network`.
    """
    classes = NetworkClasses.of(without_format(raw))
    name = classes.config._attn_implementation = attention or _op()
    try:
        with torch.device(device):
            whole = _reader(classes)(classes.config)
            choose_by_device(map(type, whole.modules()))
            return whole, _network(whole, classes).eval()
    except Exception as error:  # whatever its layers do not like
        if name in str(error):  # it looks the name up in a table of its own
            raise not_called(classes.config.model_type) from error
        raise ModelError(
            f"the {classes.config.model_type} config makes no model: {error}{_odd_counts(raw)}; "
            f"check the file"
        ) from error


def unforeseen(family: Any, tried: str, error: Exception) -> ModelError:
    """Make the refusal of a model whose own code ended with an error that nobody foresaw.

    The error itself says nothing to whoever wanted a model: it is in the log.

    Args:
        family: ``model_type``.
        tried: what was done with the model, as "a few tokens were run".
        error: that came of it; chain it.
    """
    log.info("%s stopped when %s", family, tried, exc_info=error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_locals.get("self") for frame in frames]
    within = [type(one).__name__ for one in modules if isinstance(one, nn.Module)]
    where = f" in {within[-1]}" if within else ""
    return ModelError(
        f"architecture {str(family)!r} cannot be served: its own code stopped{where} when {tried}"
        f"{_told(error)}; choose another model"
    )


def _told(error: Exception) -> str:
    """Return what transformers itself refuses about a config; empty where it says nothing of it."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    if "transformers" not in Path(frame.f_code.co_filename).parts:
        return ""
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        return f" (it has no {error.args[0]!r})"
    return f" ({error})" if type(error) is ValueError else ""


def not_called(family: Any) -> ModelError:
    """Make the error for a network whose attention nobody can stand in for."""
    return ModelError(
        f"architecture {family!r} does not call its attention through the interface of "
        f"transformers, so that no cache of ours can stand in; choose another model"
    )


def _odd_counts(raw: Mapping[str, Any]) -> str:
    """Say which counts of a config are negative, if any is."""
    text = raw.get("text_config")
    fields = {**raw, **(text if isinstance(text, Mapping) else {})}
    odd = [
        f"{key}={value}"
        for key, value in fields.items()
        if key.startswith(("num_", "n_")) and type(value) is int and value < 0
    ]
    return f" (it has {', '.join(odd)})" if odd else ""


def load_network(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = None,
    keeps_mxfp4: bool = False,
    kept: Mapping[str, tuple[int, ...]] | None = None,
    n_ranks: int = 1,
) -> Any:
    """Read the network that runs a checkpoint's text, completely or not at all.

    Args:
        folder: the checkpoint.
        raw: its ``config.json``.
        dtype: type of the weights in memory.
        device: where to put them.
        attention: name of one that is registered with transformers; None: the op.
        keeps_mxfp4: true to leave experts in MXFP4 as they were shipped, for the kernel to hold.
        kept: shapes of parameters, by name, that are not read: the kernel holds them as stored.
        n_ranks: of the process group; each reads its part, at the same time.

    Returns:
        A module as of :func:`empty_network`.

    Raises:
        ModelError: the config cannot be read, or weights are missing or not of this architecture.
    """
    format = format_of(raw, folder)
    is_mxfp4 = format is not None and format.method == MXFP4
    is_kept = keeps_mxfp4 and is_mxfp4
    classes = NetworkClasses.of(raw if is_mxfp4 and not is_kept else without_format(raw))
    reader = _reader(classes)
    return load_weights(
        folder,
        classes.config,
        reads_shipped(reader) if is_kept else reader,
        lambda whole: _chosen(whole, classes),
        format=None if is_kept else format,
        dtype=dtype,
        device=device,
        attention=attention or _op(),
        kept=kept or {},
        n_ranks=n_ranks,
    )


def _op() -> str:
    """Return the name of the attention that calls the op, which is registered by then."""
    # Imported here, where loading is quiet: transformers imports all that it can find.
    from kvcellar.backends.torch.bind.model_attention import NAME

    return NAME


def _reader(classes: NetworkClasses) -> type[Any]:
    """Return the class that reads a checkpoint: the whole's own, without what text needs not.

    It has the name and the module of the whole's, by which transformers finds how to convert names.
    """
    whole = classes.whole
    if classes.text is classes.config:
        return whole

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        towers = list(_towers(config, config.get_text_config(decoder=True)))
        for tower in towers:
            tower._attn_implementation = "eager"  # some know no other
        try:
            whole.__init__(self, config, *args, **kwargs)
        except ImportError:  # a package that only a tower needs
            for tower in towers:
                tower.__class__ = _towerless(type(tower))
            whole.__init__(self, config, *args, **kwargs)
        _strip(self, config)

    own = {"__init__": build, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    return type(whole.__name__, (whole,), own)


def _towers(config: Any, text: Any) -> Iterator[Any]:
    """Yield the configs in a wrapper's that are not of its language model."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None or part is text:
            continue
        if part.get_text_config(decoder=True) is text:
            yield from _towers(part, text)
        else:
            yield part


def _towerless(kind: type[Any]) -> type[Any]:
    """Return a config class of a tower, for which ``AutoModel`` makes an empty module."""
    known: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    own = {"config_class": known, "__module__": transformers.PreTrainedModel.__module__}
    nothing = type("NoTower", (transformers.PreTrainedModel,), own)
    transformers.AutoModel.register(known, nothing, exist_ok=True)
    return cast("type[Any]", known)


def _strip(whole: Any, config: Any) -> None:
    """Take away from a wrapper all modules that are not of its language model."""
    text = config.get_text_config(decoder=True)
    owner, decoder = text_part(whole, text)
    parts = (decoder, owner.get_output_embeddings())
    kept = {id(module) for part in parts for module in part.modules()}
    _prune(whole, kept)


def _prune(module: nn.Module, kept: set[int]) -> bool:
    """Take away what is not kept below a module; return true if something is left."""
    if id(module) in kept:
        return True
    left = [_prune(child, kept) for child in module.children()]
    for (name, _), is_left in zip(list(module.named_children()), left, strict=True):
        if not is_left:
            setattr(module, name, None)
    for name, one in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        setattr(module, name, one.detach())  # a class may fill it, and none is read from files
    return any(left)


def without(module: nn.Module, parts: Sequence[nn.Module | None]) -> None:
    """Take parts of a network away from it, wherever they are."""
    gone = {id(part) for part in parts if part is not None}
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if id(child) in gone:
                setattr(owner, name, None)


def text_part(whole: Any, text: Any) -> tuple[Any, Any]:
    """Return the innermost module with a head over the language model, and that model itself.

    Raises:
        ModelError: there is none.
    """
    found = None
    for owner in whole.modules():
        if not isinstance(owner, transformers.PreTrainedModel) or _head(owner) is None:
            continue
        decoder = next(
            (
                module
                for module in owner.modules()
                if module is not owner
                and isinstance(module, transformers.PreTrainedModel)
                and type(module.config) is type(text)
            ),
            None,
        )
        if decoder is not None:
            found = owner, decoder
    if found is None:
        raise ModelError(
            f"{type(whole).__name__} of transformers has no language model with a head in it; "
            f"choose a model that generates text"
        )
    return found


def _head(module: Any) -> Any:
    """Return the layer from features to logits; None where a module has none."""
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _network(whole: Any, classes: NetworkClasses) -> Any:
    """Make the network of what read the checkpoint."""
    if classes.text is classes.config:
        return whole
    owner, decoder = text_part(whole, classes.text)
    head = owner.get_output_embeddings()
    decoder.config.tie_word_embeddings = head.weight is decoder.get_input_embeddings().weight
    if type(owner.config) is type(classes.text):
        return owner
    if classes.alone is not None:
        with torch.device("meta"):
            alone = classes.alone(decoder.config)
        if type(alone.base_model) is type(decoder):
            setattr(alone, alone.base_model_prefix, decoder)
            alone.set_output_embeddings(head)
            return alone.eval()
    return WrappedText(owner, decoder)


def _chosen(whole: Any, classes: NetworkClasses) -> Any:
    """Make the network of what read the checkpoint, with kernels that fit its tensors."""
    choose_by_device(map(type, whole.modules()))
    return _network(whole, classes)


class WrappedText(nn.Module):
    """The text part of a wrapper whose language model has no class of its own: the wrapper's own.

    It is the wrapper without its towers, called with text alone. ``model`` is the language model
    in it, whose config is this module's.
    """

    def __init__(self, whole: Any, model: Any) -> None:
        """Hold a wrapper without its towers, and know the language model in it."""
        super().__init__()
        self.whole = whole
        self._path = next(name for name, module in whole.named_modules() if module is model)

    @property
    def model(self) -> Any:
        """Language model without its head."""
        return self.whole.get_submodule(self._path)

    def plain_name(self, name: str) -> str:
        """Return what a parameter of this module is called in a model that reads text alone."""
        within = name.removeprefix("whole.")
        language_model = f"{self._path}."
        if within.startswith(language_model):
            return f"model.{within.removeprefix(language_model)}"
        return within

    @property
    def base_model(self) -> Any:
        """Language model without its head, by transformers' name."""
        return self.model

    @property
    def config(self) -> Any:
        """Config of the language model."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        found: torch.dtype = self.whole.dtype
        return found

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = self.whole.device
        return found

    def get_input_embeddings(self) -> Any:
        """Return the layer from tokens to features."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the layer from features to logits."""
        return self.whole.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        """Run the wrapper on text; the result has ``logits``."""
        return self.whole(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )
