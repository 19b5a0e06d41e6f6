"""The page in a real browser: what it shows, and that a click changes the cache."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from kvcellar.agents import Turn
from kvcellar.engine import SamplingParams
from tests.models.tiny_checkpoints import make_checkpoint
from tests.server.hybrid import load_hybrid, write_hybrid
from tests.server.live import PATIENCE_S, serving

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHORT = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
ARTEFACTS = os.environ.get("KVCELLAR_ARTEFACTS")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed to look with"),
]


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("shown")) as live:
        live.post("/v1/agents", {"id": "root", "system": "You plan. " * 12})
        live.post("/v1/agents/root/generate", {"text": "First. " * 30, **SHORT})
        live.post("/v1/agents/root/generate", {"text": "Second. " * 20, **SHORT})
        yield live


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """With a key; it outlives the pages that look at it."""
    with serving(tmp_path_factory.mktemp("keyed"), api_key="secret") as live:
        yield live


@pytest.fixture
def open_page(browser, shown, tmp_path, request):
    """Opens the page; whatever it complains about fails the test, and a picture is kept."""
    opened = []
    troubles = []

    def open_it(width=1400, height=900, scheme="light", url=None, expected=None):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def hear(message):
            is_expected = expected is not None and expected in message.text
            if message.type == "error" and not is_expected:
                troubles.append(message.text)

        page.on("console", hear)
        page.goto(url or shown.url)
        opened.append((page, context))
        return page

    yield open_it
    folder = Path(ARTEFACTS) if ARTEFACTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    for i, (page, context) in enumerate(opened):
        picture = folder / f"{request.node.name}-{i}.png"
        page.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 10_000
        context.close()
    assert not troubles


def chosen(page, agent_id):
    if page.locator("#open-side").is_visible():
        page.locator("#open-side").click()
    page.locator(f'#tree [data-id="{agent_id}"]').click()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", agent_id)


def verb(page, name):
    """One of the verbs that are in the menu."""
    page.locator("#verbs summary").click()
    page.locator(f'[data-verb="{name}"]').click()


def sampled(page, **settings):
    page.locator("#settings-open").click()
    for name, value in settings.items():
        page.locator(f"#set-{name}").fill(str(value))
    page.locator("#settings .primary").click()


def shared_cells(page):
    return int(page.locator("#map").get_attribute("data-shared"))


def test_a_fork_by_clicking_changes_the_map(open_page, shown):
    page = open_page()
    chosen(page, "root")
    before = shared_cells(page)
    at = shown.get("/v1/agents/root")["turns"][0]["stop"]
    page.locator('[data-fork="1"]').click()
    expect(page.locator("#tree li")).to_have_count(2)
    expect(page.locator("#agent-title")).to_have_attribute("data-id", re.compile("^root-"))
    expect(page.locator("#map")).not_to_have_attribute("data-shared", str(before))
    # One more than was computed when the turn ended: the next turn computed its last token.
    assert at - 1 <= shared_cells(page) - before <= at
    tree = page.locator("#tree li").nth(1)
    expect(tree).to_have_attribute("aria-level", "2")
    expect(tree.locator(".from")).to_contain_text(f"{at} shared")
    child = page.locator("#agent-title").get_attribute("data-id")
    assert shown.get(f"/v1/agents/{child}")["parent_position"] == at


def test_a_fork_stays_chosen_when_an_older_snapshot_comes_late(open_page, shown):
    shown.post("/v1/agents/root/fork", {"id": "late"})
    page = open_page()
    chosen(page, "late")
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.older = page.state.snapshot;
            window.fetch = (path, ...more) => {
                if (path === "/v1/cache" && page.state.made) page.takeFromStream(older);
                return real(path, ...more);
            };
        }"""
    )
    title = page.locator("#agent-title")
    page.keyboard.press("f")
    expect(title).to_have_attribute("data-id", re.compile("^late-"))
    fork = title.get_attribute("data-id")
    page.evaluate("fork => { page.state.made = fork; page.takeFromStream(older); }", fork)
    assert title.get_attribute("data-id") == fork
    expect(page.locator(f'#tree [data-id="{fork}"]')).to_be_visible()
    page.evaluate("page.takeFromStream(page.state.snapshot)")
    assert title.get_attribute("data-id") == fork
    assert page.evaluate("page.state.made") is None


def test_a_prompt_is_answered_and_taken_back(open_page, shown):
    shown.post("/v1/agents/root/fork", {"id": "talker"})
    page = open_page(scheme="dark")
    chosen(page, "talker")
    n = shown.get("/v1/agents/talker")["n_turns"]
    expect(page.locator("#talk .user")).to_have_count(n)
    sampled(page, max_tokens=6, temperature=0)
    page.locator("#prompt").fill("Say it.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#took")).to_contain_text("reused")
    expect(page.locator("#talk .user")).to_have_count(n + 1)
    expect(page.locator("#talk .user").last).to_contain_text("Say it.")
    info = shown.get("/v1/agents/talker")
    assert info["n_turns"] == n + 1
    expect(page.locator("#talk .assistant").last).to_contain_text(
        info["messages"][-1]["content"].strip()[:3]
    )
    page.locator('[data-verb="rewind"]').click()
    expect(page.locator("#talk .user")).to_have_count(n)
    assert shown.get("/v1/agents/talker")["n_turns"] == n


def test_everything_is_done_by_keys(open_page, shown):
    shown.post("/v1/agents", {"id": "keys"})
    shown.post("/v1/agents/keys/generate", {"text": "Keys. " * 9, **SHORT})
    page = open_page()
    chosen(page, "keys")
    page.locator('#tree [data-id="keys"]').focus()
    page.keyboard.press("f")
    expect(page.locator("#agent-title")).to_have_attribute("data-id", re.compile("^keys-"))
    fork = page.locator("#agent-title").get_attribute("data-id")
    page.locator(f'#tree [data-id="{fork}"]').focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "keys")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#agent-title")).to_have_attribute("data-id", fork)
    page.keyboard.press("r")
    expect(page.locator("#talk .user")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#map button").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#map button").nth(1)).to_be_focused()
    expect(page.locator("#cell-said")).to_contain_text("cells, can be freed")


def test_it_is_said_what_was_computed_again(open_page, shown):
    shown.post("/v1/agents", {"id": "misser"})

    async def turn(system):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Q?"}]
        params = SamplingParams(max_tokens=6)
        async for _ in shown.service.agents.turns.generate(
            Turn("misser", messages=messages, params=params)
        ):
            pass

    for system in ("Old words. " * 20, "New words. " * 20):
        shown.run(turn(system))
    page = open_page()
    chosen(page, "misser")
    page.locator("#miss summary").click()
    expect(page.locator("#miss")).to_contain_text("the system message changed")
    expect(page.locator("#miss pre").first).to_contain_text("Old words")
    expect(page.locator("#miss pre").last).to_contain_text("New words")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page, shown, scheme):
    page = open_page(width=360, height=740, scheme=scheme)
    chosen(page, "root")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator('[data-verb="fork"]').scroll_into_view_if_needed()
    expect(page.locator('[data-verb="fork"]')).to_be_visible()
    small = page.evaluate(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent)"
        ".filter(b => b.offsetHeight < 24).length"
    )
    assert small == 0, "a finger hits every button"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in ground[4:-1].split(",")[:3])
    assert (brightness > 600) == (scheme == "light")


def test_the_page_sees_what_others_do(open_page, shown):
    page = open_page()
    expect(page.locator("#status-text")).to_contain_text("demo")
    n = page.locator("#tree li").count()
    shown.post("/v1/agents", {"id": "newcomer"})
    expect(page.locator("#tree li")).to_have_count(n + 1)
    shown.http.delete("/v1/agents/newcomer")
    expect(page.locator("#tree li")).to_have_count(n)


def test_the_page_asks_for_the_key(open_page, keyed):
    page = open_page(url=keyed.url, expected="401")
    expect(page.locator("#key")).to_be_visible()
    page.locator("#key-value").fill("secret")
    page.locator("#key button").click()
    expect(page.locator("#status-text")).to_contain_text("the next request loads one")


def test_the_page_begins_with_a_new_chat_and_a_link_opens_an_agent(open_page, shown):
    shown.post("/v1/agents", {"id": "linked-to"})
    page = open_page()
    title = page.locator("#agent-title")
    expect(page.locator('#tree [data-id="linked-to"]')).to_be_visible()
    expect(title).to_have_text("A new chat")
    chosen(page, "linked-to")
    assert page.url == f"{shown.url}/#linked-to"
    page.reload()
    expect(title).to_have_text("linked-to")
    page.evaluate("location.hash = '#root'")
    expect(title).to_have_text("root")
    other = open_page(url=f"{shown.url}/#linked-to")
    expect(other.locator("#agent-title")).to_have_text("linked-to")
    other.keyboard.press("n")
    expect(other.locator("#agent-title")).to_have_text("A new chat")
    other.reload()
    expect(other.locator("#tree li").first).to_be_visible()
    expect(other.locator("#agent-title")).to_have_text("A new chat")
    nobody = open_page(url=f"{shown.url}/#nobody-of-that-name")
    expect(nobody.locator("#toast-text")).to_contain_text("there is no agent")
    expect(nobody.locator("#agent-title")).to_have_text("A new chat")


def test_with_two_models_all_that_is_shown_is_the_open_agents(open_page, tmp_path):
    offered = {"one": "demo", "two": str(make_checkpoint("qwen2", tmp_path / "two"))}
    with serving(tmp_path / "store", offered=offered) as live:
        for name in ("one", "two"):
            live.post("/v1/agents", {"id": f"of-{name}", "model": name})
            live.post(f"/v1/agents/of-{name}/generate", {"text": f"Hello {name}.", **SHORT})
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")
        status, model = page.locator("#status-text"), page.locator("#model")
        for name in ("one", "two", "one"):
            chosen(page, f"of-{name}")
            expect(status).to_contain_text(name)
            expect(model).to_have_value(name)
            expect(page.locator("#lineage")).to_contain_text(name)
            assert page.evaluate("(id) => page.model().agents.includes(id)", f"of-{name}")
        model.select_option("two")  # an agent keeps its model
        expect(page.locator("#agent-title")).to_have_text("A new chat")
        expect(status).to_contain_text("two")
        sampled(page, max_tokens=4)
        page.locator("#prompt").fill("Begin.")
        page.keyboard.press("Enter")
        expect(page.locator("#talk .place")).to_be_visible()
        assert live.get("/v1/agents/of-one")["n_turns"] == 1
        assert live.get("/v1/agents")["data"][-1]["model"] == "two"


def test_a_new_chat_shows_the_model_that_it_will_have_also_where_another_is_in_memory(
    open_page, tmp_path
):
    offered = {"zoe": str(make_checkpoint("qwen2", tmp_path / "zoe")), "adam": "demo"}
    with serving(tmp_path / "store", offered=offered) as live:
        assert [one["name"] for one in live.get("/v1/cache")["states"]] == ["zoe", "adam"]
        live.post("/v1/agents", {"id": "of-adam", "model": "adam"})
        live.post("/v1/agents/of-adam/generate", {"text": "Hello.", **SHORT})
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")
        expect(page.locator("#model")).to_have_value("zoe")
        expect(page.locator("#status-text")).to_contain_text("zoe is not in memory")
        sampled(page, max_tokens=4)
        page.locator("#prompt").fill("Begin.")
        page.keyboard.press("Enter")
        expect(page.locator("#talk .place")).to_be_visible()
        assert live.get("/v1/agents")["data"][-1]["model"] == "zoe"


def test_text_in_an_answer_is_text_and_never_markup(open_page, shown):
    shown.post("/v1/agents", {"id": "markup"})
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    shown.post("/v1/agents/markup/generate", {"text": evil, **SHORT})
    page = open_page()
    chosen(page, "markup")
    expect(page.locator("#talk .user")).to_contain_text("<img src=x")
    assert page.title() == "kvcellar" and page.locator("#talk img").count() == 0


# What is typed or made is not lost --------------------------------------------------------------

FAIL = """() => {
    const real = window.fetch;
    window.real = real;
    window.fetch = (path, ...more) => String(path).endsWith("/generate")
        ? Promise.reject(new TypeError("Failed to fetch")) : real(path, ...more);
}"""


def test_what_was_typed_stays_on_an_error_and_when_the_page_is_loaded_again(open_page, shown):
    shown.post("/v1/agents", {"id": "typist"})
    page = open_page()
    chosen(page, "typist")
    prompt = page.locator("#prompt")
    page.evaluate(FAIL)
    prompt.fill("Do not lose this.")
    prompt.press("Enter")
    expect(page.locator("#toast")).to_contain_text("the server does not answer")
    assert prompt.input_value() == "Do not lose this."
    page.reload()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "typist")
    expect(prompt).to_have_value("Do not lose this.")
    sampled(page, max_tokens=6)
    prompt.press("Enter")
    expect(page.locator("#took")).to_contain_text("reused")
    expect(prompt).to_have_value("")
    page.reload()
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "typist")
    page.locator("#settings-open").click()
    assert prompt.input_value() == "" and page.locator("#set-max_tokens").input_value() == "6"
    page.keyboard.press("Escape")
    (said,) = (m for m in shown.get("/v1/agents/typist")["messages"] if m["role"] == "user")
    assert said["content"] == "Do not lose this."


def test_a_refusal_keeps_what_was_typed(open_page, shown):
    shown.post("/v1/agents", {"id": "refused"})
    page = open_page(expected="400")
    chosen(page, "refused")
    text = "word " * 5000
    page.locator("#prompt").fill(text)
    page.locator("#send").click()
    expect(page.locator("#toast")).to_contain_text("context")
    assert page.locator("#prompt").input_value() == text


def test_each_agent_has_a_draft_and_a_line_of_its_own(open_page, shown):
    for name in ("left", "right"):
        shown.post("/v1/agents", {"id": name})
    page = open_page()
    chosen(page, "left")
    sampled(page, max_tokens=4)
    page.locator("#prompt").fill("To the left.")
    page.locator("#prompt").press("Enter")
    expect(page.locator("#took")).to_contain_text("reused")
    page.locator("#prompt").fill("More for the left.")
    chosen(page, "right")
    expect(page.locator("#took")).to_have_text("")
    expect(page.locator("#prompt")).to_have_value("")
    page.locator("#prompt").fill("For the right.")
    chosen(page, "left")
    expect(page.locator("#prompt")).to_have_value("More for the left.")
    expect(page.locator("#took")).to_contain_text("reused")
    chosen(page, "right")
    expect(page.locator("#prompt")).to_have_value("For the right.")


N_SLOW = 20
"""Tokens after which an answer waits."""


def slowed(monkeypatch, live):
    """Have the answers of a server come slowly and wait in their midst, until the event is set.

    Nor do they end by themselves.
    """
    engine = live.host().engine
    step, goes_on = engine.step, threading.Event()

    def slowly():
        is_far = any(one.n_computed >= one.n_prompt + N_SLOW for one in engine.scheduler.running)
        if not goes_on.is_set() and is_far and not goes_on.wait(0.05):
            return []
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(engine, "step", slowly)
    monkeypatch.setattr(engine.outcomes, "eos_token_ids", frozenset())
    return goes_on


def test_what_is_sent_during_an_answer_waits_for_its_end(open_page, shown, monkeypatch):
    goes_on = slowed(monkeypatch, shown)
    shown.post("/v1/agents", {"id": "talking"})
    page = open_page()
    chosen(page, "talking")
    sampled(page, max_tokens=60)
    prompt = page.locator("#prompt")
    prompt.fill("Go on. " * 9)
    prompt.press("Enter")
    expect(page.locator("#stop")).to_be_visible()
    expect(prompt).to_have_value("")
    for text in ("Next.", "And then."):
        prompt.fill(text)
        prompt.press("Enter")
    expect(page.locator("#queue li")).to_have_count(2)
    assert page.locator("#stop").is_visible(), "the answer goes on"
    page.locator("#queue li").nth(1).locator("button", has_text="Edit").click()
    expect(prompt).to_have_value("And then.")
    chosen(page, "root")  # looking elsewhere ends nothing either
    expect(page.locator("#queue")).to_be_hidden()
    chosen(page, "talking")
    expect(page.locator("#talk .now")).to_be_visible()
    goes_on.set()
    expect(page.locator("#talk .user").last).to_have_text(re.compile("Next."))
    expect(page.locator("#queue")).to_be_hidden()
    shown.until(lambda: shown.get("/v1/agents/talking")["n_turns"] == 2, "two turns")
    assert prompt.input_value() == "And then."
    asked = [m["content"] for m in shown.get("/v1/agents/talking")["messages"]][::2]
    assert asked == [("Go on. " * 9).strip(), "Next."]


def test_an_answer_is_stopped_and_what_waits_is_kept(open_page, shown, monkeypatch):
    slowed(monkeypatch, shown)
    shown.post("/v1/agents", {"id": "stopped"})
    page = open_page()
    chosen(page, "stopped")
    sampled(page, max_tokens=3000)
    page.locator("#prompt").fill("Go on. " * 9)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#talk .now")).to_be_visible()
    page.locator("#prompt").fill("Later.")
    page.locator("#prompt").press("Enter")
    page.locator("#stop").click()
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#queue li")).to_have_count(1)
    shown.until(lambda: shown.get("/v1/agents/stopped")["state"] == "idle", "the end")
    assert shown.get("/v1/agents/stopped")["n_turns"] == 1
    page.reload()
    expect(page.locator("#queue li")).to_contain_text("Later.")
    page.locator("#queue button", has_text="Send now").click()
    expect(page.locator("#queue")).to_be_hidden()
    page.locator("#stop").click()


def test_rewind_keep_and_delete_are_undone_by_a_click_or_a_key(open_page, shown):
    shown.post("/v1/agents", {"id": "precious"})
    for text in ("One.", "Two."):
        shown.post("/v1/agents/precious/generate", {"text": text, **SHORT})
    for name in ("kept", "sibling"):
        shown.post("/v1/agents/precious/fork", {"id": name})
    page = open_page()
    chosen(page, "precious")
    assert page.locator("#undo").is_hidden()
    page.locator("#agent-title").click()
    page.keyboard.press("r")
    expect(page.locator("#talk .user")).to_have_count(1)
    expect(page.locator("#toast")).to_contain_text("Undo brings it back")
    page.locator("#undo").click()
    expect(page.locator("#talk .user")).to_have_count(2)
    expect(page.locator("#undo")).to_be_hidden()

    chosen(page, "kept")
    verb(page, "keep")
    expect(page.locator('#tree [data-id="sibling"]')).to_have_count(0)
    expect(page.locator("#toast-text")).to_have_text("deleted “sibling”; Undo brings it back")
    page.reload()  # what can be undone is known to the page that is loaded again
    page.locator("#undo").click()
    expect(page.locator('#tree [data-id="sibling"]')).to_have_count(1)

    chosen(page, "precious")
    verb(page, "delete")
    expect(page.locator('#tree [data-id="precious"]')).to_have_count(0)
    expect(page.locator("#toast-text")).to_have_text("deleted “precious”; Undo brings it back")
    page.locator("#agent-title").click()
    page.keyboard.press("u")
    expect(page.locator("#agent-title")).to_have_attribute("data-id", "precious")
    expect(page.locator("#talk .user")).to_have_count(2)
    assert shown.get("/v1/agents/precious")["n_turns"] == 2


def test_a_message_is_as_wide_as_a_phone_allows(open_page, shown):
    page = open_page(width=390, height=844)
    expect(page.locator("#status-text")).to_contain_text("demo")
    text = "What you typed is kept; send it when the answer has ended, or stop it at any time."
    page.evaluate("text => page.toast(text)", text)
    box = page.locator("#toast").bounding_box()
    assert box["width"] > 0.85 * 390 and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= page.locator("#ask").bounding_box()["y"], "over the box"


def test_a_dead_server_is_shown_as_dead_until_it_is_back(open_page, shown):
    page = open_page(expected="Failed to load resource")
    expect(page.locator("#status-text")).to_contain_text("demo")
    banner = page.locator("#dead")
    assert banner.is_hidden()
    shown.post("/v1/agents", {"id": "last-words"})
    expect(page.locator('#tree [data-id="last-words"]')).to_be_visible()
    page.route("**/events", lambda route: route.abort())  # nobody listens any more
    page.evaluate("page.watch.silence = 1")
    shown.post("/v1/agents", {"id": "unheard"})  # after this word the open stream has no patience
    expect(banner).to_be_visible()
    expect(banner).to_contain_text("What is shown is as it was at")
    expect(page.locator("#status-text")).to_have_text("no connection")
    assert page.evaluate("document.body.classList.contains('stale')")
    chosen(page, "last-words")
    page.locator("#prompt").fill("Typed meanwhile.")
    page.evaluate("page.watch.silence = 25000")
    page.unroute("**/events")
    expect(banner).to_be_hidden()
    expect(page.locator("#status-text")).to_contain_text("demo")
    assert page.locator("#prompt").input_value() == "Typed meanwhile."


def test_a_server_that_stops_is_shown_as_stopped(open_page, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("stops")) as live:
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")
        expect(page.locator("#status-text")).to_contain_text("no model in memory")
    expect(page.locator("#dead")).to_contain_text("The server has stopped.")


def test_states_of_recurrent_layers_are_drawn_with_their_places_and_owners(open_page, tmp_path):
    model = write_hybrid(tmp_path / "hybrid")
    with serving(tmp_path / "store", load=load_hybrid(), offered={"hybrid": str(model)}) as live:
        live.post("/v1/agents", {"id": "one", "system": "You plan. " * 12})
        live.post("/v1/agents/one/generate", {"text": "First. " * 30, **SHORT})
        live.post("/v1/agents", {"id": "two"})
        page = open_page(url=live.url, expected="ERR_CONNECTION_REFUSED")  # behind its end
        chosen(page, "one")
        (seen,) = live.get("/v1/cache")["models"]
        lengths = seen["snapshots_of"]["one"]
        own = page.locator("#slots button:not(.other)")
        expect(own).to_have_count(len(lengths))
        last = page.locator("#slots button", has_text=f"at {lengths[-1]}")
        last.hover()
        expect(page.locator("#cell-said")).to_contain_text(f"states after {lengths[-1]} tokens")
        expect(page.locator("#cell-said")).to_contain_text("one")
        expect(page.locator("#states-sum")).to_contain_text(
            f"{len(lengths)} of {seen['n_slots']:,}"
        )
        expect(page.locator("#facts")).to_contain_text(f"goes on from{lengths[-1]}")
        chosen(page, "two")
        expect(page.locator("#slots button.other")).to_have_count(len(lengths))
        last.click()
        expect(page.locator("#agent-title")).to_have_attribute("data-id", "one")


def test_a_model_without_recurrent_layers_has_no_states_to_draw(open_page):
    page = open_page()
    expect(page.locator("#cells-sum")).to_contain_text("cells used")
    expect(page.locator("#states")).to_be_hidden()
