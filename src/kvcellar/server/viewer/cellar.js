// What is in the cache: every cell and whose it is, states, tiers, and what happened over time.

import { $, bytes, count, counted, el, percent } from "./dom.js";
import { agentOf, colour, isDark, model, nameOf, on, state } from "./state.js";
import { choose } from "./verbs.js";

// The cells that are used: a ribbon of squares for each chat, and before them what several share ---

const MOST_RIBBONS = 40; // that are drawn one by one
const MOST_SQUARES = 1600;
const WIDEST = 12; // pixels of a square, its gap included
const KINDS = ["free", "can be freed", "kept on request", "in use now"];
const LEFT = "left by deleted chats or single requests";
const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

// Cells with the same owners, as [kind, cells, are they of pictures] in the order of the cells; those
// whom most share first.
function ribbonsOf(now) {
  const bySet = new Map();
  let at = 0;
  for (const [length, owners, kind] of now.cell_runs) {
    const start = at;
    at += length;
    if (!kind) continue;
    if (!bySet.has(owners)) bySet.set(owners, { who: now.owner_sets[owners], n: 0, parts: [] });
    const ribbon = bySet.get(owners);
    ribbon.n += length;
    for (const [n, isPicture] of apart(start, at, now.picture_runs)) {
      const last = ribbon.parts.at(-1);
      if (last?.[0] === kind && last[2] === isPicture) last[1] += n;
      else ribbon.parts.push([kind, n, isPicture]);
    }
  }
  const rank = ({ who }) => (who.length > 1 ? 0 : who[0] === state.chosen ? 1 : who.length ? 2 : 3);
  return [...bySet.values()].sort((a, b) => rank(a) - rank(b) || b.who.length - a.who.length || b.n - a.n);
}

// Some cells, taken apart into those with rows of pictures and those without.
function apart(start, stop, pictures) {
  const parts = [];
  for (const [first, length] of pictures) {
    const [from, to] = [Math.max(first, start), Math.min(first + length, stop)];
    if (from >= to) continue;
    if (from > start) parts.push([from - start, false]);
    parts.push([to - from, true]);
    start = to;
  }
  return start < stop ? [...parts, [stop - start, false]] : parts;
}

const named = ({ who }) => (who.length > 1 ? `shared by ${count(who.length)}: ${list(who)}` : who.length ? nameOf(who[0]) : LEFT);
const list = (who) => `${who.slice(0, 6).map(nameOf).join(", ")}${who.length > 6 ? " …" : ""}`;
function inWords(ribbon) {
  const kinds = new Map();
  for (const [kind, n] of ribbon.parts) kinds.set(kind, (kinds.get(kind) ?? 0) + n);
  const parts = [...kinds].map(([kind, n]) => (kinds.size > 1 ? `${count(n)} ${KINDS[kind]}` : KINDS[kind]));
  const nPictures = sum(ribbon.parts.map(([, n, isPicture]) => (isPicture ? n : 0)));
  if (nPictures) parts.push(`${count(nPictures)} of pictures`);
  return `${counted(ribbon.n, "cell")}, ${parts.join(", ")}: ${named(ribbon)}`;
}

let drawnMap = "";
export function showMap() {
  const now = model();
  const map = $("map");
  const width = map.clientWidth;
  if (!now) { $("cells-sum").textContent = ""; map.replaceChildren(); drawnMap = ""; return; }
  const used = now.capacity - now.free_cells;
  const ribbons = ribbonsOf(now);
  const shared = sum(ribbons.filter(({ who }) => who.length > 1).map(({ n }) => n));
  map.dataset.shared = shared;
  map.dataset.used = used;
  $("cells-sum").textContent = `${count(used)} of ${count(now.capacity)} cells used${shared ? `, ${count(shared)} of them shared` : ""}; ${count(now.evictable_cells)} can be freed`;
  const part = (n) => `${(100 * n) / now.capacity}%`;
  $("room").children[0].style.width = part(used - now.evictable_cells);
  $("room").children[1].style.width = part(now.evictable_cells);
  if (!width) return;
  const mark = JSON.stringify([ribbons, width, state.chosen, isDark(), ribbons.slice(0, MOST_RIBBONS).map(named), window.devicePixelRatio]);
  if (mark === drawnMap) return;
  drawnMap = mark;
  const per = roundUp(Math.ceil(used / MOST_SQUARES));
  const size = Math.max(6, Math.min(WIDEST, Math.floor(Math.sqrt((width * 200) / Math.max(1, used / per)))));
  $("per").textContent = per > 1 ? `A square is ${count(per)} cells.` : "A square is a cell, which keeps one token.";
  if (now.picture_runs.length) $("per").textContent += " Hollow ones are of pictures.";
  const focused = document.activeElement?.closest?.("#map li")?.dataset.key;
  const rest = ribbons.slice(MOST_RIBBONS);
  map.replaceChildren(
    ...ribbons.slice(0, MOST_RIBBONS).map((ribbon) => ribbonOf(ribbon, width, size, per)),
    ...(rest.length ? [el("li", { class: "dim" }, `and ${count(rest.length)} more, ${count(sum(rest.map(({ n }) => n)))} cells`)] : []),
    ...(used ? [] : [el("li", { class: "dim" }, "All cells are free.")]));
  if (focused) map.querySelector(`[data-key="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
}

const roundUp = (n) => [1, 2, 5, 10, 20, 50, 100, 200, 500].find((one) => one >= n) ?? 1000 * Math.ceil(n / 1000);

function ribbonOf(ribbon, width, size, per) {
  const { who } = ribbon;
  const said = () => { $("cell-said").textContent = inWords(ribbon); };
  return el("li", { class: `ribbon${who.includes(state.chosen) ? " mine" : ""}`, "data-key": who.join("\n") },
    el("button", { type: "button", title: inWords(ribbon), onpointerenter: said, onfocus: said, onclick: () => { said(); chooseOf(who); } },
      el("span", { class: "name" }, named(ribbon)), el("span", { class: "n" }, count(ribbon.n)), squares(ribbon, width - 14, size, per)));
}

function squares({ who, parts }, width, size, per) {
  const columns = Math.max(1, Math.floor(width / size));
  const kinds = parts.flatMap(([kind, n, isPicture]) => Array(Math.max(1, Math.round(n / per))).fill([kind, isPicture]));
  const scale = window.devicePixelRatio || 1;
  const high = Math.ceil(kinds.length / columns) * size;
  const canvas = el("canvas", { "aria-hidden": "true", width: Math.round(columns * size * scale), height: Math.round(high * scale) });
  canvas.style.width = `${columns * size}px`;
  canvas.style.height = `${high}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const fill = who.length > 1 ? resolve("var(--gold)") : who.length ? resolve(colour(who[0])) : resolve("var(--orphan)");
  const rims = [null, null, resolve("var(--text)"), resolve("var(--good)")];
  const box = size - (size > 7 ? 2 : 1);
  const hollow = resolve("var(--card)");
  const inner = Math.max(2, Math.floor(box / 3));
  kinds.forEach(([kind, isPicture], i) => {
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    pen.fillStyle = fill;
    pen.fillRect(x, y, box, box);
    if (isPicture) {
      pen.fillStyle = hollow;
      pen.fillRect(x + (box - inner) / 2, y + (box - inner) / 2, inner, inner);
    }
    if (!rims[kind]) return;
    pen.strokeStyle = rims[kind];
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 0.75, y + 0.75, box - 1.5, box - 1.5);
  });
  return canvas;
}

// A colour as a canvas takes it: of variables of the style sheet, in the theme that is worn.
function resolve(css) {
  resolve.probe ??= document.body.appendChild(el("i", { hidden: "", "aria-hidden": "true" }));
  resolve.probe.style.color = css;
  return getComputedStyle(resolve.probe).color;
}

// The next of some owners: a click goes through all who share a cell.
const chooseOf = (who) => { if (who.length) choose(who[(who.indexOf(state.chosen) + 1) % who.length]); };
$("map").addEventListener("keydown", (event) => {
  const all = [...$("map").querySelectorAll("button")];
  const next = all[all.indexOf(document.activeElement) + ({ ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key] ?? NaN)];
  if (!next) return;
  event.preventDefault();
  next.focus();
});

// States of recurrent layers ---------------------------------------------------------------------

const MOST_SLOTS = 60; // drawn: those that run, those of the chosen agent, and then those that save most

function showSlots() {
  const now = model();
  $("states").hidden = !now?.n_slots;
  if (!now?.n_slots) return;
  const used = now.slots.length;
  $("states-sum").textContent = `${count(used)} of ${count(now.n_slots)} slots taken, ${bytes(now.slot_bytes)} each; ${count(now.snapshots)} snapshots to go on from`;
  const rank = ([, , owners, kind]) => (kind === 3 ? 0 : now.owner_sets[owners].includes(state.chosen) ? 1 : 2);
  const slots = now.slots.toSorted((a, b) => rank(a) - rank(b) || b[1] - a[1] || b[0] - a[0]);
  const focused = document.activeElement?.closest?.("#slots button")?.dataset.at;
  const items = slots.slice(0, MOST_SLOTS).map((slot) => el("li", {}, chip(now, slot)));
  if (used > MOST_SLOTS) items.push(el("li", { class: "more" }, `and ${count(used - MOST_SLOTS)} more`));
  if (!used) items.push(el("li", { class: "more" }, "none is taken"));
  $("slots").replaceChildren(...items);
  if (focused) $("slots").querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
}

// A slot: behind how many tokens its states are, and how many would be computed again without it.
function chip(now, [length, tokens, owners, kind]) {
  const who = now.owner_sets[owners];
  const what = ["free", "a snapshot, can be freed", "a snapshot, shared", "in use now"][kind];
  const text = `states after ${counted(length, "token")}: ${what}; ${who.length ? list(who) : LEFT}; it saves computing ${counted(tokens, "token")}, for ${bytes(now.slot_bytes)}`;
  const swatch = el("i");
  if (who.length) swatch.style.background = who.length > 1 ? "var(--gold)" : colour(who[0]);
  const said = () => { $("cell-said").textContent = text; };
  const kinds = ["", "", "locked", "running"][kind] + (state.chosen && who.length && !who.includes(state.chosen) ? " other" : "");
  return el("button", {
    type: "button", class: kinds.trim(), title: text, "aria-label": text, "data-at": `${length}-${owners}-${kind}`,
    onpointerenter: said, onfocus: said, onclick: () => chooseOf(who),
  }, swatch, who.length ? `at ${count(length)}` : "?", tokens ? el("span", {}, `+${count(tokens)}`) : null);
}

// The chosen agent, tiers, and what happened over time -------------------------------------------

function showFacts() {
  const agent = agentOf(state.chosen);
  $("about").hidden = $("facts").hidden = !agent;
  if (!agent) return;
  const mine = state.snapshot.models.find((one) => one.name === agent.model);
  const facts = [["id", agent.id], ["state", agent.state], ["tokens", count(agent.n_tokens)], ["in memory", count(mine?.cached[agent.id] ?? 0)], ["on disk", count(agent.n_stored)], ["turns", agent.n_turns], ["cells in", agent.kv_dtype]];
  const kept = mine?.snapshots_of[agent.id] ?? [];
  if (kept.length) facts.push(["goes on from", `${count(kept.at(-1))}${kept.length > 1 ? ` and ${count(kept.length - 1)} before` : ""}`]);
  $("facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

function showTiers() {
  const now = model();
  const stored = state.snapshot.store;
  const row = (name, parts, limit, text) => {
    const bar = el("div", { class: "bar" });
    for (const [value, kind] of parts) {
      const part = el("i", { class: kind });
      part.style.width = `${limit ? Math.min(100, (100 * value) / limit) : 0}%`;
      bar.append(part);
    }
    return el("div", { class: "tier" }, el("b", {}, name), bar, el("span", {}, text));
  };
  const rows = [];
  if (now) {
    rows.push(row("cache", [[now.live_cells + now.protected_tokens, ""], [now.evictable_cells, "soft"]], now.capacity,
      `${bytes(now.pool_bytes)}, ${counted(now.capacity, "cell")}`));
  }
  if (now?.n_slots) {
    rows.push(row("states", [[now.live_slots, ""], [now.snapshots, "soft"]], now.n_slots,
      `${bytes((now.n_slots - now.free_slots) * now.slot_bytes)} of ${bytes(now.n_slots * now.slot_bytes)}`));
  }
  for (const [name, tier] of [["RAM", stored.warm], ["disk", stored.cold]]) {
    rows.push(row(name, [[tier.size_bytes, ""]], tier.limit_bytes, `${bytes(tier.size_bytes)} of ${bytes(tier.limit_bytes)}, ${counted(tier.n_blocks, "block")}`));
  }
  if (state.snapshot.pins.n) rows.push(row("pinned", [[state.snapshot.pins.tokens, ""]], now?.capacity, counted(state.snapshot.pins.tokens, "token")));
  $("tiers").replaceChildren(...rows);
}

function showNumbers() {
  const now = model();
  $("n-hit").textContent = now && now.prompt_tokens ? percent(now.hit_rate) : "–";
  $("n-running").textContent = now ? now.running + now.waiting : "–";
  $("n-bytes").textContent = now ? bytes(now.pool_bytes) : "–";
}

let samples = []; // one a second
let before = null;
function sample() {
  const now = model();
  const counts = now ? { name: now.name, sampled: now.sampled_tokens, computed: now.computed_tokens, prompt: now.prompt_tokens, reused: now.reused_tokens } : null;
  const then = before;
  before = counts;
  if (!counts || !then || then.name !== counts.name) return;
  const asked = counts.prompt - then.prompt;
  samples.push({
    sampled: Math.max(0, counts.sampled - then.sampled),
    computed: Math.max(0, counts.computed - then.computed - (counts.sampled - then.sampled)),
    hit: asked > 0 ? Math.min(1, (counts.reused - then.reused) / asked) : samples.at(-1)?.hit ?? null,
  });
  samples = samples.slice(-120);
  const latest = samples.at(-1);
  const peak = Math.max(10, ...samples.map((one) => Math.max(one.sampled, one.computed)));
  draw($("speed"), [["computed", "computed", peak, false], ["sampled", "sampled", peak, true]]);
  draw($("rate"), [["hit", "reused", 1, true]]);
  $("speed-now").textContent = `${latest.sampled} / ${latest.computed}`;
  $("rate-now").textContent = latest.hit === null ? "–" : percent(latest.hit);
  const recent = samples.slice(-3);
  $("n-speed").textContent = Math.round(recent.reduce((total, one) => total + one.sampled, 0) / recent.length);
}
setInterval(sample, 1000);

function draw(svg, curves) {
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const parts = [];
  for (const [field, kind, peak, isFilled] of curves) {
    const points = samples.map((one, i) => [240 - (samples.length - 1 - i) * 2, one[field]])
      .filter(([, value]) => value !== null).map(([x, value]) => [x, 60 - (56 * value) / peak]);
    if (!points.length) continue;
    const line = points.map(([x, y]) => `${x},${y.toFixed(1)}`).join(" ");
    if (isFilled) parts.push(make("polygon", { class: `area ${kind}`, points: `${points[0][0]},64 ${line} 240,64` }));
    parts.push(make("polyline", { class: `curve ${kind}`, points: line }));
  }
  svg.replaceChildren(...parts);
}

on("shown", () => {
  showNumbers();
  showFacts();
  if ($("cellar").hidden) return;
  showMap();
  showSlots();
  showTiers();
});
new ResizeObserver(() => { if (state.snapshot) showMap(); }).observe($("map"));
