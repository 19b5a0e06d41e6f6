"""The page as a place to talk: Markdown, forks by editing, search, what others say, files."""

from __future__ import annotations

import json
import math
import re
import threading
from importlib.resources import files

import pytest
from playwright.sync_api import expect

from kvcellar.agents import Turn
from kvcellar.agents.text.reading import Reading
from kvcellar.dialects import choose_dialect
from kvcellar.engine import SamplingParams
from tests.server.live import PATIENCE_S, serving
from tests.server.test_viewer import (
    SHORT,
    browser,
    chosen,
    open_page,
    pytestmark,
    sampled,
    shown,
    slowed,
)

__all__ = ["browser", "open_page", "pytestmark", "shown"]

HOSTILE = """# Title

Here is **bold**, `code` and a [link](https://example.com/a?b=c).

```python
def add(a, b):  # adds
    return a + b
```

- [x] done
- [ ] open

| a | b |
|---|---|
| 1 | 2 |

<img src=x onerror="document.title='owned'">
<script>document.title='owned'</script>
<style>body { display: none }</style>
<form action="//evil"><button>Press</button></form>
[bad](javascript:document.title='owned') ![spy](https://evil/spy.png)
![<img src=x onerror="document.title='owned'">](https://evil/"onerror="x)
<a href="#" id="prompt" style="position:fixed">x</a>
```html"><script>document.title='owned'</script>
<b>
```
"""


class Pretended(Reading):
    """Keeps a message as the answer, whatever was said."""

    def __init__(self, message):
        super().__init__(choose_dialect(""), True, True)
        self.message = message

    def kept(self, text):
        return self.message


def said(live, agent_id, *messages):
    """Give an agent a conversation whose answers are these texts, as far as the page can tell."""
    live.post("/v1/agents", {"id": agent_id})

    async def turn():
        asked = [{"role": "user", "content": "Ask."}]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for text in messages:
            turn = Turn(agent_id, messages=asked, params=params, reading=Pretended(text))
            async for _ in live.service.agents.turns.generate(turn):
                pass
            asked = [*asked, text, {"role": "user", "content": "More."}]

    live.run(turn())


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


# What is said -------------------------------------------------------------------------------------


def test_markdown_is_shown_and_nothing_of_a_stranger_runs(open_page, shown):
    said(shown, "writer", answer(HOSTILE))
    page = open_page()
    chosen(page, "writer")
    body = page.locator("#talk .assistant .md")
    expect(body.locator("strong")).to_have_text("bold")
    expect(body.locator("table td").first).to_have_text("1")
    expect(body.locator(".code").first.locator(".bar span")).to_have_text("python")
    expect(body.locator(".hljs-keyword").first).to_have_text("def")
    expect(body.get_by_role("link", name="link")).to_have_attribute("rel", re.compile("noopener"))
    expect(body.locator("li")).to_have_text(["☑ done", "☐ open"])
    for tag in ("img", "script", "style", "form", "iframe", "svg", "input"):
        assert body.locator(tag).count() == 0, tag
    assert body.locator("[onerror], [style], [id]").count() == 0
    hrefs = body.locator("a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert all(href.startswith("https://") for href in hrefs)
    expect(body).to_contain_text("<script>")
    assert page.title() == "kvcellar" and page.locator("#prompt").count() == 1


FORMAL = r"""It costs $5 or $10, and $x_1 * y_2$ or \(a_1\) is no emphasis.

$$\int_0^1 x^2\,dx = \frac{1}{3}$$

\[\unknownmacro{x}\]

$\href{javascript:alert(1)}{x}$ `$y$`

| a | b | c |
|:--|:-:|--:|
| 1 | 2 | 3 |

9. nine
10. ten
"""


def test_formulas_alignment_and_numbers_are_shown_as_they_are_meant(open_page, shown):
    said(shown, "formal", answer(FORMAL))
    page = open_page()
    chosen(page, "formal")
    body = page.locator("#talk .assistant .md")
    expect(body.locator("math")).to_have_count(3)
    expect(body.locator(".formula math")).to_have_attribute("display", "block")
    expect(body).to_contain_text("It costs $5 or $10, and")
    assert body.locator("em").count() == 0
    expect(body.locator("code.tex").first).to_have_text(r"\unknownmacro{x}")
    expect(body.locator("code:not(.tex)")).to_have_text("$y$")
    assert body.locator("[href], [style*=color]").count() == 0
    aligned = "cells => cells.map((cell) => getComputedStyle(cell).textAlign)"
    assert body.locator("tbody td").evaluate_all(aligned) == ["left", "center", "right"]
    expect(body.locator("ol")).to_have_attribute("start", "9")
    room = body.locator("ol").evaluate("list => getComputedStyle(list).paddingLeft")
    assert float(room.removesuffix("px")) > 36, "two digits and their dot are not clipped"


def test_a_call_is_a_card_with_its_arguments_and_what_came_of_it(open_page, shown):
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Bremen"}'}
    messages = [
        {"role": "user", "content": "What is the weather?"},
        answer("", tool_calls=[call], reasoning_content="I look."),
        {"role": "tool", "tool_call_id": "c1", "content": '{"today": "rain"}'},
    ]
    shown.post("/v1/agents", {"id": "weather"})

    async def turn():
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        turn = Turn("weather", messages=messages, params=params)
        async for _ in shown.service.agents.turns.generate(turn):
            pass

    shown.run(turn())
    page = open_page()
    chosen(page, "weather")
    card = page.locator("#talk .call")
    expect(card.locator(".called")).to_have_text("Calls get_weather")
    expect(card.locator("pre").first).to_have_text('{\n  "city": "Bremen"\n}')
    expect(card.locator(".result pre")).to_have_text('{\n  "today": "rain"\n}')
    expect(page.locator("#talk .thought")).not_to_have_attribute("open", "")
    expect(page.locator("#talk .said-by")).to_have_count(3)


def test_a_chat_is_saved_as_markdown_and_as_json(open_page, shown):
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "look", "arguments": {"at": "```"}}
    said(shown, "saved", answer("**Yes.**", reasoning_content="Hm.", tool_calls=[call]))
    page = open_page()
    chosen(page, "saved")
    texts = []
    for kind, ending in (("markdown", "md"), ("json", "json")):
        page.locator("#verbs summary").click()
        with page.expect_download() as download:
            page.locator(f'[data-format="{kind}"]').click()
        assert download.value.suggested_filename == f"saved.{ending}"
        texts.append(download.value.path().read_text())
    markdown, found = texts[0], json.loads(texts[1])
    assert markdown.startswith("# Ask.\n\n`saved` with demo: 1 turn, 14 tokens")
    assert "<summary>Thought</summary>\n\nHm.\n\n</details>\n\n**Yes.**" in markdown
    assert 'Calls `look`:\n\n````json\n{\n  "at": "```"\n}\n````' in markdown
    assert found["messages"] == shown.get("/v1/agents/saved")["messages"]
    assert (found["id"], found["title"], found["model"]) == ("saved", "Ask.", "demo")


def test_the_settings_say_what_goes_and_whose_wish_it_is(open_page, shown, monkeypatch):
    host = shown.host()
    monkeypatch.setattr(host, "sampling", {"temperature": 0.6, "top_k": 20})
    page = open_page()
    chosen(page, "root")
    page.locator("#settings-open").click()
    told = page.locator("#goes-temperature")
    expect(page.locator("#set-temperature")).to_have_value("")
    expect(page.locator("#set-temperature")).to_have_attribute("placeholder", "0.6")
    expect(told).to_have_text("0.6, by the model")
    expect(page.locator("#goes-top_k")).to_have_text("20, by the model")
    expect(page.locator("#goes-top_p")).to_have_text("1, by the server")
    expect(page.locator("#goes-max_tokens")).to_have_text("1024, by the server")
    expect(page.locator("#goes-seed")).to_have_text("another each time, by the server")
    page.locator("#set-temperature").fill("0")
    expect(told).to_have_text("yours; else 0.6, by the model")
    page.locator("#settings .primary").click()
    page.locator("#settings-open").click()
    expect(page.locator("#set-temperature")).to_have_value("0")
    page.locator("#settings-clear").click()
    page.locator("#settings .primary").click()
    page.locator("#settings-open").click()
    expect(page.locator("#set-temperature")).to_have_value("")


def test_names_reasoning_and_calls_of_strangers_are_text(open_page, shown):
    evil = "<img src=x onerror=\"document.title='owned'\">"
    call = {"id": "c1", "type": "function", "function": {"name": evil, "arguments": {"a": evil}}}
    said(shown, "caller", answer("Done.", reasoning_content=f"I think {evil}", tool_calls=[call]))
    page = open_page()
    chosen(page, "caller")
    expect(page.locator("#talk .call")).to_contain_text(evil)
    page.locator("#talk .thought summary").click()
    expect(page.locator("#talk .thought")).to_contain_text(f"I think {evil}")
    assert page.title() == "kvcellar" and page.locator("#talk img").count() == 0


def test_the_policy_forbids_what_the_page_does_not_need(shown):
    for path in ("/", "/viewer/main.js", "/viewer/vendor/purify.js"):
        policy = shown.http.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    assert shown.http.get("/viewer/vendor/LICENSES.txt").status_code == 200
    for path in ("/viewer/nothing.js", "/viewer/../app.py", "/viewer/%2e%2e/app.py", "/viewer/"):
        assert shown.http.get(path).status_code == 404


def test_code_is_copied(open_page, shown):
    said(shown, "coder", answer("```python\nx = 1\n```"))
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chosen(page, "coder")
    page.locator("#talk .code button").click()
    expect(page.locator("#toast-text")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"


def test_beside_each_turn_stands_what_it_took(open_page, shown):
    page = open_page()
    chosen(page, "root")
    first, second = (page.locator("#talk .place").nth(i) for i in range(2))
    expect(first).to_contain_text("reused 0 of")
    expect(second).to_contain_text(re.compile(r"turn 2 · reused 1\d\d of 2\d\d · first word after"))


# Said again ---------------------------------------------------------------------------------------


def test_an_edited_message_is_sent_in_a_fork_and_the_old_one_stays(open_page, shown):
    said(shown, "edited", answer("One."), answer("Two."))
    page = open_page()
    chosen(page, "edited")
    sampled(page, max_tokens=4)
    page.locator("#talk .user").nth(1).get_by_role("button", name="Edit").click()
    page.locator(".edit textarea").fill("Something else.")
    page.reload()
    page.locator("#talk .user").nth(1).get_by_role("button", name="Edit").click()
    expect(page.locator(".edit textarea")).to_have_value("Something else.")
    page.locator(".edit .primary").click()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", re.compile("^edited-"))
    expect(page.locator("#talk .user")).to_have_count(2)
    expect(page.locator("#talk .user").last).to_contain_text("Something else.")
    fork = page.locator("#agent-title").get_attribute("data-id")
    shown.until(lambda: shown.get(f"/v1/agents/{fork}")["n_turns"] == 2, "the answer")
    assert shown.get(f"/v1/agents/{fork}")["parent"] == "edited"
    assert shown.get("/v1/agents/edited")["messages"][2]["content"] == "More."


def test_another_answer_is_a_fork(open_page, shown):
    said(shown, "again", answer("One."))
    page = open_page()
    chosen(page, "again")
    sampled(page, max_tokens=4)
    page.get_by_role("button", name="Another answer in turn 1").click()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", re.compile("^again-"))
    fork = page.locator("#agent-title").get_attribute("data-id")
    shown.until(lambda: shown.get(f"/v1/agents/{fork}")["n_turns"] == 1, "the answer")
    assert shown.get(f"/v1/agents/{fork}")["messages"][0]["content"] == "Ask."


def test_an_agent_is_made_with_any_title_and_what_is_refused_stays(open_page, shown):
    page = open_page(expected="400")
    page.locator("#new-more").click()
    page.locator("#make-name").fill("My chat, № 1 (new)")
    page.locator("#make-system").fill("You write verse. " * 20000)
    page.locator("#make .primary").click()
    expect(page.locator("#make-trouble")).to_contain_text("context")
    page.reload()
    page.locator("#new-more").click()
    expect(page.locator("#make-name")).to_have_value("My chat, № 1 (new)")
    page.locator("#make-system").fill("You write verse.")
    page.locator("#make .primary").click()
    expect(page.locator("#agent-title")).to_have_text("My chat, № 1 (new)")
    expect(page.locator("#talk .system")).to_contain_text("You write verse.")
    made = shown.get("/v1/agents/my-chat-no-1-new")
    assert made["messages"][0]["content"] == "You write verse."


def test_a_chat_is_called_by_what_was_said_until_it_is_renamed(open_page, shown):
    agent_id = shown.post("/v1/agents", {})["id"]
    shown.post(f"/v1/agents/{agent_id}/generate", {"text": "Ask.", **SHORT})
    page = open_page()
    chosen(page, agent_id)
    row = page.locator(f'#tree [data-id="{agent_id}"] .who b')
    expect(row).to_have_text("Ask.")
    expect(page.locator("#agent-title")).to_have_text("Ask.")
    page.locator("#verbs summary").click()
    page.locator('[data-verb="rename"]').click()
    expect(page.locator("#title-value")).to_be_focused()
    page.locator("#title-value").fill("<b>Rain</b> & sun")
    page.keyboard.press("Enter")
    expect(row).to_have_text("<b>Rain</b> & sun")
    expect(page.locator("#agent-title")).to_have_text("<b>Rain</b> & sun")
    assert shown.get(f"/v1/agents/{agent_id}")["title"] == "<b>Rain</b> & sun"


def test_a_new_chat_becomes_an_agent_with_its_first_message(open_page, shown):
    page = open_page()
    expect(page.locator("#tree li").first).to_be_visible()
    before = page.locator("#tree li").count()
    page.locator("#new").click()
    expect(page.locator("#agent-title")).to_have_text("A new chat")
    sampled(page, max_tokens=4)
    page.locator("#prompt").fill("Begin.")
    page.reload()
    page.locator("#new").click()  # also before the page knows who there is
    expect(page.locator("#prompt")).to_have_value("Begin.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#tree li")).to_have_count(before + 1)
    expect(page.locator("#talk .assistant")).to_have_count(1)
    expect(page.locator("#prompt")).to_have_value("")


def test_an_answer_that_was_cut_goes_on_at_a_click(open_page, shown):
    shown.post("/v1/agents", {"id": "cut"})
    shown.post("/v1/agents/cut/generate", {"text": "import os", **SHORT})
    page = open_page()
    chosen(page, "cut")
    sampled(page, max_tokens=4, temperature=0)
    expect(page.locator("#talk .cut")).to_have_text("cut at the limit of tokens")
    page.get_by_role("button", name="Continue this answer").click()
    shown.until(lambda: shown.get("/v1/agents/cut")["n_tokens"] > 18, "more")
    expect(page.locator("#talk .assistant")).to_have_count(1)
    expect(page.locator("#talk .user")).to_have_count(1)
    assert len(shown.get("/v1/agents/cut")["messages"]) == 2


# An answer goes on ------------------------------------------------------------------------------


def test_an_answer_goes_on_while_the_page_is_loaded_again_and_so_does_what_waits(
    open_page, shown, monkeypatch
):
    goes_on = slowed(monkeypatch, shown)
    shown.post("/v1/agents", {"id": "joined"})
    page = open_page()
    chosen(page, "joined")
    sampled(page, max_tokens=120, temperature=0)
    page.locator("#prompt").fill("Tell me.")
    page.keyboard.press("Enter")
    expect(page.locator("#talk .now .body")).not_to_have_text(re.compile("^(waiting.*|read.*)?$"))
    page.reload()
    expect(page.locator("#agent-title")).to_have_text("joined")
    expect(page.locator("#talk .now .body")).not_to_have_text(re.compile("^(waiting.*|read.*)?$"))
    expect(page.locator("#talk .user")).to_have_count(1)
    expect(page.locator("#stop")).to_be_visible()
    page.locator("#prompt").fill("And then?")
    page.keyboard.press("Enter")
    expect(page.locator("#queue li")).to_have_count(1)
    goes_on.set()
    shown.until(lambda: shown.get("/v1/agents/joined")["n_turns"] == 2, "both answers")
    expect(page.locator("#talk .place")).to_have_count(2)
    found = shown.get("/v1/agents/joined")
    assert [m["content"] for m in found["messages"]][::2] == ["Tell me.", "And then?"]
    assert found["turns"][0]["reason"] == "length", "nothing stopped it"


def test_an_answer_that_is_stopped_says_so_and_is_continued(open_page, shown, monkeypatch):
    slowed(monkeypatch, shown)
    shown.post("/v1/agents", {"id": "halted"})
    page = open_page()
    chosen(page, "halted")
    sampled(page, max_tokens=400, temperature=0)
    page.locator("#prompt").fill("Tell me all.")
    page.keyboard.press("Enter")
    expect(page.locator("#talk .now .body")).not_to_have_text(re.compile("^(waiting.*|read.*)?$"))
    page.reload()
    page.locator("#stop").click()  # also by a page that has joined
    expect(page.locator("#talk .cut")).to_have_text("stopped")
    part = shown.get("/v1/agents/halted")
    assert part["turns"][-1]["reason"] == "cancelled"
    assert part["messages"][-1]["content"]
    sampled(page, max_tokens=4)
    page.get_by_role("button", name="Continue this answer").click()
    expect(page.locator("#talk .cut")).to_have_text("cut at the limit of tokens")
    whole = shown.get("/v1/agents/halted")["messages"]
    assert len(whole) == 2 and whole[-1]["content"].startswith(part["messages"][-1]["content"])
    assert len(whole[-1]["content"]) > len(part["messages"][-1]["content"])


def test_what_is_sent_stands_in_the_conversation_at_once_and_comes_back_if_it_was_refused(
    open_page, shown
):
    page = open_page(expected="400")
    page.locator("#new").click()
    made, asked = held(page, "**/v1/agents"), held(page, "**/generate")
    page.locator("#prompt").fill("Hello.")
    page.keyboard.press("Enter")
    expect(page.locator("#talk .user")).to_contain_text("Hello.")
    expect(page.locator("#prompt")).to_have_value("")
    page.keyboard.type("More")
    arrived(page, made, 1).continue_()
    arrived(page, asked, 1).fulfill(
        status=400, json={"error": {"message": "too much", "code": "invalid_value"}}
    )
    expect(page.locator("#toast-text")).to_have_text("too much")
    expect(page.locator("#prompt")).to_have_value("Hello.\nMore")
    expect(page.locator("#talk .user")).to_have_count(0)


def test_a_message_that_was_on_its_way_when_the_page_went_comes_back(open_page, shown):
    shown.post("/v1/agents", {"id": "on-its-way"})
    page = open_page(expected="Failed to load")
    chosen(page, "on-its-way")
    asked = held(page, "**/generate")
    page.locator("#prompt").fill("Did you hear that?")
    page.keyboard.press("Enter")
    arrived(page, asked, 1)
    page.reload()
    expect(page.locator("#prompt")).to_have_value("Did you hear that?")
    expect(page.locator("#toast-text")).to_contain_text("had not arrived")
    assert shown.get("/v1/agents/on-its-way")["messages"] == []


def test_the_page_says_how_much_of_a_prompt_is_read(open_page, shown, monkeypatch):
    shown.post("/v1/agents", {"id": "reader"})
    shown.post("/v1/agents/reader/generate", {"text": "Known. " * 100, **SHORT})
    page = open_page()
    chosen(page, "reader")
    sampled(page, max_tokens=4)
    goes_on = threading.Event()
    engine = shown.host().engine
    step = engine.step

    def stepwise():
        n = sum(one.n_computed >= 512 for one in engine.scheduler.running)
        if n:
            goes_on.wait(0.05)
            if not goes_on.is_set():
                return []
        return step()

    monkeypatch.setattr(engine, "step", stepwise)
    page.locator("#prompt").fill("New. " * 400)
    page.keyboard.press("Enter")
    expect(page.locator("#talk .reading")).to_have_text(
        re.compile(r"read [\d,]+ of [\d,]+ tokens, [\d,]+ of them from the cache")
    )
    expect(page.locator("#talk .reading progress")).to_be_visible()
    goes_on.set()
    expect(page.locator("#talk .place")).to_have_count(2)


# The tree -----------------------------------------------------------------------------------------


def test_the_tree_of_forks_is_walked_compared_and_pruned_by_keys(open_page, shown):
    shown.post("/v1/agents", {"id": "trunk"})
    for text in ("One.", "Two."):
        shown.post("/v1/agents/trunk/generate", {"text": text, **SHORT})
    for name in ("left", "right"):
        shown.post("/v1/agents/trunk/fork", {"id": f"trunk-{name}", "turn": 1})
        shown.post(f"/v1/agents/trunk-{name}/generate", {"text": f"To the {name}.", **SHORT})
    page = open_page()
    chosen(page, "trunk-left")
    page.keyboard.press("t")
    rows = page.locator("#branch-list li")
    expect(rows).to_have_count(3)
    expect(page.locator("#branches svg line")).to_have_count(2)
    page.keyboard.press(" ")
    page.keyboard.press("ArrowDown")
    page.keyboard.press(" ")
    page.locator("#compare-open").click()
    expect(page.locator("#common")).to_contain_text("2 messages are the same")
    expect(page.locator("#left")).to_contain_text("To the left.")
    expect(page.locator("#left .said-by.user mark")).to_have_text("left.")
    expect(page.locator("#right .said-by.user mark")).to_have_text("right.")
    expect(page.locator("#right .assistant .md")).to_have_count(1)
    expect(page.locator("#right")).to_contain_text("To the right.")
    page.keyboard.press("Escape")
    rows.nth(2).locator(".open").focus()
    page.keyboard.press("Delete")
    expect(rows).to_have_count(2)
    assert shown.http.get("/v1/agents/trunk-right").status_code == 404
    page.locator("#branch-list .open").first.click()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "trunk")
    page.locator("#toast-do").click()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "trunk-right")


def test_another_answer_parts_where_the_answers_do(open_page, shown):
    text = "Write one line about rain."
    shown.post("/v1/agents", {"id": "asked"})
    for name, seed in (("asked", 1), ("answered", 2)):
        if name != "asked":
            shown.post("/v1/agents/asked/fork", {"id": name, "turn": 0})
        shown.post(
            f"/v1/agents/{name}/generate", {"text": text, **SHORT, "temperature": 1, "seed": seed}
        )
    other = shown.get("/v1/agents/answered")
    seen = {agent["id"]: agent for agent in shown.get("/v1/agents")["data"]}
    assert other["parent_position"] == 0
    n = seen["answered"]["parted_at"]
    assert seen["answered"]["parted_from"] == "asked" and n >= other["turns"][0]["n_prompt"] > 8
    page = open_page()
    chosen(page, "answered")
    expect(page.locator("#lineage")).to_contain_text(f"{n} tokens shared")
    page.keyboard.press("t")
    expect(page.locator("#branches svg line")).to_have_count(1)
    left, widest = page.locator("#branch-list").evaluate(
        "list => [parseFloat(list.querySelectorAll('.bar')[1].style.left), "
        "parseFloat(list.querySelectorAll('.bar')[0].style.left)]"
    )
    assert left > 50 and widest == 0


def test_no_chat_looks_like_what_is_shared_and_each_is_seen_on_its_ground(open_page):
    """The colours of a thousand ids, in OKLab and as WCAG weighs them."""
    for scheme in ("light", "dark"):
        page = open_page(scheme=scheme)
        expect(page.locator("#status-text")).to_contain_text("demo")
        found = page.evaluate(
            """async () => {
                const { colour } = await import("/viewer/state.js");
                const pen = document.createElement("canvas").getContext("2d");
                const style = getComputedStyle(document.documentElement);
                const probe = document.body.appendChild(document.createElement("i"));
                const rgb = (css) => {
                    probe.style.color = css;
                    pen.fillStyle = getComputedStyle(probe).color;
                    pen.fillRect(0, 0, 1, 1);
                    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
                };
                const hex = (i) => (i * 2654435761 >>> 0).toString(16);
                return {
                    shared: rgb("var(--gold)"),
                    grounds: ["--sunk", "--card"].map((name) => rgb(`var(${name})`)),
                    colours: Array.from({ length: 1000 }, (_, i) => rgb(colour(`agent-${hex(i)}`))),
                };
            }"""
        )
        shared = oklab(found["shared"])
        for rgb in found["colours"]:
            assert math.dist(oklab(rgb), shared) > 0.08, rgb
            for ground in found["grounds"]:
                assert contrast(rgb, ground) >= 3, (rgb, ground)
        assert len({tuple(rgb) for rgb in found["colours"]}) > 300


def linear(rgb):
    parts = [part / 255 for part in rgb]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(a, b):
    dark, light = sorted(
        sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (a, b)
    )
    return (light + 0.05) / (dark + 0.05)


def oklab(rgb):
    r, g, b = linear(rgb)
    cones = [
        (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3),
        (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3),
        (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3),
    ]
    rows = (
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    )
    return [sum(w * c for w, c in zip(row, cones, strict=True)) for row in rows]


# Looking on, looking for --------------------------------------------------------------------------


def test_what_another_client_is_told_is_seen_as_it_comes(open_page, shown, monkeypatch):
    goes_on = slowed(monkeypatch, shown)
    shown.post("/v1/agents", {"id": "watched"})
    page = open_page()
    chosen(page, "watched")
    shown.until(lambda: "watched" in shown.service.agents.live._listeners, "the page")
    body = {"text": "Say it to somebody else.", "max_tokens": 40, "temperature": 0}
    other = threading.Thread(target=shown.post, args=("/v1/agents/watched/generate", body))
    other.start()
    expect(page.locator("#talk .now")).to_be_visible()
    expect(page.locator("#talk .user")).to_contain_text("Say it to somebody else.")
    expect(page.locator("#talk .now .body")).not_to_have_text("")
    goes_on.set()
    other.join()
    expect(page.locator("#talk .now")).to_have_count(0)
    expect(page.locator("#talk .place")).to_contain_text("turn 1")
    expect(page.locator("#talk .user")).to_have_count(1)


def test_what_was_said_is_found_and_shown(open_page, shown):
    said(shown, "seeker", answer("Nothing."), answer("The needle is here."), answer("Nothing."))
    page = open_page()
    page.keyboard.press("s")
    page.keyboard.type("NEEDLE")
    expect(page.locator("#found")).to_have_text("1 agent")
    expect(page.locator("#hits mark")).to_have_text("needle")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "seeker")
    expect(page.locator("#talk .lit")).to_contain_text("The needle is here.")
    page.locator("#search").press("Escape")
    expect(page.locator("#tree")).to_be_visible()


def test_a_text_file_goes_with_a_message_and_others_are_refused(open_page, shown):
    shown.post("/v1/agents", {"id": "filed"})
    page = open_page()
    chosen(page, "filed")
    sampled(page, max_tokens=4)
    page.locator("#file").set_input_files(
        [
            {"name": "a.md", "mimeType": "text/markdown", "buffer": b"# A\n```\nx\n```\n"},
            {"name": "b.bin", "mimeType": "application/octet-stream", "buffer": b"\x00\xff"},
        ]
    )
    expect(page.locator("#toast-text")).to_have_text("b.bin is no text")
    expect(page.locator("#files li")).to_have_count(1)
    page.reload()
    expect(page.locator("#files li")).to_contain_text("a.md")
    page.locator("#prompt").fill("Read this.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#talk .place")).to_be_visible()
    expect(page.locator("#files")).to_be_hidden()
    content = shown.get("/v1/agents/filed")["messages"][0]["content"]
    assert content == "Read this.\n\nFile a.md:\n\n````\n# A\n```\nx\n```\n````"


def test_a_file_is_dropped_on_the_page(open_page, shown):
    page = open_page()
    chosen(page, "root")
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["hello"], "dropped.txt", { type: "text/plain" }));
            const how = { dataTransfer: data, bubbles: true, cancelable: true };
            for (const kind of ["dragover", "drop"])
                document.dispatchEvent(new DragEvent(kind, how));
        }"""
    )
    expect(page.locator("#files li")).to_contain_text("dropped.txt, 5 characters")


def test_a_marked_agent_that_is_pruned_is_marked_no_more_and_keys_go_on(open_page, shown):
    shown.post("/v1/agents", {"id": "stem"})
    shown.post("/v1/agents/stem/generate", {"text": "One.", **SHORT})
    for name in ("stem-a", "stem-b", "stem-c"):
        shown.post("/v1/agents/stem/fork", {"id": name})
    page = open_page()
    chosen(page, "stem")
    page.keyboard.press("t")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
        page.keyboard.press(" ")
    expect(page.locator("#compare-open")).to_be_enabled()
    page.keyboard.press("Delete")
    expect(page.locator("#branch-list li")).to_have_count(3)
    expect(page.locator("#compare-open")).to_be_disabled()
    page.keyboard.press("ArrowDown")
    expect(page.locator('#branch-list [data-id="stem-a"] .open')).to_be_focused()


def test_a_name_as_long_as_a_name_can_be_leaves_room_to_talk(open_page, shown):
    name = "N" * 128
    shown.post("/v1/agents", {"id": name})
    page = open_page(width=390, height=844)
    chosen(page, name)
    assert page.locator("#agent-title").bounding_box()["height"] < 60
    chosen(page, name)  # once more: the list goes, though nothing else changes
    expect(page.locator("#side")).not_to_have_class("open")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# Nothing is lost, and nothing is sent twice -------------------------------------------------------


def held(page, pattern):
    """Requests to a path that wait for the test, in the order in which they came."""
    waiting = []
    page.route(
        pattern,
        lambda route: (
            waiting.append(route) if route.request.method == "POST" else route.continue_()
        ),
    )
    return waiting


def arrived(page, waiting, n):
    for _ in range(int(PATIENCE_S / 0.02)):
        if len(waiting) >= n:
            return waiting[n - 1]
        page.wait_for_timeout(20)
    raise AssertionError(f"{len(waiting)} of {n} requests came")


def test_a_second_enter_sends_nothing_twice_and_what_is_typed_on_stays(open_page, shown):
    page = open_page()
    expect(page.locator("#tree li").first).to_be_visible()
    before = page.locator("#tree li").count()
    page.locator("#new").click()
    sampled(page, max_tokens=4)
    made, asked = held(page, "**/v1/agents"), held(page, "**/generate")
    page.locator("#prompt").fill("One.")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    arrived(page, made, 1).continue_()
    first = arrived(page, asked, 1)
    page.keyboard.press("Enter")
    expect(page.locator("#talk .user")).to_have_text(re.compile("One."))
    expect(page.locator("#prompt")).to_have_value("")
    page.keyboard.type("And more.")
    first.continue_()
    expect(page.locator("#talk .place")).to_be_visible()
    expect(page.locator("#prompt")).to_have_value("And more.")
    expect(page.locator("#queue")).to_be_hidden()
    assert (len(made), len(asked)) == (1, 1)
    assert page.locator("#tree li").count() == before + 1


def test_what_waits_is_sent_in_order_also_what_was_taken_out_and_put_back(open_page, shown):
    shown.post("/v1/agents", {"id": "queued"})
    page = open_page()
    chosen(page, "queued")
    sampled(page, max_tokens=4)
    asked = held(page, "**/generate")
    for text in ("A.", "B.", "C."):
        page.locator("#prompt").fill(text)
        page.keyboard.press("Enter")
    arrived(page, asked, 1).continue_()
    second = arrived(page, asked, 2)
    expect(page.locator("#queue li")).to_have_count(1)  # what is on its way waits no more
    page.locator("#queue li").first.get_by_role("button", name="Do not send this").click()
    page.locator("#toast-do").click()
    second.continue_()
    arrived(page, asked, 3).continue_()
    shown.until(lambda: shown.get("/v1/agents/queued")["n_turns"] == 3, "three answers")
    said = [m["content"] for m in shown.get("/v1/agents/queued")["messages"]]
    assert said[::2] == ["A.", "B.", "C."]


STALE = """
    window.isStale = true; // what another tab has written is not seen here yet
    const real = Storage.prototype.getItem;
    Storage.prototype.getItem = function (key) {
        return isStale && key === "kvcellar-queue:shared" ? '["A."]' : real.call(this, key);
    };
"""


def test_what_waits_is_sent_by_one_of_two_tabs(open_page, shown):
    shown.post("/v1/agents", {"id": "shared"})
    page = open_page(expected="409")
    page.evaluate("""localStorage.setItem("kvcellar-queue:shared", '["A."]')""")
    other = page.context.new_page()
    other.add_init_script(STALE)
    asked = []
    for tab in (page, other):
        tab.add_init_script("delete Navigator.prototype.locks")  # as over plain http on a LAN
        tab.goto(shown.url)
        chosen(tab, "shared")
        tab.route("**/generate", lambda route: asked.append(route))
    sampled(page, max_tokens=4)
    for n, tab in enumerate((page, other), 1):
        tab.get_by_role("button", name="Send now").click()
        arrived(tab, asked, n)
    other.evaluate("window.isStale = false")
    for route in asked:
        assert route.request.post_data_json["follows"]
        route.continue_()
    for tab in (page, other):
        expect(tab.locator("#queue")).to_be_hidden()
        expect(tab.locator("#talk .user")).to_have_count(1)
        expect(tab.locator("#talk .place")).to_have_count(1)
    assert [m["content"] for m in shown.get("/v1/agents/shared")["messages"]][::2] == ["A."]
    assert len(asked) == 2


def test_what_is_written_behind_what_another_client_said_is_kept_and_both_are_seen(
    open_page, shown
):
    shown.post("/v1/agents", {"id": "twofold"})
    page = open_page(expected="409")
    chosen(page, "twofold")
    sampled(page, max_tokens=4)
    asked = held(page, "**/generate")
    page.locator("#prompt").fill("Mine.")
    page.keyboard.press("Enter")
    mine = arrived(page, asked, 1)
    shown.post("/v1/agents/twofold/generate", {"text": "Theirs.", **SHORT})
    mine.continue_()
    expect(page.locator("#toast")).to_contain_text("somebody else has talked with it")
    expect(page.locator("#talk .user")).to_contain_text(["Theirs."])  # once mine has gone
    expect(page.locator("#prompt")).to_have_value("Mine.")
    expect(page.locator("#send")).to_have_text("Send")  # and not "Queue": nobody talks with it
    page.locator("#prompt").press("Enter")
    arrived(page, asked, 2).continue_()
    expect(page.locator("#talk .place")).to_have_count(2)
    messages = shown.get("/v1/agents/twofold")["messages"]
    assert [m["content"] for m in messages][::2] == ["Theirs.", "Mine."]


def test_what_is_typed_for_an_agent_that_others_delete_goes_to_a_new_chat(open_page, shown):
    shown.post("/v1/agents", {"id": "doomed"})
    page = open_page(expected="status of 404")  # what it still asks of the agent
    chosen(page, "doomed")
    page.locator("#prompt").fill("A long thought.")
    shown.http.delete("/v1/agents/doomed")
    expect(page.locator("#agent-title")).to_have_text("A new chat")
    expect(page.locator("#prompt")).to_have_value("A long thought.")


def test_a_browser_that_keeps_nothing_loses_nothing_of_the_page(open_page, shown):
    page = open_page(url="about:blank")
    for storage in ("localStorage", "sessionStorage"):
        page.add_init_script(
            f"Object.defineProperty(window, '{storage}', "
            "{ get() { throw new DOMException('no', 'SecurityError'); } })"
        )
    page.goto(shown.url)
    shown.post("/v1/agents", {"id": "unkept"})
    chosen(page, "unkept")
    page.locator("#prompt").fill("Typed.")
    chosen(page, "root")
    expect(page.locator("#prompt")).to_have_value("")
    chosen(page, "unkept")
    expect(page.locator("#prompt")).to_have_value("Typed.")
    sampled(page, max_tokens=4)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#talk .place")).to_be_visible()


def test_the_first_text_on_an_empty_server_is_there_after_a_reload(open_page, tmp_path):
    with serving(tmp_path) as live:
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")
        page.locator("#prompt").fill("My first words.")
        page.reload()
        expect(page.locator("#prompt")).to_have_value("My first words.")


def test_a_text_that_would_hang_the_renderer_is_plain(open_page, shown):
    for name, text in (("deep", ">" * 3000 + "x"), ("tangled", "_a*" * 7000)):
        said(shown, name, answer(text))
    page = open_page()
    for name in ("deep", "tangled"):
        chosen(page, name)
        expect(page.locator("#talk .md > .plain")).to_be_visible()


def test_a_tab_that_nobody_looks_at_holds_no_connection(open_page, shown):
    """A browser has six for all of its tabs."""
    page = open_page()
    chosen(page, "root")
    listeners = shown.service.agents.live._listeners
    shown.until(lambda: "root" in listeners, "the page")
    look = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(look, True)
    shown.until(lambda: "root" not in listeners, "its leaving")
    page.evaluate(look, False)
    shown.until(lambda: "root" in listeners, "its coming back")
    expect(page.locator("#dead")).to_be_hidden()


# For everybody ------------------------------------------------------------------------------------

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_about(open_page, shown, width, height, scheme):
    said(shown, f"read-{width}-{scheme}", answer(HOSTILE, reasoning_content="Hm."))
    page = open_page(width=width, height=height, scheme=scheme)
    chosen(page, f"read-{width}-{scheme}")
    expect(page.locator("#talk .md").last).to_be_visible()
    page.evaluate(AXE)
    views = [lambda: None, lambda: page.keyboard.press("t"), lambda: page.keyboard.press("?")]
    if width < 700:
        views += [
            lambda: page.locator("#open-side").click(),
            lambda: page.locator("#open-cellar").click(),
        ]
    page.locator("#talk").focus()
    for view in views:
        view()
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        wrong = [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found]
        assert not wrong, json.dumps(wrong, indent=1)
        page.keyboard.press("Escape")


def test_of_two_drawers_the_one_that_was_asked_for_is_seen(open_page, shown):
    page = open_page(width=390, height=844)
    page.locator("#open-cellar").click()
    page.locator("#cellar").wait_for(state="visible")
    page.locator("#open-side").click()
    page.locator("#cellar").wait_for(state="hidden")
    page.locator("#new").click()
    page.locator("#open-side").click()
    page.locator("#open-cellar").click()
    page.locator("#side.open").wait_for(state="detached")
    page.locator("#cellar").wait_for(state="visible")


def test_the_page_of_an_empty_server_says_what_to_do(open_page, tmp_path):
    with serving(tmp_path) as live:
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")
        expect(page.locator("#no-agents")).to_be_visible()
        expect(page.locator("#agent-title")).to_have_text("A new chat")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
