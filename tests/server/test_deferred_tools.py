"""Tools that a client's own search finds later: Claude Code keeps most of its tools back so."""

from __future__ import annotations

from tests.server.test_clients import CLAUDE_TOOLS, MESSAGES, schema

WEB_FETCH = CLAUDE_TOOLS[1]
FETCH = {**WEB_FETCH, "defer_loading": True}
SEARCH = {"name": "ToolSearch", "input_schema": schema(["query"], query={"type": "string"})}


def searched(*names):
    """A conversation in which the client's own search has found some tools."""
    call = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "select:x"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    return [
        {"role": "user", "content": "Fetch it."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


def test_a_deferred_tool_is_told_where_a_result_refers_to_it_and_all_before_stays_cached(live):
    body = {"max_tokens": 8, "tools": [SEARCH]}
    before = live.post(MESSAGES, {**body, "messages": searched()[:1]})["usage"]
    body["tools"] = [FETCH, SEARCH]  # in front of what was there, as clients sort them
    usage = live.post(MESSAGES, {**body, "messages": searched("WebFetch")})["usage"]
    asked = before["input_tokens"] + before["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] >= asked > 50
    assert usage["input_tokens"] > 100  # its definition


def test_a_deferred_tool_can_be_called_once_it_is_told(live):
    body = {
        "tools": [FETCH, SEARCH],
        "tool_choice": {"type": "tool", "name": "WebFetch"},
        "max_tokens": 60,
        "temperature": 0,
    }
    (call,) = live.post(MESSAGES, {**body, "messages": searched("WebFetch")})["content"]
    assert call["name"] == "WebFetch" and set(call["input"]) <= {"url"}
    refused = live.http.post(MESSAGES, json={**body, "messages": searched()[:1]})
    assert refused.status_code == 400 and "WebFetch" in refused.json()["error"]["message"]


def test_nothing_is_deferred_beside_a_search_that_is_not_run_here(live):
    tools = [FETCH, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
    count = f"{MESSAGES}/count_tokens"
    told = [{"role": "user", "content": "Fetch it."}]
    beside = live.post(count, {"messages": told, "tools": tools})["input_tokens"]
    alone = live.post(count, {"messages": told, "tools": [FETCH]})["input_tokens"]
    plain = live.post(count, {"messages": told, "tools": [WEB_FETCH]})["input_tokens"]
    assert beside == plain > alone
