// The list of agents with their forks, and what a search finds.

import { $, count, el, toast } from "./dom.js";
import { call, trouble } from "./net.js";
import { besideName, colour, inOrder, nameOf, on, state, tell } from "./state.js";
import { choose } from "./verbs.js";

const rows = new Map(); // agent's id -> {item, mark}: only what has changed is made again

function showTree() {
  if (!state.snapshot) return;
  const found = inOrder(state.snapshot.agents);
  $("no-agents").hidden = found.length > 0;
  const cached = Object.assign({}, ...state.snapshot.models.map((one) => one.cached));
  const items = found.map(({ agent, depth }) => rowOf(agent, depth, Boolean(cached[agent.id])));
  const there = new Set(found.map(({ agent }) => agent.id));
  for (const id of rows.keys()) if (!there.has(id)) rows.delete(id);
  const tree = $("tree");
  if (items.length !== tree.children.length || items.some((item, i) => tree.children[i] !== item)) {
    const focused = document.activeElement?.closest?.("#tree li")?.dataset.id;
    tree.replaceChildren(...items);
    if (focused) rows.get(focused)?.item.focus({ preventScroll: true });
  }
  if (items.length && !items.some((item) => item.tabIndex === 0)) items[0].tabIndex = 0;
}

function rowOf(agent, depth, isCached) {
  const isChosen = agent.id === state.chosen;
  const mark = JSON.stringify([depth, isCached, isChosen, agent.state, agent.n_tokens, agent.title, agent.parent && nameOf(agent.parent), agent.fork_text, colour(agent.id)]);
  const known = rows.get(agent.id);
  if (known?.mark === mark) return known.item;
  const item = known?.item ?? el("li", { role: "treeitem", "data-id": agent.id });
  const beside = besideName(agent);
  item.title = beside ? `${nameOf(agent)} (${beside})` : agent.id;
  const swatch = el("i", { class: isCached ? "swatch" : "swatch off" });
  swatch.style.background = colour(agent.id);
  item.ariaLevel = depth + 1;
  item.ariaSelected = isChosen;
  item.tabIndex = isChosen ? 0 : -1;
  item.dataset.depth = depth;
  item.style.setProperty("--depth", Math.min(depth, 8));
  item.ariaLabel = `${nameOf(agent)}, ${agent.state}, ${agent.n_tokens} tokens` + (agent.parent ? `, forked from ${nameOf(agent.parent)}, ${sharedOf(agent)} tokens shared` : "");
  item.replaceChildren(
    el("div", { class: "who" }, swatch, el("b", {}, nameOf(agent), agent.is_named && beside ? el("span", { class: "said-first" }, beside) : null),
      agent.state === "idle" ? null : el("span", { class: `state ${agent.state}` }, agent.state),
      el("span", { class: "n" }, `${count(agent.n_tokens)} tok`)),
    agent.fork_text && agent.parent
      ? el("p", { class: "from" }, count(sharedOf(agent)), " shared ",
        el("code", {}, el("mark", {}, "▸"), short(agent.fork_text.behind)))
      : "");
  rows.set(agent.id, { item, mark });
  return item;
}

const sharedOf = (agent) => agent.parted_at ?? agent.parent_position;
const short = (text) => text.replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").slice(0, 36);

$("tree").addEventListener("click", (event) => {
  const item = event.target.closest("li");
  if (item) tell("choose", item.dataset.id);
});
$("tree").addEventListener("keydown", (event) => {
  const items = [...$("tree").children];
  const at = items.findIndex((item) => item.dataset.id === state.chosen);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined || !items.length) return;
  event.preventDefault();
  const next = items[Math.max(0, Math.min(items.length - 1, to))];
  choose(next.dataset.id);
  next.focus();
});

// Search -----------------------------------------------------------------------------------------

let timer;
let asked = 0;
$("search").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, 200);
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { $("search").value = ""; search(); }
  if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); $("hits").querySelector("button")?.focus(); }
});
$("hits").addEventListener("keydown", (event) => {
  const all = [...$("hits").querySelectorAll("button")];
  const at = all.indexOf(document.activeElement) + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? NaN);
  if (Number.isNaN(at)) return;
  event.preventDefault();
  (all[at] ?? $("search")).focus();
});

async function search() {
  const text = $("search").value.trim();
  const mine = asked += 1;
  $("tree").hidden = Boolean(text);
  $("hits").hidden = $("found").hidden = !text;
  if (!text) return;
  try {
    const found = (await call("GET", `/v1/agents?search=${encodeURIComponent(text)}`)).data;
    if (mine !== asked) return; // somebody typed on
    $("found").textContent = found.length ? `${count(found.length)} ${found.length > 1 ? "agents" : "agent"}` : `nobody said “${text}”`;
    $("hits").replaceChildren(...found.slice(0, 200).map(hit));
  } catch (error) {
    toast(trouble(error));
  }
}

function hit(agent) {
  const places = agent.found.map((one) => el("span", {}, one.before, el("mark", {}, one.text), one.behind));
  const open = () => {
    choose(agent.id);
    if (agent.found.length) tell("place", agent.id, agent.found[0].message);
  };
  return el("li", {}, el("button", { type: "button", onclick: open }, el("b", {}, nameOf(agent)), ...places));
}

on("shown", showTree);
