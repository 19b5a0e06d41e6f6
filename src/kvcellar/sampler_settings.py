"""Settings of sampling, each described once: what it may be, what it means, what others call it.

Everything else follows from ``SamplerSettings``: checks of values, defaults that files of models
name, fields of requests, options of commands, the page's form and their help. How a setting changes
a row of logits is in ``kvcellar.engine.sampler.sampling``, and for devices in ``draws.py`` and
``settings.py`` of ``kvcellar.backends.torch.gpu.sampler``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from kvcellar.checks import number, seen, whole
from kvcellar.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetting:
    """Describes one setting of sampling.

    Attributes:
        meaning: sentence for people.
        metavar: letter for its value in the help of commands.
        wanted: what it may be, in words, for errors.
        neutral: value that changes nothing.
        least: the lowest value.
        most: the highest value.
        is_above: true if ``least`` itself is too low.
        asked: lowest and highest value that a request may have; None: as above.
        means: values that others write -> what is meant.
        names: what others call it in requests and in Ollama's parameters.
        gguf: its key in the metadata of a GGUF file.
        is_whole: true of whole numbers.
    """

    meaning: str
    metavar: str
    wanted: str
    neutral: float
    least: float
    most: float = math.inf
    is_above: bool = False
    asked: tuple[float, float] | None = None
    means: Mapping[float, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    gguf: str | None = None
    is_whole: bool = False

    def is_valid(self, value: float) -> bool:
        """Return true if a number is in range."""
        return (self.least < value if self.is_above else self.least <= value) and value <= self.most

    def meant(self, value: float) -> float:
        """Return the value that is meant by what others write; any other as it is."""
        return self.means.get(value, value)


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """Values of the settings that change which token is chosen, in the order of their arguments.

    They apply in this order: penalties, temperature, ``top_k``, ``top_p``, ``min_p``. Tokens that
    tie at the edge of a cut all stay.

    Attributes:
        temperature: 0 takes the most likely token, the lowest id of several; above 0 samples.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the fewest tokens that have at least this probability together.
        min_p: sample from tokens at least this likely compared with the most likely one.
        repetition_penalty: divides positive logits, and multiplies negative ones, of all tokens
            that the prompt or the output holds; 1 for none.
        frequency_penalty: taken off a token's logit for each time that the output holds it.
        presence_penalty: taken off the logit of every token that the output holds.
    """

    temperature: Annotated[
        float,
        SamplerSetting(
            meaning="0 takes the likeliest token; higher is more varied.",
            metavar="X",
            wanted="0 or more",
            neutral=1.0,
            least=0.0,
            asked=(0.0, 2.0),
            gguf="general.sampling.temp",
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        SamplerSetting(
            meaning="Sample from this many of the likeliest tokens; 0 for all.",
            metavar="K",
            wanted="0 (all tokens) or more",
            neutral=0,
            least=0,
            means={-1: 0},
            gguf="general.sampling.top_k",
            is_whole=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        SamplerSetting(
            meaning="Sample from the fewest tokens with this probability together; 0 for one.",
            metavar="P",
            wanted="above 0 and up to 1",
            neutral=1.0,
            least=0.0,
            most=1.0,
            is_above=True,
            means={0: 1e-6},  # a share that the likeliest token alone has
            gguf="general.sampling.top_p",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        SamplerSetting(
            meaning="Sample from tokens at least this many times as likely as the likeliest.",
            metavar="P",
            wanted="0 to 1",
            neutral=0.0,
            least=0.0,
            most=1.0,
            gguf="general.sampling.min_p",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        SamplerSetting(
            meaning="Above 1 makes tokens that are there already, in prompt or answer, less "
            "likely.",
            metavar="X",
            wanted="above 0; 1 is none",
            neutral=1.0,
            least=0.0,
            is_above=True,
            asked=(0.0, 10.0),
            names=("repeat_penalty",),
            gguf="general.sampling.penalty_repeat",
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        SamplerSetting(
            meaning="Above 0 makes tokens less likely for each time that the answer has them.",
            metavar="X",
            wanted="a number",
            neutral=0.0,
            least=-math.inf,
            asked=(-2.0, 2.0),
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        SamplerSetting(
            meaning="Above 0 makes tokens that the answer has less likely, however often it has "
            "them.",
            metavar="X",
            wanted="a number",
            neutral=0.0,
            least=-math.inf,
            asked=(-2.0, 2.0),
        ),
    ] = 0.0

    def check_settings(self) -> None:
        """Check all values.

        Raises:
            ConfigError: one is no number, or out of range; the message names it.
        """
        for name, setting in SAMPLER_SETTINGS.items():
            value = getattr(self, name)
            (whole if setting.is_whole else number)(value, name)
            if not setting.is_valid(value):
                raise ConfigError(f"{name} must be {setting.wanted}, got {seen(value)}")


def _described() -> dict[str, SamplerSetting]:
    hints: Mapping[str, Any] = get_type_hints(SamplerSettings, include_extras=True)
    return {one.name: get_args(hints[one.name])[1] for one in fields(SamplerSettings)}


SAMPLER_SETTINGS: Mapping[str, SamplerSetting] = _described()
"""By name, in their order."""


class SamplerFields(TypedDict, total=False):
    """Keyword arguments of functions that take any of ``SamplerSettings``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
