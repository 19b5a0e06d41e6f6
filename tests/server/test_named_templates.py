"""Templates by name: the one for tools is used where there are tools, and clients are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from kvcellar.models.files.hub import find_checkpoint
from kvcellar.models.options import no_progress
from kvcellar.models.text.prompts import encode_plain, render
from kvcellar.models.text.tokenizer import load_tokenizer
from tests.models.gguf import writing
from tests.models.gguf.families import CASES
from tests.server.live import serving
from tests.server.scripted import QWEN, chat_tokenizer, scripted_host

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED = {"default": PLAIN, "tool_use": QWEN}
SAID = [{"role": "user", "content": "Hello."}]


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}],
}


def test_a_gguf_files_template_for_tools_is_read_and_used(tmp_path, monkeypatch):
    both = [{"name": name, "template": text} for name, text in NAMED.items()]
    monkeypatch.setattr(writing, "TEMPLATE", both)
    path = tmp_path / "model.gguf"
    CASES["llama"].write(path)
    tokenizer = load_tokenizer(find_checkpoint(str(path), no_progress))
    assert tokenizer.chat_template == NAMED
    assert "tools" not in render(tokenizer, SAID).text
    assert '"name": "f"' in render(tokenizer, SAID, [tool("f")]).text


def test_calls_are_written_by_the_template_that_knows_them():
    tokenizer = chat_tokenizer(NAMED)
    assert "<tool_call>" in render(tokenizer, [*SAID, CALL, *SAID]).text
    assert render(tokenizer, SAID).text == render(chat_tokenizer(PLAIN), SAID).text


def test_clients_are_told_of_templates_by_their_names(tmp_path):
    load = lambda *_: scripted_host(lambda n: f"Yes {n}.", template=NAMED)  # noqa: E731
    with serving(tmp_path, load=load) as live:
        asked = {"messages": SAID, "max_tokens": 4}
        plain = live.post("/v1/chat/completions", asked)
        offered = live.post("/v1/chat/completions", {**asked, "tools": [tool("f")]})
        n_plain, n_offered = (one["usage"]["prompt_tokens"] for one in (plain, offered))
        assert n_offered > n_plain + 20
        props = live.get("/props")
        assert props["chat_template"] == PLAIN and props["chat_template_tool_use"] == QWEN
        shown = live.post("/api/show", {"model": "demo"})
        assert shown["template"] == PLAIN
        assert shown["model_info"]["tokenizer.chat_template.tool_use"] == QWEN
        assert {"tools", "thinking"} <= set(shown["capabilities"])


@pytest.mark.parametrize("template", [PLAIN, QWEN], ids=["in a message", "by the template"])
def test_the_order_of_tools_is_kept_however_the_model_is_told_them(tmp_path, template):
    load = lambda *_: scripted_host(lambda n: f"Yes {n}.", template=template)  # noqa: E731
    with serving(tmp_path, load=load, rules=("tool-order",)) as live:
        asked = {"messages": SAID, "max_tokens": 4}
        one, two = tool("alpha"), tool("beta")
        live.post("/v1/chat/completions", {**asked, "tools": [one, two]})
        again = live.post("/v1/chat/completions", {**asked, "tools": [two, one]})
        (change,) = again["kvcellar"]["rules"]
        assert change["rule"] == "tool-order" and change["before"].index("beta") < 60
        usage = again["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] - 1


def test_a_text_that_begins_with_bos_has_one(tmp_path):
    tokenizer = chat_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.bos_token = "<|endoftext|>"

    def encode(text, *, add_special_tokens):
        return [*([bos] if add_special_tokens else ()), *tokenizer.encode(text)]

    opening = SimpleNamespace(encode=encode, bos_token_id=tokenizer.bos_token_id)
    rest = tokenizer.encode("Hello.")
    for text in ("Hello.", "<|endoftext|>Hello."):
        assert encode_plain(opening, text, add_special_tokens=True) == [bos, *rest]
    two = "<|endoftext|><|endoftext|>Hello."
    assert encode_plain(opening, two, add_special_tokens=True) == [bos, bos, *rest]
    assert encode_plain(opening, two, add_special_tokens=False) == [bos, bos, *rest]


def test_a_completion_whose_prompt_begins_with_bos_reads_one(tmp_path):
    bos = "<|endoftext|>"

    def load(*_):
        host = scripted_host(lambda n: "Yes.")
        host.tokenizer.bos_token = bos
        host.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, host.tokenizer.bos_token_id)]
        )
        return host

    with serving(tmp_path, load=load) as live:
        for path, field, more in (
            ("/v1/completions", "prompt", {"max_tokens": 0}),
            ("/tokenize", "prompt", {}),
            ("/tokenize", "content", {"add_special": True}),
        ):
            bare, spelt = (live.post(path, {field: f"{t}Hello.", **more}) for t in ("", bos))
            if "usage" in bare:
                assert bare["usage"]["prompt_tokens"] == spelt["usage"]["prompt_tokens"]
            else:
                assert bare["tokens"] == spelt["tokens"]
                assert bare["tokens"][0] not in bare["tokens"][1:]
