// What is in the cache: every cell and whose it is, states, tiers, and what happened over time.

import { $, bytes, count, el, percent } from "./dom.js";
import { colour, agentOf, model, on, state } from "./state.js";
import { choose } from "./verbs.js";

// The cell map -----------------------------------------------------------------------------------

const grid = { columns: 1, size: 6, cells: 0, per: 1 };
let cursor = 0; // the run of cells under the keyboard's cursor
const sum = (runs) => runs.reduce((total, [length]) => total + length, 0);

export function showMap() {
  const canvas = $("map");
  const now = model();
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width) return;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  if (!now) { $("cells-sum").textContent = ""; return; }
  layOut(now.capacity, width, height);
  const paint = Object.fromEntries(["free", "orphan", "gold", "good", "text"].map((name) => [name, resolve(name)]));
  const box = grid.size - (grid.size > 4 ? 1 : 0.5);
  let cell = 0;
  now.cell_runs.forEach(([length, owners, kind]) => {
    const who = now.owner_sets[owners];
    pen.fillStyle = fillOf(paint, kind, who);
    pen.globalAlpha = kind && state.chosen && who.length && !who.includes(state.chosen) ? 0.42 : 1;
    const stop = Math.ceil((cell + length) / grid.per);
    for (let at = Math.floor(cell / grid.per); at < stop; at += 1) {
      const x = grid.left + (at % grid.columns) * grid.size;
      const y = grid.top + Math.floor(at / grid.columns) * grid.size;
      pen.fillRect(x, y, box, box);
      if (kind >= 2) {
        pen.strokeStyle = kind === 3 ? paint.good : paint.text;
        pen.lineWidth = 1;
        pen.strokeRect(x + 0.5, y + 0.5, box - 1, box - 1);
      }
    }
    cell += length;
  });
  pen.globalAlpha = 1;
  const used = now.capacity - now.free_cells;
  const shared = sum(now.cell_runs.filter(([, owners]) => now.owner_sets[owners].length > 1));
  $("cells-sum").textContent = `${count(used)} of ${count(now.capacity)} taken, ${count(shared)} shared, ${count(now.evictable_cells)} could go`;
  canvas.setAttribute("aria-label", `Cell map: ${now.capacity} cells, ${now.free_cells} free, ${now.evictable_cells} evictable, ${shared} shared`);
  canvas.dataset.shared = shared;
  canvas.dataset.used = used;
}

function fillOf(paint, kind, who) {
  if (!kind) return paint.free;
  if (who.length > 1) return paint.gold;
  return who.length ? colour(who[0], kind === 3 ? 1 : 0.72) : paint.orphan;
}

function resolve(name) {
  resolve.probe ??= document.body.appendChild(el("i", { hidden: "", "aria-hidden": "true" }));
  resolve.probe.style.color = `var(--${name})`;
  return getComputedStyle(resolve.probe).color;
}

// Squares as large as they can be; several cells in one where there are more than pixels.
function layOut(cells, width, height) {
  const pad = 8;
  const w = width - 2 * pad;
  const h = height - 2 * pad;
  grid.per = Math.max(1, Math.ceil(cells / (Math.floor(w / 3) * Math.floor(h / 3))));
  const n = Math.ceil(cells / grid.per);
  let size = Math.min(22, Math.sqrt((w * h) / n));
  while (Math.floor(w / size) * Math.floor(h / size) < n) size *= 0.99;
  size = Math.floor(size * 4) / 4;
  Object.assign(grid, { size, columns: Math.max(1, Math.floor(w / size)), cells });
  grid.left = pad + (w - grid.columns * size) / 2;
  grid.top = pad + Math.max(0, (h - Math.ceil(n / grid.columns) * size) / 2);
}

const list = (who) => `${who.slice(0, 6).join(", ")}${who.length > 6 ? " …" : ""}`;

function tellCell(cell) {
  const now = model();
  if (!now || cell < 0 || cell >= now.capacity) return;
  let at = 0;
  for (const [index, [length, owners, kind]] of now.cell_runs.entries()) {
    if (cell < at + length) {
      cursor = index;
      const who = now.owner_sets[owners];
      const what = ["free", "evictable", "kept on request", "in use now"][kind];
      const whose = who.length ? `${who.length > 1 ? `shared by ${who.length}: ` : ""}${list(who)}` : kind ? "of no agent that is known" : "";
      $("cell-said").textContent = `cells ${count(at)} to ${count(at + length - 1)}: ${what}${whose ? `; ${whose}` : ""}`;
      return;
    }
    at += length;
  }
}
function pointAt(event) {
  const rect = $("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - rect.left - grid.left) / grid.size);
  const row = Math.floor((event.clientY - rect.top - grid.top) / grid.size);
  if (column >= 0 && column < grid.columns && row >= 0) tellCell((row * grid.columns + column) * grid.per);
}
// The next of some owners: a click goes through all who share a cell.
const chooseOf = (who) => { if (who.length) choose(who[(who.indexOf(state.chosen) + 1) % who.length]); };
$("map").addEventListener("pointermove", pointAt);
$("map").addEventListener("pointerdown", (event) => {
  pointAt(event);
  const run = model()?.cell_runs[cursor];
  if (run) chooseOf(model().owner_sets[run[1]]);
});
$("map").addEventListener("keydown", (event) => {
  const now = model();
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (now && event.key === "Enter") chooseOf(now.owner_sets[now.cell_runs[cursor][1]]);
  if (!now || !step) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(now.cell_runs.length - 1, cursor + step));
  tellCell(sum(now.cell_runs.slice(0, next)));
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
  const what = ["free", "a snapshot, evictable", "a snapshot, shared", "in use now"][kind];
  const text = `states after ${count(length)} tokens: ${what}; ${who.length ? list(who) : "of no agent that is known"}; it saves computing ${count(tokens)} tokens, for ${bytes(now.slot_bytes)}`;
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
  const facts = [["state", agent.state], ["tokens", count(agent.n_tokens)], ["in cache", count(mine?.cached[agent.id] ?? 0)], ["stored", count(agent.n_stored)], ["turns", agent.n_turns], ["K and V in", agent.kv_dtype]];
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
      `${bytes(now.pool_bytes)}, ${count(now.capacity)} cells`));
  }
  if (now?.n_slots) {
    rows.push(row("states", [[now.live_slots, ""], [now.snapshots, "soft"]], now.n_slots,
      `${bytes((now.n_slots - now.free_slots) * now.slot_bytes)} of ${bytes(now.n_slots * now.slot_bytes)}`));
  }
  for (const [name, tier] of [["RAM", stored.warm], ["disk", stored.cold]]) {
    rows.push(row(name, [[tier.size_bytes, ""]], tier.limit_bytes, `${bytes(tier.size_bytes)} of ${bytes(tier.limit_bytes)}, ${count(tier.n_blocks)} blocks`));
  }
  if (state.snapshot.pins.n) rows.push(row("pinned", [[state.snapshot.pins.tokens, ""]], now?.capacity, `${count(state.snapshot.pins.tokens)} tokens`));
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
