// The page: one stream of snapshots in, a few verbs out. No build step; four libraries in vendor/.

import "./cellar.js";
import "./chat.js";
import { askNew, newChat, stop } from "./composer.js";
import { $, el, inSight, percent, toast, untilHidden } from "./dom.js";
import { openFamily } from "./family.js";
import { inBrowser, move } from "./kept.js";
import { events } from "./net.js";
import "./side.js";
import { agentOf, model, modelName, on, state, tell } from "./state.js";
import { choose, undo, verb } from "./verbs.js";

// The stream of snapshots ------------------------------------------------------------------------

// It speaks every ten seconds at least. One that is silent for longer has no server behind it.
export const watch = { silence: 25000 };

async function follow() {
  for (let wait = 500; ; wait = Math.min(4000, wait * 2)) {
    await inSight();
    const controller = new AbortController();
    untilHidden(controller);
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(new Error("it says nothing any more")), watch.silence);
    };
    try {
      heard();
      for await (const event of events("/events", { signal: controller.signal, heard })) {
        wait = 500;
        if (event.name === "snapshot") { alive(); takeFromStream(JSON.parse(event.data)); }
        if (event.name === "closing") break;
      }
      dead("The server has stopped.");
    } catch (error) {
      if (!document.hidden) dead(error instanceof TypeError ? "The server does not answer." : `Not connected: ${error.message}.`);
    }
    clearTimeout(timer);
    controller.abort();
    if (!document.hidden) await new Promise((done) => setTimeout(done, wait));
  }
}

// The stream's snapshots come in order, but one may have been made before the answer to a verb.
export function takeFromStream(snapshot) {
  if (state.made !== null) {
    if (!snapshot.agents.some((agent) => agent.id === state.made)) return;
    state.made = null;
  }
  take(snapshot);
}

function take(snapshot) {
  const isFirst = state.snapshot === null;
  state.snapshot = snapshot;
  const isOpening = isFirst && !hasChosen && !$("prompt").value;
  const open = isOpening ? linked() : state.chosen;
  if (isOpening || (open !== null && !agentOf(open) && state.made !== open)) chooseAgain(open);
  if (isOpening && open !== null && !agentOf(open)) toast(`there is no agent “${open}”; this is a new chat`);
  tell("shown");
}

// The agent that the address names; null: none, and so a new chat.
function linked() {
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return location.hash.slice(1);
  }
}
addEventListener("hashchange", () => tell("choose", agentOf(linked())?.id ?? null));

// The agent that was open; where that is gone, its place is a new chat's.
function chooseAgain(before) {
  if (before !== null && !agentOf(before)) move(before, null); // what is typed for it goes along
  const id = agentOf(before) ? before : null;
  const isOpen = $("side").classList.contains("open");
  choose(id);
  if (id === null) tell("chosen", null); // also where that is what it was: what is typed there is shown
  openSide(isOpen); // who is looking for an agent goes on looking
}

let hasChosen = false; // who asks for a new chat before the first snapshot keeps it
on("snapshot", take);
on("choose", (id) => {
  hasChosen = true;
  choose(id);
  if (id === null) tell("chosen", null); // also where nobody was chosen yet: what was typed for it is shown
});

// What is shown is as it was, and says so, until the stream is back.
function dead(why) {
  say("bad", "no connection");
  if (!$("dead").hidden) return;
  const since = new Date().toLocaleTimeString();
  $("dead").textContent = state.snapshot
    ? `${why} What is shown is as it was at ${since}. Trying again until it is back; what you type is kept.`
    : `${why} Trying again until it is back.`;
  $("dead").hidden = false;
  document.body.classList.add("stale");
}
function alive() {
  $("dead").hidden = true;
  document.body.classList.remove("stale");
}

function say(kind, text) {
  document.querySelector(".dot").className = `dot ${kind}`;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

function showStatus() {
  const name = modelName();
  const names = [...new Set([...state.snapshot.states.map((one) => one.name), name])].filter((one) => one !== null);
  const moving = state.snapshot.states.find((one) => ["loading", "leaving"].includes(one.state));
  const failed = state.snapshot.states.find((one) => one.state === "failed");
  const now = model();
  if (moving) say("", `${moving.name} is ${moving.state} ${moving.fraction ? percent(moving.fraction) : ""}`);
  else if (failed) say("bad", `${failed.name} failed: ${failed.detail}`);
  else if (now) say("ok", `${now.name}, cells in ${now.kv_dtype}${now.block_size > 1 ? `, blocks of ${now.block_size} cells` : ""}`);
  else if (state.snapshot.models.length) say("", `${name} is not in memory; the next request loads it`);
  else say("", "no model in memory; the next request loads one");
  $("model").hidden = names.length < 2;
  if ($("model").dataset.names !== names.join()) {
    $("model").dataset.names = names.join();
    $("model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  $("model").value = name ?? "";
}
on("shown", showStatus);
// An agent keeps its model: whoever wants another one begins a chat with it.
$("model").addEventListener("change", () => {
  state.model = $("model").value;
  newChat();
});

// Drawers ----------------------------------------------------------------------------------------

const isNarrow = matchMedia("(max-width: 1180px)");
function openCellar(isOpen) {
  $("cellar").hidden = !isOpen;
  $("frame").classList.toggle("no-cellar", !isOpen);
  $("open-cellar").ariaExpanded = isOpen;
  if (isNarrow.matches && isOpen) openSide(false); // one drawer would cover the other
  if (!isNarrow.matches) inBrowser.set("cellar", isOpen);
  if (state.snapshot) tell("shown");
}
function openSide(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("open-side").ariaExpanded = isOpen;
  if (isNarrow.matches && isOpen) openCellar(false);
}
$("open-cellar").addEventListener("click", () => openCellar($("cellar").hidden));
$("close-cellar").addEventListener("click", () => { openCellar(false); $("open-cellar").focus(); });
$("open-side").addEventListener("click", () => openSide(!$("side").classList.contains("open")));
isNarrow.addEventListener("change", () => openCellar(!isNarrow.matches && inBrowser.get("cellar", true)));
openCellar(!isNarrow.matches && inBrowser.get("cellar", true));
on("chosen", () => openSide(false));
on("choose", () => openSide(false));

for (const close of document.querySelectorAll("[data-close]")) close.addEventListener("click", () => $(close.dataset.close).close());
document.addEventListener("click", (event) => { // a menu closes when something else is clicked
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

// Keys and looks ---------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = {
    f: () => verb("fork", {}), r: () => verb("rewind", {}), p: () => verb("pause"), u: undo, n: newChat, t: openFamily,
    c: () => openCellar($("cellar").hidden), s: () => { openSide(true); $("search").focus(); }, N: askNew,
    "/": () => $("prompt").focus(), "?": () => $("help").showModal(), Escape: stop,
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
$("help-open").addEventListener("click", () => $("help").showModal());

const THEMES = { auto: ["light", "◐", "as the system"], light: ["dark", "☀", "light"], dark: ["auto", "☾", "dark"] };
function wear(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const [, sign, name] = THEMES[theme];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `Theme: ${name}`);
  inBrowser.set("theme", theme);
  if (state.snapshot) tell("shown");
}
$("theme").addEventListener("click", () => wear(THEMES[inBrowser.get("theme", "auto")][0]));
wear(inBrowser.get("theme", "auto"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.snapshot) tell("shown"); });

window.page = { state, model, tell, toast, watch, takeFromStream }; // for whoever looks at the page from its console
follow();
