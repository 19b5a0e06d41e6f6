"""Fields by the names and values that other servers have for them.

What asks for nothing there asks for nothing here, such as an empty text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.errors import ApiError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "min_new_tokens": ("min_tokens",),
    **{other: (name,) for name, one in SAMPLER_SETTINGS.items() for other in one.names},
}
"""Name with llama.cpp, Ollama or transformers -> name here, the first that a request has."""

_NEUTRAL = {
    "n_predict": -1,
    "num_predict": -1,
    "max_new_tokens": -1,
    "min_new_tokens": 0,
    **{other: one.neutral for one in SAMPLER_SETTINGS.values() for other in one.names},
}
"""Values that ask for nothing beside another."""

_ENDLESS = ("n_predict", "num_predict")
"""Those of which -2 means the rest of the context, too."""

_TEXTS = frozenset({"prompt", "input", "instructions", "messages", "system", "text"})
"""Fields in which an empty text is one."""

_MAY_BE_EMPTY = frozenset(
    {"stop", "stop_sequences", "stop_token_ids", "logit_bias", "tools", "tool_choice"}
    | {"response_format"}
)
"""Fields in which an empty list or object asks for nothing."""

_WINDOW = "repeat_last_n"


def by_own_names(body: Mapping[str, Any], declared: Collection[str]) -> dict[str, Any]:
    """Return a request's fields by the names that they have here, without those that say nothing.

    Args:
        body: as it was sent.
        declared: fields that this request may have.

    Raises:
        ApiError: 400, two names of one field have two values.
    """
    found = {
        name: value
        for name, value in body.items()
        if name not in declared or not _is_nothing(name, value)
    }
    for alias, names in ALIASES.items():
        name = next((one for one in names if one in declared), None)
        if name is None or alias not in found:
            continue
        value = found.pop(alias)
        if alias in _ENDLESS and value == -2:
            value = -1
        if alias == "repeat_penalty" and found.get(_WINDOW) == 0:
            value = None  # it is to look at no token
        if value is None or value is False or (name in found and value == _NEUTRAL[alias]):
            continue
        if found.get(name) not in (None, value):
            raise ApiError(
                400,
                f"{alias} is {str(value)[:40]} and {name}, which is the same here, "
                f"{str(found[name])[:40]}; give one of them",
                param=alias,
            )
        found[name] = value
        if alias == "repeat_penalty":
            found.setdefault(_WINDOW, 64)
    _take_values(found)
    if "parallel_tool_calls" in declared:
        found = _with_openais_choice(found)
    return found


def _take_values(found: dict[str, Any]) -> None:
    """Put values in the places of those that mean the same elsewhere."""
    if found.get("seed") == -1 and not isinstance(found["seed"], bool):
        del found["seed"]  # any
    if isinstance(found.get("stop"), list):
        found["stop"] = [one for one in found["stop"] if one != ""]
    if isinstance(found.get("logit_bias"), list):
        found["logit_bias"] = dict(_biases(found["logit_bias"]))


def _with_openais_choice(found: dict[str, Any]) -> dict[str, Any]:
    """Return fields in which a choice of no tool by name is one of OpenAI's words."""
    choice = found.get("tool_choice")
    if isinstance(choice, dict) and choice.keys() == {"type"}:
        choice = choice["type"]
    if choice in ("auto", "none", "required", "any"):
        return {**found, "tool_choice": "required" if choice == "any" else choice}
    return found


def _is_nothing(name: str, value: Any) -> bool:
    """Return true if a field's value asks for nothing."""
    if value == "":
        return name not in _TEXTS
    return name in _MAY_BE_EMPTY and value in ([], {})


def _biases(pairs: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of llama.cpp's bias, in which false bans a token.

    Raises:
        ApiError: 400, one of them is none.
    """
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
            raise ApiError(
                400,
                "logit_bias comes as pairs of a token's id and a number, or as an object",
                "invalid_value",
                param="logit_bias",
            )
        yield str(pair[0]), -100 if pair[1] is False else pair[1]


def notes_on(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an answer has to say of fields that no schema declares."""
    window = extra.get(_WINDOW)
    if isinstance(window, int) and window > 0:
        yield (
            f"repeat_penalty holds for all tokens of the prompt and the answer, not for the last "
            f"{window}"
        )
