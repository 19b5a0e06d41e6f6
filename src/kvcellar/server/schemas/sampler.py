"""Fields of requests for the settings of sampling, made from their descriptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, create_model

from kvcellar.sampler_settings import SAMPLER_SETTINGS, SamplerSetting
from kvcellar.server.schemas.base import QuestionBody


def values_in(fields: BaseModel) -> Mapping[str, Any]:
    """Return a request's settings of sampling; the neutral value of what it leaves out."""
    found = {}
    for name, setting in SAMPLER_SETTINGS.items():
        asked = getattr(fields, name, None)
        found[name] = setting.neutral if asked is None else setting.meant(asked)
    return found


def unset_in(fields: BaseModel) -> frozenset[str]:
    """Settings of sampling that a request leaves to the model."""
    return frozenset(name for name in SAMPLER_SETTINGS if getattr(fields, name, None) is None)


def _type_of(setting: SamplerSetting, *, has_zero: bool = False) -> Any:
    """Return the type of a setting's field.

    Args:
        setting: the setting.
        has_zero: true where 0 asks for nothing though it is below the lowest value.
    """
    least, most = setting.asked or (setting.least, setting.most)
    is_open = setting.is_above and not has_zero and least not in setting.means
    limits = {"gt" if is_open else "ge": least, "le": most}
    given: dict[str, Any] = {name: at for name, at in limits.items() if math.isfinite(at)}

    def meant(value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return setting.meant(value) if is_number and value < least else value

    return (
        Annotated[
            int if setting.is_whole else float,
            Field(description=setting.meaning, **given),
            BeforeValidator(meant),
        ]
        | None
    )


if TYPE_CHECKING:

    class SamplerBody(QuestionBody):
        """A request with the settings of sampling; see ``values_in``."""

    class AnthropicSamplerBody(QuestionBody):
        """A request with those that Anthropic has."""

    class OllamaSamplerBody(QuestionBody):
        """A request with the settings of sampling by Ollama's names."""

else:
    _TYPES = {name: (_type_of(one), None) for name, one in SAMPLER_SETTINGS.items()}
    _ANTHROPIC = {name: _TYPES[name] for name in ("temperature", "top_p", "top_k")}
    _OLLAMA = {
        next(iter(one.names), name): (_type_of(one, has_zero=bool(one.names)), None)
        for name, one in SAMPLER_SETTINGS.items()
    }
    SamplerBody = create_model("SamplerBody", __base__=QuestionBody, **_TYPES)
    AnthropicSamplerBody = create_model("AnthropicSamplerBody", __base__=QuestionBody, **_ANTHROPIC)
    OllamaSamplerBody = create_model("OllamaSamplerBody", __base__=QuestionBody, **_OLLAMA)
