"""Fields that say where the history of a conversation is: none of them is ever ignored.

A client that names its history sends what is new alone. Whoever does not look at the name answers a
conversation that was lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvcellar.server.errors import ApiError

Done = Literal["supported", "refused", "whole"]


@dataclass(frozen=True, slots=True)
class HistoryField:
    """A field, and what is done where a request has it.

    Attributes:
        protocol: whose it is.
        field: the way to it in a request, or a route.
        done: ``supported``: the history is found by it, or the request is refused; ``refused``: by
            its name; ``whole``: the request has all of the history anyway, and this says how it is
            kept, counted or shortened.
        how: what comes of it.
    """

    protocol: str
    field: str
    done: Done
    how: str


_CHAT, _RESPONSES, _MESSAGES = "OpenAI's chat", "OpenAI's responses", "Anthropic's messages"
_CONVERSATIONS, _OLLAMA, _LLAMA = "OpenAI's conversations", "Ollama", "llama.cpp"
_LM_STUDIO, _VLLM, _SGLANG, _ANY = "LM Studio", "vLLM", "SGLang", "any"

_NOT_FOUND = "404 with the way out where it is not stored"
_BY_NAME = "400, unsupported_field"
_NO_ROUTE = "404: there is no such route"
_HINT = "a hint where to look; what is sent is what is read"
_NOT_CUT = "nothing is left out of what is sent"

HISTORIES: tuple[HistoryField, ...] = (
    HistoryField(_RESPONSES, "previous_response_id", "supported", _NOT_FOUND),
    HistoryField(_RESPONSES, "conversation", "supported", _NOT_FOUND),
    HistoryField(_RESPONSES, "conversation.id", "supported", _NOT_FOUND),
    HistoryField(_RESPONSES, "input.id", "supported", "an item_reference is the item; else 404"),
    HistoryField(
        _RESPONSES,
        "input.encrypted_content",
        "supported",
        "what was sealed here is read; a compaction of another server is 400",
    ),
    HistoryField(_RESPONSES, "prompt", "refused", _BY_NAME),
    HistoryField(_RESPONSES, "prompt.id", "refused", _BY_NAME),
    HistoryField(_RESPONSES, "context_management", "whole", _NOT_CUT),
    HistoryField(_RESPONSES, "context_management.compact_threshold", "whole", _NOT_CUT),
    HistoryField(_RESPONSES, "truncation", "whole", _NOT_CUT),
    HistoryField(_RESPONSES, "store", "supported", "whether the answer can be gone on from"),
    HistoryField(_RESPONSES, "reasoning.context", "whole", "named in x-kvcellar-ignored"),
    HistoryField(_RESPONSES, "background_options", "whole", "nothing runs in the background"),
    HistoryField(_RESPONSES, "background_options.continuation_id", "whole", "no history by it"),
    HistoryField(_RESPONSES, "prompt_cache_options.comparison_response_id", "whole", "statistics"),
    HistoryField(_RESPONSES, "prompt_cache_key", "whole", _HINT),
    HistoryField(
        _CONVERSATIONS, "items.id", "supported", "an item_reference is the item; else 404"
    ),
    HistoryField(
        _CONVERSATIONS,
        "items.encrypted_content",
        "supported",
        "read as in responses, when a response goes on from it",
    ),
    HistoryField(_CHAT, "messages.audio", "refused", "400, unsupported_content"),
    HistoryField(_CHAT, "messages.audio.id", "refused", "400, unsupported_content"),
    HistoryField(_CHAT, "store", "whole", "the answer is not listed"),
    HistoryField(_CHAT, "prompt_cache_key", "whole", _HINT),
    HistoryField(_CHAT, "session_id", "whole", _HINT),
    HistoryField(_MESSAGES, "thread", "supported", "400, thread_unsupported_request"),
    HistoryField(_MESSAGES, "thread.previous_message_id", "supported", "404, thread_not_found"),
    HistoryField(_MESSAGES, "container", "refused", _BY_NAME),
    HistoryField(_MESSAGES, "container.id", "refused", _BY_NAME),
    HistoryField(_MESSAGES, "compaction", "refused", _BY_NAME),
    HistoryField(_MESSAGES, "context_management", "whole", _NOT_CUT),
    HistoryField(_MESSAGES, "context_management.edits.pause_after_compaction", "whole", _NOT_CUT),
    HistoryField(_MESSAGES, "messages.content.encrypted_content", "whole", "its text is beside it"),
    HistoryField(_MESSAGES, "diagnostics.previous_message_id", "whole", "statistics"),
    HistoryField(_MESSAGES, "session_id", "whole", _HINT),
    HistoryField(_MESSAGES, "metadata.user_id", "whole", _HINT),
    HistoryField(_OLLAMA, "context", "refused", _BY_NAME),
    HistoryField(_LLAMA, "system_prompt", "refused", _BY_NAME),
    HistoryField(_LLAMA, "id_slot", "whole", "where K and V are; the prompt is whole"),
    HistoryField(_LLAMA, "slot_id", "whole", "where K and V are; the prompt is whole"),
    HistoryField(_LLAMA, "cache_prompt", "whole", "whether K and V are kept; the prompt is whole"),
    HistoryField(_LLAMA, "n_keep", "refused", _BY_NAME),
    HistoryField(_LLAMA, "/slots/{id_slot}?action=restore", "refused", "400"),
    HistoryField(_VLLM, "previous_input_messages", "refused", _BY_NAME),
    HistoryField(_VLLM, "kv_transfer_params", "refused", _BY_NAME),
    HistoryField(_SGLANG, "session_params", "refused", _BY_NAME),
    HistoryField(_LM_STUDIO, "/api/v1/chat", "refused", _NO_ROUTE),
    HistoryField("OpenAI's assistants", "/v1/threads", "refused", _NO_ROUTE),
    *(
        HistoryField(_ANY, name, "refused", _BY_NAME)
        for name in (
            "conversation_id",
            "thread_id",
            "parent_message_id",
            "previous_interaction_id",
            "chat_history",
            "history",
            "cached_content",
        )
    ),
)
"""Fields of all protocols that name a history, or what is left of one. docs/http.md lists them."""

_NAMES = re.compile(
    "(previous|prev|parent|prior)(input|output)?"
    "(response|message|interaction|turn|conversation|chat|request|item|completion|input|output)s?"
    "(ids?|history)?"
    "|(conversation|thread|interaction)(s|ids?|uuid|state|handle)?"
    "|(chat|message|conversation|dialog)?history(ids?)?"
    "|(continuation|resume|resumption)(from|ids?|token|handle)?"
    "|sessionparams|sessionstate|systemprompt|cachedcontents?|context|compaction"
)
"""Names that say where a history is, in lower case and without what joins their words."""

_OTHERWISE: Mapping[str, str] = {
    "prompt": "prompts are not kept here; send what is in it",
    "system_prompt": "send a system message",
    "compaction": "nothing is summed up here; send the messages",
    "context": "send the messages to /api/chat, whose tokens are in the cache",
    "thread": "only /v1/messages has threads; send all messages",
    "conversation": "only /v1/responses has conversations; send all messages",
    "previous_response_id": "only /v1/responses has it; send all messages",
}
_ADVICE = "no history is found by it here; send the whole conversation, which is cheap where it was"
_ADVICE += " read before"


def names_history(name: str) -> bool:
    """Return whether a field's name says that a history is elsewhere."""
    return _NAMES.fullmatch(re.sub("[_.-]", "", name.lower())) is not None


def refuse_histories(body: Mapping[Any, Any], declared: Collection[str]) -> None:
    """Refuse a request that names its history in a field which it cannot have.

    Args:
        body: as it was sent.
        declared: fields that the request may have, as clients call them.

    Raises:
        ApiError: 400, it does.
    """
    for name, value in body.items():
        if name in declared or value in (None, "", [], {}, False):
            continue
        is_stored_prompt = name == "prompt" and isinstance(value, dict)
        if is_stored_prompt or (isinstance(name, str) and names_history(name[:64])):
            advice = _OTHERWISE.get(name, _ADVICE)
            message = f"{name} is not honoured: {advice}"
            raise ApiError(400, message, "unsupported_field", param=name)
