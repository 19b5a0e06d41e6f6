"""Fields that clients send and no schema declares: which are harmless, and which are refused.

A field is honoured (a schema declares it), harmless (it says nothing about the answer's text), or
refused by its name, unless its value is one that asks for nothing. docs/http.md lists them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from kvcellar.sampler_settings import SAMPLER_SETTINGS
from kvcellar.server.errors import ApiError

MOST_UNKNOWN = 20
"""Fields in one request that nobody knows."""

T = TypeVar("T")


def _each(names: str, value: T) -> dict[str, T]:
    """Return a mapping from each of some names to one value."""
    return dict.fromkeys(names.split(), value)


HARMLESS: Mapping[str, str] = {
    **_each(
        "user metadata client_metadata safety_identifier request_id store anthropic_beta betas "
        "anthropic_version diagnostics",
        "who asks, for whom or for whose statistics",
    ),
    **_each(
        "service_tier prompt_cache_key prompt_cache_retention prompt_cache_options prediction "
        "inference_geo speed cache_prompt id_slot slot_id guided_decoding_backend "
        "timings_per_token return_progress keep_alive ttl draft_model "
        "stream_options",
        "where or how fast the answer is computed, which is the same",
    ),
    "verbosity": "how much a model says; models here do as they were trained to",
    **_each(
        "keep_alive num_ctx num_batch num_gpu main_gpu num_thread numa low_vram use_mmap "
        "use_mlock num_keep",
        "how long a model stays in memory, how it is held there and how long its context is: as "
        "the server was told",
    ),
    **_each(
        "truncation truncate shift context_management max_tool_calls",
        "what may be dropped or run on the server's side; nothing is",
    ),
    **_each(
        "repeat_last_n penalize_newline xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta "
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        "an option of another field, which is refused where it asks for something",
    ),
}
"""By name, what the field is about."""

_NO_SAMPLER = "this way of sampling is not done here; use temperature, top_p, top_k or min_p"
_NOT_SHOWN = "the answer's text has neither special tokens nor its stop text"
_OWN_TEMPLATE = "the model's own chat template is used as it is"
_ENDS = "a conversation that ends with an answer is gone on with; leave it out"
_ALL_READ = "nothing is dropped from a prompt; one that is too long is refused"

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "cache_salt": ("give it as the header X-Cache-Salt", ()),
    **_each(
        "lora lora_path lora_name lora_request lora_adapters",
        ("an adapter is a model of its own: name it as the model; /v1/models lists them", ()),
    ),
    **_each(
        "typical_p typ_p typical tfs_z num_beams beam_width length_penalty", (_NO_SAMPLER, (1,))
    ),
    **_each(
        "top_a mirostat mirostat_mode dynatemp_range xtc_probability dry_multiplier samplers "
        "logits_processors use_beam_search early_stopping",
        (_NO_SAMPLER, (0,)),
    ),
    "top_n_sigma": (_NO_SAMPLER, (0, -1)),
    **{
        other: (f"it is {name}, which this route does not have", (one.neutral,))
        for name, one in SAMPLER_SETTINGS.items()
        for other in one.names
    },
    "options": ("it is Ollama's; give what is in it beside the other fields", ()),
    "extra_body": ("it is its client's; give what is in it beside the other fields", ()),
    "format": ("use response_format", ()),
    **_each(
        "n_predict num_predict max_new_tokens",
        ("give max_tokens, or in Ollama's requests options.num_predict", (-1,)),
    ),
    "max_length": ("it counts the prompt, too; give max_tokens", (-1,)),
    "min_new_tokens": ("it is called min_tokens, which this route does not have", (0,)),
    "n_probs": ("it is called logprobs here", (0,)),
    **_each("n_keep truncate_prompt_tokens", (_ALL_READ, (0,))),
    "bad_words": ("ban tokens with logit_bias", ()),
    "allowed_token_ids": ("use guided_choice or guided_regex", ()),
    **_each("include_stop_str_in_output no_stop_trim", (_NOT_SHOWN, ())),
    **_each("skip_special_tokens spaces_between_special_tokens", (_NOT_SHOWN, (True,))),
    "add_generation_prompt": (_ENDS, (True,)),
    "continue_final_message": (_ENDS, ()),
    **_each("chat_template documents", (_OWN_TEMPLATE, ())),
    **_each(
        "reasoning_format separate_reasoning",
        ("reasoning always comes apart, as reasoning_content", ("auto", "deepseek", True)),
    ),
    **_each("think enable_thinking", ("a template's switch is given in chat_template_kwargs", ())),
    "guided_whitespace_pattern": ("JSON is written in one way here", ()),
    **_each("ebnf structural_tag", ("use guided_grammar", ())),
    **_each(
        "return_tokens_as_token_ids return_token_ids",
        ("tokens are named by their texts and bytes in logprobs", ()),
    ),
    "priority": ("only turns of /v1/agents have one", (0,)),
    **_each(
        "kv_transfer_params vllm_xargs mm_processor_kwargs media_io_kwargs",
        ("there is nothing of that kind here", ()),
    ),
    "functions": ("it is called tools now", ()),
    "function_call": ("it is called tool_choice now", ("none", "auto")),
    "modalities": ("answers are text", (["text"],)),
    **_each(
        "audio web_search_options container mcp_servers",
        ("this server runs no tools of its own, and its answers are text", ()),
    ),
    "background": ("an answer is computed while its client waits for it", ()),
}
"""By name, what to do instead, and values that ask for nothing, besides null and what is empty;
false asks for nothing too where true is not one of them, and it is none of ``SWITCHES``."""

SWITCHES = frozenset(("think", "enable_thinking"))
"""Fields whose false asks for something."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    **{
        name: (one.neutral, *one.means)
        for name, one in SAMPLER_SETTINGS.items()
        if name != "temperature"  # every one of its values asks for something
    },
    "parallel_tool_calls": (True,),
    "logprobs": (),
    "top_logprobs": (0,),
    "include_reasoning": (True,),
    "reasoning_effort": ("medium",),
}
"""The same for fields that another protocol has."""


def refuse_or_ignore(
    name: str, value: Any, declared: Collection[str], elsewhere: Mapping[str, str]
) -> bool:
    """Return whether a field that came undeclared is unknown, so that it is said to be ignored.

    Args:
        name: of the field.
        value: what it asks for.
        declared: fields that this request may have.
        elsewhere: by name, the route that has the field, of those that other requests may have.

    Raises:
        ApiError: 400, it would change the answer, or is a misspelling of one that would.
    """
    if name in HARMLESS or value is None:
        return False
    if name in REFUSED:
        advice, neutral = REFUSED[name]
    elif name in elsewhere:
        advice = f"this route has no such field, {elsewhere[name]} has"
        neutral = _NEUTRAL.get(name, ())
    else:
        meant = _misspelt(name, {*declared, *elsewhere, *REFUSED})
        if meant is None:
            return True
        advice, neutral = f"nothing is called so; do you mean {meant}?", ()
    is_off = value is False and True not in neutral and name not in SWITCHES
    if is_off or value in ("", [], {}) or _is_one_of(value, neutral):
        return False
    raise ApiError(400, f"{name} is not honoured: {advice}", "unsupported_field", param=name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return true if two values are equal, where true is no 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _misspelt(name: str, known: Collection[str]) -> str | None:
    """Find the field that a name was meant to be: another spelling, or a letter wrong."""
    if len(name) > 40:
        return None
    plain = {re.sub(r"[_-]", "", one.lower()): one for one in sorted(known)}
    wanted = re.sub(r"[_-]", "", name.lower())
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.9)
    return plain[found[0]] if found else None
