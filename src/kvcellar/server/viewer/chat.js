// The conversation of the agent that is looked at: what was said, what is being said, what each turn took.

import { $, button, copy, count, counted, el, inSight, seconds, toast, untilHidden } from "./dom.js";
import { drafts, sent } from "./kept.js";
import { NAMES, callOf, markdownOf, parted, resultsOf, thoughtOf } from "./markdown.js";
import { call, events, hear, pathOf, said, trouble } from "./net.js";
import { picturesOf } from "./pictures.js";
import { agentOf, besideName, colour, nameOf, on, sees, state, tell } from "./state.js";
import { choose, fork, once, verb } from "./verbs.js";

let detail = null; // the agent with its messages and turns, as the server gave it
let mark = ""; // of what it was like when it was asked for
let place = null; // a message that a search has found: {id, message}

// What stands above ------------------------------------------------------------------------------

function showHead() {
  const agent = agentOf(state.chosen);
  $("verbs").hidden = !agent;
  $("agent-title").dataset.id = state.chosen ?? "";
  if (!agent) {
    $("agent-title").textContent = state.chosen ?? "A new chat";
    $("lineage").replaceChildren();
    return;
  }
  const swatch = el("i", { class: "swatch" });
  swatch.style.background = colour(agent.id);
  $("agent-title").replaceChildren(swatch, nameOf(agent));
  $("agent-title").title = `Known to clients as ${agent.id}`;
  const siblings = agent.parent === null ? 0 : state.snapshot.agents.filter((one) => one.parent === agent.parent).length - 1;
  const parts = [[agent.is_named && besideName(agent), agent.model, counted(agent.n_tokens, "token")].filter(Boolean).join(" · ")];
  if (agent.parent) {
    const there = agentOf(agent.parent);
    parts.push("forked from ", there ? button(nameOf(there), () => choose(agent.parent)) : agent.parent,
      agent.parted_at === null ? "" : `, ${counted(agent.parted_at, "token")} shared${agent.parted_from === agent.parent ? "" : ` with ${nameOf(agent.parted_from)}`}`);
    if (siblings > 0) parts.push(`beside ${siblings} other${siblings > 1 ? "s" : ""}`);
  }
  const line = JSON.stringify(parts.map((part) => part.textContent ?? part));
  if ($("lineage").dataset.line === line) return;
  $("lineage").dataset.line = line;
  $("lineage").replaceChildren(...parts.flatMap((part, i) => (i && typeof part === "string" && parts[i - 1] && typeof parts[i - 1] === "string" ? [" · ", part] : i === 1 ? [" · ", part] : [part])));
}

function showMiss() {
  const miss = agentOf(state.chosen)?.miss;
  const line = JSON.stringify([state.chosen, miss]);
  if ($("miss").dataset.mark === line) return;
  $("miss").dataset.mark = line;
  if (!miss) { $("miss").replaceChildren(); return; }
  const details = el("details", { class: "miss" },
    el("summary", {}, `The last turn computed ${counted(miss.tokens_lost, "token")} again: ${miss.cause}`),
    el("p", {}, miss.advice),
    miss.was === miss.became ? null : el("p", { class: "dim" }, `The first difference is at token ${count(miss.position)}:`));
  if (miss.was !== miss.became) details.append(el("pre", { "aria-label": "It was" }, miss.was), el("pre", { "aria-label": "It became" }, miss.became));
  $("miss").replaceChildren(details);
}

// What was said ----------------------------------------------------------------------------------

async function showAgent() {
  showHead();
  showMiss();
  const agent = agentOf(state.chosen);
  if (!agent) {
    detail = null;
    mark = "";
    showTalk();
    return;
  }
  const now = [agent.id, agent.n_tokens, agent.n_turns, agent.used_s].join();
  if (now === mark) return;
  mark = now;
  if (detail?.id !== agent.id) detail = null;
  try {
    const found = await call("GET", pathOf(agent.id));
    if (state.chosen !== agent.id) return;
    detail = found;
    sees(found);
    showTalk();
  } catch (error) {
    if (mark === now) mark = "";
    toast(trouble(error));
  }
}

// Rows are made once and kept for as long as what they show is the same.
let rows = []; // {key, node}
function showTalk() {
  const wanted = detail ? rowsOf(detail) : [];
  const talk = state.talks.get(state.chosen) ?? (state.heard?.id === state.chosen ? state.heard : null);
  if (talk) {
    if (talk.asked || talk.pictures.length) wanted.push({ key: `asked:${talk.asked}`, make: () => message({ role: "user", content: talk.asked, pictures: talk.pictures }) });
    wanted.push({ key: "now", make: nowRow });
  } else if (sent.get(state.chosen)) { // nobody knows yet whether the server has it
    const { text, n, pictures } = sent.get(state.chosen);
    const isThere = detail?.messages.slice(n).some((one) => one.role === "user" && one.content === text);
    if (!isThere) wanted.push({ key: `asked:${text}`, make: () => message({ role: "user", content: text, pictures }) });
  }
  const list = $("talk");
  const isOther = list.dataset.id !== (state.chosen ?? "");
  list.dataset.id = state.chosen ?? "";
  if (isOther) { rows = []; sticks = true; }
  const made = wanted.map(({ key, make }, i) => (rows[i]?.key === key ? rows[i] : { key, node: make() }));
  made.forEach(({ node }, i) => { if (list.children[i] !== node) list.insertBefore(node, list.children[i] ?? null); });
  while (list.children.length > made.length) list.lastChild.remove();
  rows = made;
  if (talk) showNow(talk);
  if (place?.id === state.chosen && detail) showPlace();
  else toEnd();
}

// Who reads the end of a conversation stays there; who has scrolled up is left alone.
let sticks = true;
$("talk").addEventListener("scroll", () => {
  const list = $("talk");
  sticks = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
});
function toEnd() {
  if (!sticks) return;
  $("talk").scrollTop = $("talk").scrollHeight;
  requestAnimationFrame(() => { if (sticks) $("talk").scrollTop = $("talk").scrollHeight; }); // rows have their heights now
}

function rowsOf(agent) {
  const found = [];
  const results = resultsOf(agent.messages);
  const turnOf = (i) => agent.turns.findLastIndex((turn) => turn.n_messages <= i);
  agent.messages.forEach((said, i) => {
    const turn = turnOf(i);
    const came = results.found.get(i) ?? [];
    if (!results.taken.has(i)) found.push({ key: `${agent.id}:${i}:${turn}:${JSON.stringify([said, came])}`, make: () => message(said, i, turn, came) });
    const stop = agent.turns[turn + 1]?.n_messages ?? agent.messages.length;
    if (turn >= 0 && i + 1 === stop) {
      const isLast = turn + 1 === agent.turns.length;
      found.push({ key: `turn:${agent.id}:${turn}:${isLast}:${JSON.stringify(agent.turns[turn])}`, make: () => turnRow(agent.turns[turn], turn, isLast) });
    }
  });
  if (!agent.messages.length && agent.n_tokens) {
    found.push({ key: "tokens", make: () => message({ role: "system", content: `${counted(agent.n_tokens, "token")} that are no conversation` }) });
  }
  return found;
}

function message(said, i = null, turn = -1, results = []) {
  const { thought, text } = parted(said);
  const body = el("div", { class: "body" });
  const acts = el("span", { class: "acts" });
  const row = el("li", { class: `said-by ${said.role}`, "data-message": i }, el("div", { class: "by" }, NAMES[said.role] ?? said.role, acts));
  if (thought) row.append(thoughtOf(thought));
  if (said.pictures?.length) row.append(picturesOf(said.pictures, i === null ? "this message" : `message ${i + 1}`));
  if (text || !(said.tool_calls?.length || thought || said.pictures?.length)) row.append(body);
  body.append(el("div", { class: "plain" }, text || "(nothing)"));
  if (said.role === "assistant") whenSeen(row, () => { if (text) body.replaceChildren(markdownOf(text)); });
  row.append(...(said.tool_calls ?? []).map((one, at) => callOf(one, results[at])));
  if (i === null) return row;
  acts.append(button("Copy", () => copy(text), { "aria-label": `Copy message ${i + 1}` }));
  if (said.role === "user" && turn >= 0) acts.append(button("Edit", () => edit(row, said, turn, i), { "aria-label": `Edit message ${i + 1} and send it again, in a fork` }));
  return row;
}

// Markdown is made of what comes into view, so that a long conversation opens at once.
const makers = new WeakMap();
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    sight.unobserve(entry.target);
    makers.get(entry.target)?.();
    toEnd();
  }
}, { root: $("talk"), rootMargin: "600px" });
function whenSeen(node, make) {
  makers.set(node, make);
  sight.observe(node);
}

const CUT = { // why an answer is not whole
  length: "cut at the limit of tokens", context_full: "cut: the context is full", cache_full: "cut: the cache is full",
  cancelled: "stopped", error: "ended by an error", cut: "cut by going back",
};

// What a turn took, and what can be done from its end.
function turnRow(turn, i, isLast) {
  const n = i + 1;
  const took = turn.took;
  const said = [`turn ${n}`];
  if (took) {
    said.push(`reused ${count(took.n_cached)} of ${count(turn.n_prompt)}${took.n_restored ? `, ${count(took.n_restored)} from disk or RAM` : ""}`);
    if (took.first_s !== null) said.push(`first word after ${seconds(took.first_s)}`);
    const n_said = turn.stop - turn.n_prompt;
    if (n_said > 1) said.push(`${counted(n_said, "token")} in ${seconds(took.total_s)}`);
  } else {
    said.push(counted(turn.stop, "token"));
  }
  return el("li", { class: "place" }, el("span", {}, said.join(" · ")),
    took?.cause ? el("span", { class: "lost", title: turn.advice }, `computed ${count(took.n_lost)} again: ${took.cause}`) : null,
    turn.reason in CUT ? el("span", { class: "cut" }, CUT[turn.reason]) : null,
    button("Another answer", () => again(i), { "aria-label": `Another answer in turn ${n}, in a fork` }),
    isLast && turn.reason in CUT && turn.reason !== "context_full" ? button("Continue", () => tell("go-on", state.chosen), { "aria-label": "Continue this answer" }) : null,
    button("Fork here", () => verb("fork", { turn: n }), { "data-fork": n, "aria-label": `Fork behind turn ${n}` }),
    isLast ? null : button("Back to here", () => verb("rewind", { turn: n }), { "aria-label": `Rewind to behind turn ${n}` }));
}

// Said again, in a fork --------------------------------------------------------------------------

async function again(turn) {
  const stop = detail.turns[turn + 1]?.n_messages ?? detail.messages.length;
  const asked = detail.messages.slice(detail.turns[turn].n_messages, stop).filter((one) => one.role === "user").at(-1);
  if (!asked) { toast("there is no message of yours in that turn"); return; }
  await inFork(turn, parted(asked).text, asked.pictures);
}

async function inFork(turn, text, pictures = []) {
  return await once(`in a fork of ${state.chosen}`, () => forkAndSend(turn, text, pictures)) ?? false;
}
async function forkAndSend(turn, text, pictures) {
  try {
    const made = await fork(state.chosen, { turn });
    tell("send", made.id, text, pictures.map(({ name, url }) => ({ name, url })));
    return true;
  } catch (error) {
    toast(trouble(error));
    return false;
  }
}

function edit(row, message, turn, i) {
  const { text } = parted(message);
  const key = `edit:${state.chosen}:${i}`;
  const area = el("textarea", { "aria-label": "Your message, changed" });
  area.value = drafts.get(key) || text;
  area.addEventListener("input", () => drafts.set(key, area.value));
  const close = () => { form.remove(); if (row.querySelector(".body")) row.querySelector(".body").hidden = false; };
  const form = el("form", { class: "edit" }, area,
    el("div", { class: "row" }, button("Cancel", () => { drafts.set(key, ""); close(); }), el("button", { class: "primary" }, "Send in a fork")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!area.value.trim() && !message.pictures?.length) return;
    if (await inFork(turn, area.value, message.pictures)) { drafts.set(key, ""); close(); }
  });
  if (row.querySelector(".body")) row.querySelector(".body").hidden = true;
  row.append(form);
  area.focus();
}

// What is being said -----------------------------------------------------------------------------

function nowRow() {
  return el("li", { class: "said-by assistant now" }, el("div", { class: "by" }, NAMES.assistant), el("div", { class: "body" }));
}

// Until the first word: how much of the prompt is read, and how much of that lay in the cache.
function readingOf(reading) {
  if (!reading?.n_read) return el("p", { class: "reading dim" }, "waiting …");
  const { n_read, n_prompt, n_cached } = reading;
  const said = `read ${count(n_read)} of ${counted(n_prompt, "token")}${n_cached ? `, ${count(n_cached)} of them from the cache` : ""}`;
  return el("p", { class: "reading dim" }, el("progress", { max: n_prompt, value: n_read, "aria-label": "Tokens of the prompt that are read" }), " ", said);
}

let drawn = 0;
let pause = 120;
let later;
function showNow(talk) {
  const body = $("talk").querySelector(".now .body");
  if (!body) return;
  clearTimeout(later);
  const wait = pause - (performance.now() - drawn);
  if (wait > 0) { later = setTimeout(() => showNow(talk), wait); return; }
  drawn = performance.now();
  const { thought, text } = parted({ content: talk.text, reasoning_content: talk.thought });
  const parts = [];
  if (thought) parts.push(thoughtOf(thought, !text, "Thinking"));
  const isAnswered = talk.text || talk.thought || talk.calls.length;
  if (!isAnswered) parts.push(readingOf(state.heard?.id === state.chosen ? state.heard.reading : null));
  else parts.push(markdownOf(text), ...talk.calls.map((one) => callOf(one)));
  body.replaceChildren(...parts);
  pause = Math.max(120, 5 * (performance.now() - drawn)); // a text that takes long to draw is drawn less often
  toEnd();
}

on("talk", (id) => { if (id === state.chosen) showTalk(); });
on("piece", (id) => { if (id === state.chosen) showNow(state.talks.get(id)); });
on("talked", (id, text) => {
  if (id === state.chosen) $("heard").textContent = text.slice(0, 2000);
});

// Turns that others ask for are heard while their agent is looked at.
let listening = null;
async function listen(id) {
  listening?.abort();
  const controller = listening = new AbortController();
  while (id !== null && !controller.signal.aborted) {
    await inSight();
    const seen = new AbortController();
    untilHidden(seen);
    controller.signal.addEventListener("abort", () => seen.abort());
    if (controller.signal.aborted) return;
    state.heard = null; // of a turn that goes on one is told again
    try {
      for await (const event of events(pathOf(id, "live"), { signal: seen.signal })) {
        const value = JSON.parse(event.data);
        if (event.name === "turn") state.heard = hear({ id, ...said(value.asked) }, value);
        else if (event.name === "reading" && state.heard) state.heard.reading = value;
        else if (event.name === "token" && state.heard) hear(state.heard, value);
        else if (event.name === "end") { state.heard = null; mark = ""; }
        if (id !== state.chosen) continue;
        const own = state.talks.get(id);
        if (event.name === "reading" && state.heard) { showNow(own ?? state.heard); continue; }
        if (own) continue;
        if (event.name === "token" && $("talk").querySelector(".now")) { showNow(state.heard); continue; }
        if (event.name === "end") await showAgent();
        tell("talk", id);
        if (event.name === "end") tell("free", id, value.reason);
      }
    } catch (error) {
      if (controller.signal.aborted || error.status === 404) return;
    }
    seen.abort();
    if (!document.hidden) await new Promise((done) => setTimeout(done, 2000));
  }
}

// A place that was searched for ------------------------------------------------------------------

function showPlace() {
  const row = $("talk").querySelector(`[data-message="${place.message}"]`);
  if (!row) return;
  place = null;
  sticks = false;
  row.scrollIntoView({ block: "center" });
  row.classList.add("lit");
  setTimeout(() => row.classList.remove("lit"), 4000);
}

on("place", (id, number) => {
  place = { id, message: number };
  if (detail?.id === id) showPlace();
});
on("chosen", (id) => {
  mark = "";
  detail = null;
  showTalk();
  listen(id);
});
on("shown", showAgent);
on("answered", () => { mark = ""; return showAgent(); });
