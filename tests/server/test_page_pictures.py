"""Pictures on the page: chosen, pasted or dropped, sent with a text, and shown in the history."""

from __future__ import annotations

import base64

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from kvcellar.pictures.picture import Picture
from tests.pictures.fakes import make_seeing_host, picture_file
from tests.server.live import serving
from tests.server.test_viewer import browser, chosen, open_page, pytestmark, sampled

__all__ = ["browser", "open_page", "pytestmark"]

FILE, OTHER = picture_file(1, 160, 96), picture_file(2, 96, 96, "JPEG")
NAME, SECOND = Picture.read(FILE).name, Picture.read(OTHER).name
RED = {"name": "red.png", "mimeType": "image/png", "buffer": FILE}
BLUE = {"name": "blue.jpg", "mimeType": "image/jpeg", "buffer": OTHER}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A server whose first model reads pictures, and whose second reads text alone."""
    with serving(
        tmp_path_factory.mktemp("pictured"),
        load=lambda path, progress: make_seeing_host(path),
        offered={"seeing": "seeing"},
        api_key="secret",
    ) as live:
        live.http.headers["Authorization"] = "Bearer secret"
        live.host()  # it is in memory, so the page knows what it reads
        yield live


@pytest.fixture(scope="module")
def blind(tmp_path_factory):
    """A server whose model reads text alone; it outlives the page."""
    with serving(tmp_path_factory.mktemp("blind")) as live:
        yield live


@pytest.fixture
def page(open_page, shown):
    found = open_page(expected="status of 4")
    found.locator("#key-value").fill("secret")
    found.locator("#key-form .primary").click()
    expect(found.locator(".dot")).to_have_class("dot ok")
    sampled(found, max_tokens=4)
    return found


def is_loaded(page, selector, n):
    """All pictures of a place are there and drawn."""
    images = page.locator(f"{selector} img")
    expect(images).to_have_count(n)
    page.wait_for_function(
        "(selector) => [...document.querySelectorAll(selector)].every((one) => one.naturalWidth)",
        arg=f"{selector} img",
    )


def give(page, data, kind, name, event):
    """Paste or drop a file."""
    page.evaluate(
        """([data, type, name, event]) => {
          const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
          const files = new DataTransfer();
          files.items.add(new File([bytes], name, { type }));
          const target = document.getElementById("prompt");
          const more = { bubbles: true, cancelable: true };
          target.dispatchEvent(event === "paste"
            ? new ClipboardEvent("paste", { clipboardData: files, ...more })
            : new DragEvent("drop", { dataTransfer: files, ...more }));
        }""",
        [base64.b64encode(data).decode(), kind, name, event],
    )


def the_agent(shown, page):
    return page.locator("#agent-title").get_attribute("data-id")


def test_pictures_are_chosen_pasted_and_dropped_and_shown_in_the_history(page, shown):
    page.locator("#file").set_input_files([RED])
    give(page, OTHER, "image/jpeg", "pasted.jpg", "paste")
    expect(page.locator("#files li")).to_have_count(2)
    give(page, FILE, "image/png", "dropped.png", "drop")
    expect(page.locator("#files li span")).to_have_text(["red.png", "pasted.jpg", "dropped.png"])
    is_loaded(page, "#files", 3)
    page.get_by_label("Leave dropped.png out").click()
    expect(page.locator("#files li")).to_have_count(2)
    page.locator("#prompt").fill("What are these?")
    page.reload()  # what was chosen is there still
    expect(page.locator("#files li span")).to_have_text(["red.png", "pasted.jpg"])
    is_loaded(page, "#files", 2)
    assert Axe().run(page).violations_count == 0
    page.locator("#send").click()
    expect(page.locator("#talk .place")).to_have_count(1)
    is_loaded(page, "#talk .user .pictures", 2)
    expect(page.locator("#files")).to_be_hidden()
    expect(page.locator("#talk .user .body")).to_have_text("What are these?")
    message = shown.get(f"/v1/agents/{the_agent(shown, page)}")["messages"][0]
    assert [one["name"] for one in message["pictures"]] == [NAME, SECOND]
    expect(page.locator("#per")).to_contain_text("Hollow ones are of pictures.")
    page.locator("#map .ribbon.mine button").focus()
    expect(page.locator("#cell-said")).to_contain_text("of pictures")
    page.locator("#talk .pictures button").first.click()
    expect(page.locator("#picture")).to_be_visible()
    is_loaded(page, "#picture-large", 1)
    violations = Axe().run(page)
    assert violations.violations_count == 0, violations.generate_report()
    page.keyboard.press("Escape")
    violations = Axe().run(page)
    assert violations.violations_count == 0, violations.generate_report()


def test_a_picture_may_go_without_a_text_and_along_with_a_fork(page, shown):
    page.locator("#file").set_input_files([RED])
    expect(page.locator("#files li")).to_have_count(1)
    page.locator("#send").click()
    expect(page.locator("#talk .place")).to_have_count(1)
    is_loaded(page, "#talk .user .pictures", 1)
    first = the_agent(shown, page)
    page.get_by_label("Another answer in turn 1, in a fork").click()
    expect(page.locator("#agent-title")).not_to_have_attribute("data-id", first)
    expect(page.locator("#talk .place")).to_have_count(1)
    is_loaded(page, "#talk .user .pictures", 1)
    messages = shown.get(f"/v1/agents/{the_agent(shown, page)}")["messages"]
    assert messages[0]["content"] == "" and messages[0]["pictures"][0]["name"] == NAME


def test_what_is_refused_comes_back_with_its_pictures(page, shown):
    bad = {"name": "bad.png", "mimeType": "image/png", "buffer": FILE[:60]}
    page.locator("#file").set_input_files([RED, bad])
    expect(page.locator("#files li")).to_have_count(2)
    page.locator("#prompt").fill("What is this?")
    page.locator("#send").click()
    expect(page.locator("#toast-text")).to_contain_text("damaged")
    expect(page.locator("#prompt")).to_have_value("What is this?")
    expect(page.locator("#files li span")).to_have_text(["red.png", "bad.png"])
    page.get_by_label("Leave bad.png out").click()
    page.locator("#send").click()
    expect(page.locator("#talk .place")).to_have_count(1)
    is_loaded(page, "#talk .user .pictures", 1)


def test_what_waits_keeps_its_pictures(page, shown):
    reader = shown.host().looks.reader
    reader.may_encode.clear()
    page.locator("#prompt").fill("One.")
    page.locator("#file").set_input_files([{**RED, "buffer": picture_file(31, 160, 96)}])
    expect(page.locator("#files li")).to_have_count(1)
    page.locator("#send").click()
    expect(page.locator("#stop")).to_be_visible()
    page.locator("#prompt").fill("Two.")
    page.locator("#file").set_input_files([BLUE])
    expect(page.locator("#files li")).to_have_count(1)
    page.locator("#send").click()
    expect(page.locator("#queue li")).to_have_count(1)
    is_loaded(page, "#queue", 1)
    page.get_by_label("Take it back and edit it").click()
    expect(page.locator("#prompt")).to_have_value("Two.")
    expect(page.locator("#files li span")).to_have_text(["blue.jpg"])
    page.locator("#send").click()
    expect(page.locator("#queue li")).to_have_count(1)
    reader.may_encode.set()
    expect(page.locator("#talk .place")).to_have_count(2)
    messages = shown.get(f"/v1/agents/{the_agent(shown, page)}")["messages"]
    assert [one["content"] for one in messages[::2]] == ["One.", "Two."]
    assert messages[2]["pictures"][0]["name"] == SECOND


def test_what_is_no_picture_stays_out(page):
    svg = {"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"}
    page.locator("#file").set_input_files([svg])
    expect(page.locator("#toast-text")).to_contain_text("no PNG, JPEG, WebP or GIF")
    expect(page.locator("#files")).to_be_hidden()


def test_a_model_that_reads_text_alone_says_so(blind, open_page):
    blind.post("/v1/agents", {"id": "blind"})
    blind.post("/v1/agents/blind/generate", {"text": "Hello.", "max_tokens": 2})
    page = open_page(url=blind.url, width=420, scheme="dark", expected="status of 400")
    chosen(page, "blind")
    page.locator("#prompt").fill("What is this?")
    page.locator("#file").set_input_files([RED])
    expect(page.locator("#toast-text")).to_contain_text("reads text alone")
    expect(page.locator("#files")).to_be_hidden()
    expect(page.locator("#prompt")).to_have_value("What is this?")
    # also where the page does not know it yet
    page.evaluate("page.model().reads_pictures = true")
    page.locator("#file").set_input_files([RED])
    expect(page.locator("#files li")).to_have_count(1)
    page.locator("#send").click()
    expect(page.locator("#toast-text")).to_contain_text("reads text alone")
    expect(page.locator("#files li span")).to_have_text(["red.png"])
    expect(page.locator("#prompt")).to_have_value("What is this?")
