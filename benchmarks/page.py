"""Ask how long the page takes for what one does, with 500 agents of 100 turns.

A headless Chromium, a server of its own process, and agents that the page is told of: a click on
one of them, until its 300 rows are there and drawn; a letter in the box; the tree of forks; a word
searched for. Needs Chromium and Playwright.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness import run
from playwright.sync_api import sync_playwright

MANY = """() => {
    const agents = Array.from({ length: 500 }, (_, i) => ({
        id: `many-${i}`, model: "demo", kv_dtype: "float32", state: "idle", n_tokens: 5000 + i,
        n_stored: 0, n_turns: 100, n_messages: 200, parent: i % 5 ? `many-${i - 1}` : null,
        parent_position: 100, created_s: i, used_s: i, miss: null,
        fork_text: { before: "before it", behind: "and behind" },
    }));
    const code = (i) => `\\`\\`\\`python\\nx = ${i}\\n\\`\\`\\`\\n`;
    const text = (i) => `**Message** ${i}\\n\\n${code(i)}${"word ".repeat(150)}`;
    const messages = Array.from({ length: 200 }, (_, i) => ({
        role: i % 2 ? "assistant" : "user", content: text(i),
    }));
    const turns = Array.from({ length: 100 }, (_, i) => ({
        start: i, n_prompt: i, stop: i + 1, n_messages: 2 * i, reason: "stop", took: null,
    }));
    const detail = (path) => agents[Number(path.match(/many-(\\d+)/)[1])];
    const real = window.fetch;
    window.fetch = (path, ...more) => String(path).includes("/v1/agents/many-")
        ? Promise.resolve(new Response(JSON.stringify({ ...detail(path), messages, turns })))
        : real(path, ...more);
    window.snapshot = { ...page.state.snapshot, agents };
    page.takeFromStream = () => {};
    page.tell("snapshot", window.snapshot);
}"""

STEPS = {
    "choose_ms": """async (n) => {
        const items = document.querySelectorAll("#tree li");
        const started = performance.now();
        items[n].click();
        while (document.querySelectorAll("#talk > li").length !== 300)
            await new Promise(requestAnimationFrame);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - started;
    }""",
    "type_ms": """async (n) => {
        const started = performance.now();
        const box = document.getElementById("prompt");
        box.value += "x";
        box.dispatchEvent(new Event("input"));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - started;
    }""",
    "snapshot_ms": """async (n) => {
        window.snapshot.agents[n].n_tokens += 1;
        const started = performance.now();
        page.tell("snapshot", JSON.parse(JSON.stringify(window.snapshot)));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - started;
    }""",
    "tree_ms": """async (n) => {
        const started = performance.now();
        document.getElementById("family-open").click();
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        const took = performance.now() - started;
        document.getElementById("family").close();
        return took;
    }""",
}


@contextmanager
def server() -> Iterator[str]:
    """Run a server of its own process, with a store that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvcellar", "serve", "--port", "0", "--store", folder]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as child:
            try:
                assert child.stdout is not None
                yield child.stdout.readline().split()[-1]
            finally:
                child.terminate()


def measure(quick: bool) -> Mapping[str, Any]:
    """Do each thing again and again, and print how long it took."""
    rounds = 9 if quick else 40
    found: dict[str, Any] = {}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with server() as url, sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_function("window.page && page.state.snapshot")
        page.evaluate("() => { window.EventSource = null; }")
        page.route("**/events", lambda route: route.abort())
        page.evaluate(MANY)
        time.sleep(1)
        for name, step in STEPS.items():
            times = [page.evaluate(step, 7 * i % 400) for i in range(rounds + 2)][2:]
            found[name] = round(statistics.median(times), 1)
            print(f"{name:<12} median {found[name]:6.1f}  worst {max(times):6.1f}")
        browser.close()
    found["interaction_ms"] = max(found.values())
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
