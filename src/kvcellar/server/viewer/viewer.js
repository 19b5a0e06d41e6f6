// The page: one stream of snapshots in, a few verbs out. No build step, no dependency.
"use strict";

const $ = (id) => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${n < 10 && i ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
};
const count = (n) => Number(n).toLocaleString("en-US");
const percent = (x) => `${Math.round(100 * x)}%`;

const state = {
  snapshot: null, // what the server said last
  model: null, // the name of the model that is looked at
  chosen: null, // the id of the agent that is looked at
  made: null, // the id of an agent made here that the stream has not listed yet
  shown: "", // what of it is on the page
  talks: new Map(), // agent's id -> the answer that comes: {controller, text, said}
  took: new Map(), // agent's id -> what its last turn from here took, in words
  undo: JSON.parse(sessionStorage.getItem("kvcellar-undo") ?? "[]"), // ids whose dropped states can be brought back
  cursor: 0, // the run of cells under the keyboard's cursor
  samples: [], // one a second
};

// Talking with the server ------------------------------------------------------------------------

const headers = (more = {}) => {
  const key = sessionStorage.getItem("kvcellar-key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
};

async function call(method, path, body) {
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(path, {
    method, headers: headers(more), body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.status === 401) askForKey();
  const value = await response.json();
  if (!response.ok) throw Object.assign(new Error(value.error ? value.error.message : response.statusText), { status: response.status });
  return value;
}

// Server-sent events by fetch, which unlike EventSource can bring a key and a body. `heard` is told of each piece.
async function* events(path, options = {}, heard = () => {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  heard();
  if (response.status === 401) askForKey();
  if (!response.ok) {
    const value = await response.json().catch(() => ({}));
    throw new Error(value.error ? value.error.message : response.statusText);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    held += value;
    const frames = held.split("\n\n");
    held = frames.pop();
    for (const frame of frames) {
      const event = { name: "message", data: "" };
      for (const line of frame.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

// The stream speaks every ten seconds at least. One that is silent for longer has no server behind it.
const SILENCE_MS = 25000;

async function watch() {
  for (let wait = 500; ; wait = Math.min(4000, wait * 2)) {
    const controller = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(new Error("it says nothing any more")), watch.silence);
    };
    try {
      heard();
      for await (const event of events("/events", { signal: controller.signal }, heard)) {
        wait = 500;
        if (event.name === "snapshot") { alive(); takeFromStream(JSON.parse(event.data)); }
        if (event.name === "closing") break;
      }
      dead("The server has stopped.");
    } catch (error) {
      dead(error instanceof TypeError ? "The server does not answer." : `Not connected: ${error.message}.`);
    }
    clearTimeout(timer);
    controller.abort();
    await new Promise((done) => setTimeout(done, wait));
  }
}
watch.silence = SILENCE_MS;

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
const trouble = (error) => (error instanceof TypeError ? "the server does not answer" : error.message);

function askForKey() {
  if (!$("key").open) $("key").showModal();
}
$("key-form").addEventListener("submit", () => {
  sessionStorage.setItem("kvcellar-key", $("key-value").value);
  location.reload();
});

// Typed and not sent yet: kept for each agent, also when the page is loaded again.
const draftOf = (id) => localStorage.getItem(`kvcellar-draft:${id ?? ""}`) ?? "";
function keepDraft(id, text) {
  if (text) localStorage.setItem(`kvcellar-draft:${id ?? ""}`, text);
  else localStorage.removeItem(`kvcellar-draft:${id ?? ""}`);
}
$("prompt").addEventListener("input", () => keepDraft(state.chosen, $("prompt").value));
for (const id of ["max", "temperature"]) {
  $(id).value = localStorage.getItem(`kvcellar-${id}`) ?? $(id).value;
  $(id).addEventListener("input", () => localStorage.setItem(`kvcellar-${id}`, $(id).value));
}

function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { $("toast").hidden = true; }, 7000);
}

function say(kind, text) {
  document.querySelector(".dot").className = `dot ${kind}`;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

// What is shown ----------------------------------------------------------------------------------

// An agent that was just made is looked at. Others may delete it before the stream lists it: so not for ever.
function lookAtNew(id) {
  lookAt(id);
  state.made = id;
  setTimeout(() => { if (state.made === id) state.made = null; }, 10000);
}

// The stream's snapshots come in order, but one may have been made before the answer to a verb.
function takeFromStream(snapshot) {
  if (state.made !== null) {
    if (!snapshot.agents.some((agent) => agent.id === state.made)) return;
    state.made = null;
  }
  take(snapshot);
}

function take(snapshot) {
  state.snapshot = snapshot;
  const names = snapshot.models.map((model) => model.name);
  if (!names.includes(state.model)) state.model = names[0] ?? null;
  const ids = snapshot.agents.map((agent) => agent.id);
  if (!ids.includes(state.chosen)) {
    const before = sessionStorage.getItem("kvcellar-chosen");
    lookAt(ids.includes(before) ? before : ids[ids.length - 1] ?? null);
  }
  showUndo();
  showStatus(names);
  showTree();
  showMap();
  showSlots();
  showTiers();
  showAgent();
}

const model = () => state.snapshot?.models.find((one) => one.name === state.model) ?? null;
const agentOf = (id) => state.snapshot?.agents.find((agent) => agent.id === id) ?? null;

function showStatus(names) {
  const moving = state.snapshot.states.find((one) => ["loading", "leaving"].includes(one.state));
  const failed = state.snapshot.states.find((one) => one.state === "failed");
  const now = model();
  if (moving) say("", `${moving.name} is ${moving.state} ${moving.fraction ? percent(moving.fraction) : ""}`);
  else if (failed) say("bad", `${failed.name} failed: ${failed.detail}`);
  else if (now) say("ok", `${now.name}, K and V in ${now.kv_dtype}${now.block_size > 1 ? `, blocks of ${now.block_size} cells` : ""}`);
  else say("", "no model in memory; the next request loads one");
  $("model").hidden = names.length < 2;
  if ($("model").dataset.names !== names.join()) {
    $("model").dataset.names = names.join();
    $("model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  $("model").value = state.model ?? "";
  $("n-hit").textContent = now && now.prompt_tokens ? percent(now.hit_rate) : "–";
  $("n-running").textContent = now ? now.running + now.waiting : "–";
  $("n-bytes").textContent = now ? bytes(now.pool_bytes) : "–";
}
$("model").addEventListener("change", () => { state.model = $("model").value; take(state.snapshot); });

// A colour per agent: far apart for neighbours, the same for as long as it lives.
const colours = new Map();
function hue(id) {
  if (!colours.has(id)) colours.set(id, (200 + colours.size * 137.5) % 360);
  return colours.get(id);
}
const isDark = () => document.documentElement.dataset.theme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
const colour = (id, alpha = 1) => `hsl(${hue(id)} ${isDark() ? "58% 60%" : "52% 48%"} / ${alpha})`;

function inOrder(agents) {
  const byId = new Map(agents.map((agent) => [agent.id, agent]));
  const children = new Map();
  for (const agent of agents) {
    const parent = byId.has(agent.parent) ? agent.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), agent]);
  }
  const rows = [];
  const seen = new Set();
  const visit = (agent, depth) => {
    if (seen.has(agent.id)) return;
    seen.add(agent.id);
    rows.push({ agent, depth });
    for (const child of (children.get(agent.id) ?? []).sort(byAge)) visit(child, depth + 1);
  };
  const byAge = (a, b) => a.created_s - b.created_s;
  for (const agent of (children.get(null) ?? []).sort((a, b) => b.created_s - a.created_s)) visit(agent, 0);
  for (const agent of agents) visit(agent, 0);
  return rows;
}

function showTree() {
  const rows = inOrder(state.snapshot.agents);
  $("no-agents").hidden = rows.length > 0;
  const cached = Object.assign({}, ...state.snapshot.models.map((one) => one.cached));
  const items = rows.map(({ agent, depth }) => {
    const swatch = el("i", { class: cached[agent.id] ? "swatch" : "swatch off" });
    swatch.style.background = colour(agent.id);
    const about = agent.fork_text && agent.parent
      ? el("p", { class: "from" }, "at ", String(agent.parent_position), " ",
        el("code", {}, short(agent.fork_text.before, true), el("mark", {}, "▸"), short(agent.fork_text.behind)))
      : null;
    const item = el("li", {
      role: "treeitem", id: `agent-${agent.id}`, "data-id": agent.id, "aria-level": depth + 1,
      "aria-selected": agent.id === state.chosen, tabindex: agent.id === state.chosen ? 0 : -1,
      title: agent.id,
      "aria-label": `${agent.id}, ${agent.state}, ${agent.n_tokens} tokens` + (agent.parent ? `, forked from ${agent.parent} at ${agent.parent_position}` : ""),
    },
    el("div", { class: "who" }, swatch, el("b", {}, agent.id),
      agent.state === "idle" ? null : el("span", { class: `state ${agent.state}` }, agent.state),
      el("span", { class: "n" }, `${count(agent.n_tokens)} tok`)), about);
    item.style.setProperty("--depth", depth);
    return item;
  });
  const focused = document.activeElement?.closest?.("#tree li")?.dataset.id;
  $("tree").replaceChildren(...items);
  if (focused) document.getElementById(`agent-${focused}`)?.focus({ preventScroll: true });
}
const short = (text, isEnd = false) => {
  const line = text.replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ");
  return isEnd ? line.slice(-14) : line.slice(0, 22);
};

$("tree").addEventListener("click", (event) => {
  const item = event.target.closest("li");
  if (item) choose(item.dataset.id);
});
$("tree").addEventListener("keydown", (event) => {
  const items = [...$("tree").children];
  const at = items.findIndex((item) => item.dataset.id === state.chosen);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined || !items.length) return;
  event.preventDefault();
  const next = items[Math.max(0, Math.min(items.length - 1, to))];
  choose(next.dataset.id);
  document.getElementById(`agent-${state.chosen}`)?.focus();
});

function choose(id) {
  lookAt(id);
  const agent = agentOf(id);
  if (agent && state.snapshot.models.some((one) => one.name === agent.model)) state.model = agent.model;
  take(state.snapshot);
}

// Each agent has a box of its own, and a line of its own about its last turn.
function lookAt(id) {
  if (id === state.chosen) return;
  state.chosen = id;
  if (id !== null) sessionStorage.setItem("kvcellar-chosen", id);
  $("prompt").value = draftOf(id);
  state.shown = "";
  showTalking();
}

function showTalking() {
  const isTalking = state.talks.has(state.chosen);
  $("send").hidden = isTalking;
  $("stop").hidden = !isTalking;
  $("took").textContent = state.took.get(state.chosen) ?? "";
}

// The cell map -----------------------------------------------------------------------------------

const grid = { columns: 1, size: 6, cells: 0, per: 1 };

function showMap() {
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
  const style = getComputedStyle(document.documentElement);
  const paint = Object.fromEntries(["free", "orphan", "gold", "good", "text"].map((name) => [name, resolve(style, name)]));
  const gap = grid.size > 4 ? 1 : 0.5;
  const box = grid.size - gap;
  let cell = 0;
  now.cell_runs.forEach(([length, owners, kind]) => {
    const who = now.owner_sets[owners];
    let fill = paint.free;
    if (kind) {
      if (who.length > 1) fill = paint.gold;
      else if (who.length === 1) fill = colour(who[0], kind === 3 ? 1 : 0.72);
      else fill = paint.orphan;
    }
    pen.fillStyle = fill;
    pen.globalAlpha = kind && state.chosen && who.length && !who.includes(state.chosen) ? 0.42 : 1;
    const first = Math.floor(cell / grid.per);
    const stop = Math.ceil((cell + length) / grid.per);
    for (let at = first; at < stop; at += 1) {
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
  $("cells-sum").textContent = `${count(used)} of ${count(now.capacity)} taken, ${count(now.evictable_cells)} could go`;
  const shared = sum(now.cell_runs.filter(([, owners]) => now.owner_sets[owners].length > 1));
  canvas.setAttribute("aria-label", `Cell map: ${now.capacity} cells, ${now.free_cells} free, ${now.evictable_cells} evictable, ${shared} shared`);
  canvas.dataset.shared = shared;
  canvas.dataset.used = used;
}
const sum = (runs) => runs.reduce((total, [length]) => total + length, 0);

function resolve(style, name) {
  resolve.probe ??= document.body.appendChild(el("i", { hidden: "", "aria-hidden": "true" }));
  resolve.probe.style.color = `var(--${name})`;
  return getComputedStyle(resolve.probe).color || style.getPropertyValue(`--${name}`);
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

function tellCell(cell) {
  const now = model();
  if (!now || cell < 0 || cell >= now.capacity) return;
  let at = 0;
  for (const [index, [length, owners, kind]] of now.cell_runs.entries()) {
    if (cell < at + length) {
      state.cursor = index;
      const who = now.owner_sets[owners];
      const what = ["free", "evictable", "kept on request", "in use now"][kind];
      const whose = who.length ? `${who.length > 1 ? `shared by ${who.length}: ` : ""}${who.slice(0, 6).join(", ")}${who.length > 6 ? " …" : ""}` : kind ? "of no agent that is known" : "";
      $("cell-said").textContent = `cells ${count(at)} to ${count(at + length - 1)}: ${what}${whose ? `; ${whose}` : ""}`;
      return;
    }
    at += length;
  }
}
$("map").addEventListener("pointermove", (event) => {
  const rect = $("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - rect.left - grid.left) / grid.size);
  const row = Math.floor((event.clientY - rect.top - grid.top) / grid.size);
  if (column >= 0 && column < grid.columns && row >= 0) tellCell((row * grid.columns + column) * grid.per);
});
$("map").addEventListener("pointerdown", (event) => {
  const now = model();
  $("map").dispatchEvent(new PointerEvent("pointermove", event));
  const run = now?.cell_runs[state.cursor];
  const who = run ? now.owner_sets[run[1]] : [];
  if (who.length) choose(who[(who.indexOf(state.chosen) + 1) % who.length]);
});
$("map").addEventListener("keydown", (event) => {
  const now = model();
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!now || !step) return;
  event.preventDefault();
  const next = Math.max(0, Math.min(now.cell_runs.length - 1, state.cursor + step));
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
  const whose = who.length ? `${who.slice(0, 6).join(", ")}${who.length > 6 ? " …" : ""}` : "of no agent that is known";
  const text = `states after ${count(length)} tokens: ${what}; ${whose}; it saves computing ${count(tokens)} tokens, for ${bytes(now.slot_bytes)}`;
  const swatch = el("i");
  if (who.length) swatch.style.background = who.length > 1 ? "var(--gold)" : colour(who[0]);
  const tell = () => { $("cell-said").textContent = text; };
  const kinds = ["", "", "locked", "running"][kind] + (state.chosen && who.length && !who.includes(state.chosen) ? " other" : "");
  return el("button", {
    type: "button", class: kinds.trim(), title: text, "aria-label": text, "data-at": `${length}-${owners}-${kind}`,
    onpointerenter: tell, onfocus: tell,
    onclick: () => { if (who.length) choose(who[(who.indexOf(state.chosen) + 1) % who.length]); },
  }, swatch, who.length ? `at ${count(length)}` : "?", tokens ? el("span", {}, `+${count(tokens)}`) : null);
}

// Tiers, and what happened over time -------------------------------------------------------------

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

function sample() {
  const now = model();
  const counts = now ? { name: now.name, sampled: now.sampled_tokens, computed: now.computed_tokens, prompt: now.prompt_tokens, reused: now.reused_tokens } : null;
  const before = sample.before;
  sample.before = counts;
  if (!counts || !before || before.name !== counts.name) return;
  const prompt = counts.prompt - before.prompt;
  const last = state.samples[state.samples.length - 1];
  state.samples.push({
    sampled: Math.max(0, counts.sampled - before.sampled),
    computed: Math.max(0, counts.computed - before.computed - (counts.sampled - before.sampled)),
    hit: prompt > 0 ? Math.min(1, (counts.reused - before.reused) / prompt) : last ? last.hit : null,
  });
  state.samples = state.samples.slice(-120);
  const latest = state.samples[state.samples.length - 1];
  const peak = Math.max(10, ...state.samples.map((one) => Math.max(one.sampled, one.computed)));
  draw($("speed"), [["computed", "computed", peak, false], ["sampled", "sampled", peak, true]]);
  draw($("hits"), [["hit", "reused", 1, true]]);
  $("speed-now").textContent = `${latest.sampled} / ${latest.computed}`;
  $("hits-now").textContent = latest.hit === null ? "–" : percent(latest.hit);
  const recent = state.samples.slice(-3);
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
    const points = state.samples.map((one, i) => [240 - (state.samples.length - 1 - i) * 2, one[field]])
      .filter(([, value]) => value !== null).map(([x, value]) => [x, 60 - (56 * value) / peak]);
    if (!points.length) continue;
    const line = points.map(([x, y]) => `${x},${y.toFixed(1)}`).join(" ");
    if (isFilled) parts.push(make("polygon", { class: `area ${kind}`, points: `${points[0][0]},64 ${line} 240,64` }));
    parts.push(make("polyline", { class: `curve ${kind}`, points: line }));
  }
  svg.replaceChildren(...parts);
}

// One agent --------------------------------------------------------------------------------------

async function showAgent() {
  const agent = agentOf(state.chosen);
  $("verbs").hidden = !agent;
  if (!agent) {
    $("agent-title").textContent = "No agent chosen";
    $("facts").replaceChildren();
    $("miss").replaceChildren();
    $("talk").replaceChildren();
    state.shown = "";
    return;
  }
  const swatch = el("i", { class: "swatch" });
  swatch.style.background = colour(agent.id);
  $("agent-title").replaceChildren(swatch, agent.id);
  const cached = state.snapshot.models.find((one) => one.name === agent.model)?.cached[agent.id] ?? 0;
  const facts = [["state", agent.state], ["tokens", count(agent.n_tokens)], ["in cache", count(cached)], ["stored", count(agent.n_stored)], ["turns", agent.n_turns]];
  const kept = state.snapshot.models.find((one) => one.name === agent.model)?.snapshots_of[agent.id] ?? [];
  if (kept.length) facts.push(["goes on from", `${count(kept[kept.length - 1])}${kept.length > 1 ? ` and ${count(kept.length - 1)} before` : ""}`]);
  if (agent.parent) facts.push(["from", `${agent.parent} at ${agent.parent_position}`]);
  $("facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  showMiss(agent);
  const mark = [agent.id, agent.n_tokens, agent.n_turns, agent.used_s].join();
  if (mark === state.shown) return;
  state.shown = mark;
  try {
    showTalk(await call("GET", `/v1/agents/${encodeURIComponent(agent.id)}`));
  } catch (error) {
    if (state.shown === mark) state.shown = "";
    toast(trouble(error));
  }
}

function showMiss(agent) {
  const miss = agent.miss;
  const mark = JSON.stringify([agent.id, miss]);
  if ($("miss").dataset.mark === mark) return;
  $("miss").dataset.mark = mark;
  if (!miss) { $("miss").replaceChildren(); return; }
  const details = el("details", {},
    el("summary", {}, `Computed ${count(miss.tokens_lost)} tokens again: ${miss.cause}`),
    el("p", {}, miss.advice),
    miss.was === miss.became ? null : el("p", { class: "dim" }, `The first difference is at token ${count(miss.position)}:`));
  if (miss.was !== miss.became) details.append(el("pre", { "aria-label": "It was" }, miss.was), el("pre", { "aria-label": "It became" }, miss.became));
  $("miss").replaceChildren(details);
}

function bubble(role, text) {
  return el("li", { class: `said-by ${role}` }, el("b", {}, role), el("span", {}, text || "(nothing)"));
}

function showTalk(agent) {
  if (agent.id !== state.chosen) return;
  const rows = [];
  const ends = new Map(); // messages up to the end of a turn -> its number
  agent.turns.forEach((turn, i) => ends.set(agent.turns[i + 1]?.n_messages ?? agent.messages.length, i + 1));
  const ended = (n) => {
    const turn = ends.get(n);
    if (!turn) return;
    const isLast = turn === agent.turns.length;
    rows.push(el("li", { class: "place" }, `turn ${turn}, ${count(agent.turns[turn - 1].stop)} tokens`,
      el("button", { type: "button", class: "quiet", "data-fork": turn, "aria-label": `Fork behind turn ${turn}`, onclick: () => verb("fork", { turn }) }, "Fork here"),
      isLast ? null : el("button", { type: "button", class: "quiet", "aria-label": `Rewind to behind turn ${turn}`, onclick: () => verb("rewind", { turn }) }, "Back to here")));
  };
  agent.messages.forEach((message, i) => {
    const content = message.content ?? "";
    const calls = (message.tool_calls ?? []).map((one) => `→ ${one.function.name}(${JSON.stringify(one.function.arguments)})`);
    const text = [typeof content === "string" ? content : JSON.stringify(content), ...calls].filter(Boolean).join("\n");
    rows.push(bubble(message.role, text));
    ended(i + 1);
  });
  if (!agent.messages.length && agent.n_tokens) rows.push(bubble("system", `${agent.n_tokens} tokens that are no conversation`));
  const talk = state.talks.get(agent.id);
  if (talk) rows.push(bubble("user", talk.text), talk.bubble);
  $("talk").replaceChildren(...rows);
  $("talk").scrollTop = $("talk").scrollHeight;
}

async function verb(name, body) {
  const id = state.chosen;
  if (!id) return;
  const path = `/v1/agents/${encodeURIComponent(id)}`;
  try {
    if (name === "delete") {
      if (!confirm(`Delete ${id} and what only it needs?`)) return;
      await call("DELETE", path);
      state.made = null;
      canUndo(id);
      toast(`deleted ${id}; Undo brings it back`);
      return;
    }
    const done = await call("POST", `${path}/${name}`, body ?? (["fork", "rewind"].includes(name) ? {} : undefined));
    if (name === "fork") { lookAtNew(done.id); toast(`${done.id} shares ${count(done.parent_position)} tokens with ${id}; nothing was copied`); }
    if (name === "resume") toast(`${count(done.restored_tokens)} tokens restored in ${done.restore_s.toFixed(3)} s`);
    if (name === "keep") toast(done.deleted.length ? `deleted ${done.deleted.join(", ")}; Undo brings back what was deleted` : "it has no siblings");
    if (name === "rewind") toast(`${id} went back to ${count(done.n_tokens)} tokens; Undo brings back what was dropped`);
    if (name === "rewind" || (name === "keep" && done.deleted.length)) canUndo(id);
    state.shown = "";
    take(await call("GET", "/v1/cache"));
  } catch (error) {
    toast(trouble(error));
  }
}

// What rewind, keep and delete have dropped can be brought back, the last first.
function canUndo(id) {
  state.undo.push(id);
  sessionStorage.setItem("kvcellar-undo", JSON.stringify(state.undo.slice(-50)));
  showUndo();
}
function showUndo() {
  $("undo").hidden = !state.undo.length;
  $("undo").title = state.undo.length ? `Bring back what was dropped of ${state.undo[state.undo.length - 1]} (u)` : "";
}
async function undo() {
  const id = state.undo[state.undo.length - 1];
  if (id === undefined) return;
  const forget = () => {
    state.undo.pop();
    sessionStorage.setItem("kvcellar-undo", JSON.stringify(state.undo));
    showUndo();
  };
  try {
    const done = await call("POST", `/v1/agents/${encodeURIComponent(id)}/undo`);
    forget();
    toast(`${done.restored.map((agent) => agent.id).join(", ")} ${done.restored.length > 1 ? "are" : "is"} as before`);
    if (done.restored.length) lookAtNew(done.restored[done.restored.length - 1].id);
    state.shown = "";
    take(await call("GET", "/v1/cache"));
  } catch (error) {
    if (error.status === 404 || error.status === 409) forget();
    toast(trouble(error));
  }
}
$("undo").addEventListener("click", undo);
$("verbs").addEventListener("click", (event) => {
  if (event.target.dataset.verb) verb(event.target.dataset.verb);
});

async function create() {
  const agent = await call("POST", "/v1/agents", state.model ? { model: state.model } : {});
  lookAtNew(agent.id);
  state.shown = "";
  take(await call("GET", "/v1/cache"));
  $("prompt").focus();
}
$("new").addEventListener("click", () => create().catch((error) => toast(trouble(error))));

async function ask() {
  const typed = $("prompt").value;
  const text = typed.trim();
  if (!text) return;
  if (state.talks.has(state.chosen)) {
    toast("The answer is still coming. What you typed is kept; send it when the answer has ended, or stop it.");
    return;
  }
  let id = state.chosen;
  try {
    if (!id) {
      await create();
      keepDraft(null, "");
      id = state.chosen;
      $("prompt").value = typed;
      keepDraft(id, typed);
    }
  } catch (error) {
    toast(trouble(error));
    return;
  }
  const talk = { controller: new AbortController(), text, bubble: bubble("assistant", " ") };
  talk.bubble.classList.add("now");
  const said = talk.bubble.querySelector("span");
  said.textContent = "";
  state.talks.set(id, talk);
  state.took.delete(id);
  showTalking();
  $("talk").append(bubble("user", text), talk.bubble);
  let isTaken = false;
  const taken = () => { // it is in the history from here on: only now it leaves the box
    if (isTaken) return;
    isTaken = true;
    if (draftOf(id).trim() !== text) return;
    keepDraft(id, "");
    if (state.chosen === id) $("prompt").value = "";
  };
  try {
    const body = { text, stream: true, max_tokens: Number($("max").value) || 48, temperature: Number($("temperature").value) || 0 };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: talk.controller.signal };
    let hasEnded = false;
    for await (const event of events(`/v1/agents/${encodeURIComponent(id)}/generate`, options)) {
      const value = JSON.parse(event.data);
      if (event.name === "token") { taken(); said.textContent += value.text; }
      if (event.name === "error") throw new Error(value.error.message);
      if (event.name === "end") {
        hasEnded = true;
        taken();
        const usage = value.usage;
        const first = usage.time_to_first_token_s;
        state.took.set(id, `reused ${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)}` + (usage.restored_tokens ? `, ${count(usage.restored_tokens)} restored` : "") + (first === null ? "" : `; first after ${(1000 * first).toFixed(0)} ms`));
      }
      if (state.chosen === id) $("talk").scrollTop = $("talk").scrollHeight;
    }
    if (!hasEnded) throw new Error("the answer was cut off");
  } catch (error) {
    if (error.name !== "AbortError") {
      toast(trouble(error));
      if (isTaken && !draftOf(id)) { // how much of it the server has is not known
        keepDraft(id, typed);
        if (state.chosen === id) $("prompt").value = typed;
      }
    }
  } finally {
    state.talks.delete(id);
    state.shown = "";
    showTalking();
    if (state.snapshot) showAgent();
  }
}
const stop = () => state.talks.get(state.chosen)?.controller.abort();
$("stop").addEventListener("click", stop);
$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  if (event.key === "Escape") { if (state.talks.has(state.chosen)) stop(); else $("prompt").blur(); }
});

// Keys and looks ---------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = {
    f: () => verb("fork"), r: () => verb("rewind"), p: () => verb("pause"),
    u: undo,
    n: () => create().catch((error) => toast(trouble(error))),
    "/": () => $("prompt").focus(), "?": () => $("help").showModal(),
    Escape: stop,
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
  localStorage.setItem("kvcellar-theme", theme);
  if (state.snapshot) take(state.snapshot);
}
$("theme").addEventListener("click", () => wear(THEMES[localStorage.getItem("kvcellar-theme") ?? "auto"][0]));
wear(localStorage.getItem("kvcellar-theme") ?? "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.snapshot) take(state.snapshot); });
new ResizeObserver(() => { if (state.snapshot) showMap(); }).observe($("map"));
watch();
