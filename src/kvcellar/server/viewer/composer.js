// What one writes: sent when the agent is free, kept until the server has it.

import { $, button, count, el, seconds, toast } from "./dom.js";
import { drafts, files, inBrowser, move, queues, samplings } from "./kept.js";
import { call, events, hasMovedOn, hear, pathOf, said, trouble } from "./net.js";
import { samplingOf } from "./sampling.js";
import { agentOf, isBusy, on, seenOf, sees, state, tell } from "./state.js";
import { create, once, refresh } from "./verbs.js";

const took = new Map(); // agent's id -> what its last turn from here took, in words
const MOST_BYTES = 1 << 20; // of one file

// The box ----------------------------------------------------------------------------------------

const prompt = $("prompt");
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}
function fill(text) {
  if (prompt.value !== text) prompt.value = text;
  grow();
}
prompt.addEventListener("input", () => { drafts.set(state.chosen, prompt.value); grow(); });
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  if (event.key === "Escape") { if (state.talks.has(state.chosen)) stop(); else prompt.blur(); }
});
$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
export const stop = () => state.talks.get(state.chosen)?.controller.abort();
$("stop").addEventListener("click", stop);

function show() {
  const isTalking = state.talks.has(state.chosen);
  $("stop").hidden = !isTalking;
  $("send").textContent = isTalking ? "Queue" : "Send";
  $("took").textContent = took.get(state.chosen) ?? "";
  showQueue();
  showFiles();
}
on("chosen", (id) => { fill(drafts.get(id)); show(); });
on("talk", show);

// What is asked ----------------------------------------------------------------------------------

function whole() {
  const parts = files.get(state.chosen).map(({ name, text }) => `File ${name}:\n\n${fenced(text)}`);
  return [prompt.value.trim(), ...parts].filter(Boolean).join("\n\n");
}
function fenced(text) { // in more marks than the text itself has in a row
  const most = Math.max(2, ...[...text.matchAll(/`+/g)].map((found) => found[0].length));
  const fence = "`".repeat(most + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
// What was typed on while it was sent stays; what it began with is with the server.
function clear(id, sent) {
  const typed = drafts.get(id);
  if (typed.startsWith(sent.typed)) drafts.set(id, typed.slice(sent.typed.length).trimStart());
  files.set(id, files.get(id).filter(({ name, text }) => !sent.files.some((one) => one.name === name && one.text === text)));
  if (state.chosen === id) { fill(drafts.get(id)); showFiles(); }
}

const ask = () => once("ask", askNow);
async function askNow() {
  const text = whole();
  if (!text || state.talks.get(state.chosen)?.untaken === text) return; // the same is on its way
  const sent = { typed: prompt.value, files: files.get(state.chosen) };
  let id = state.chosen;
  drafts.set(id, prompt.value);
  if (id === null || (!agentOf(id) && state.made !== id)) {
    try {
      const from = id;
      id = (await create(id === null ? {} : { id }, (made) => { if (from !== made) move(from, made); })).id;
    } catch (error) {
      toast(trouble(error));
      return;
    }
  }
  if (isBusy(id) || queues.get(id).length) {
    queues.set(id, [...queues.get(id), text]);
    clear(id, sent);
    show();
    next(id);
    return;
  }
  send(id, text, () => clear(id, sent));
}

// `taken` is called when the server has the text; until then whoever has it keeps it.
async function send(id, text, taken) {
  const body = { text, ...samplingOf(id) };
  const isOk = await talk(id, text, body, taken);
  if (isOk) next(id);
}

async function talk(id, asked, body, taken = () => {}) {
  const now = { controller: new AbortController(), ...said(asked), untaken: asked };
  state.talks.set(id, now);
  took.delete(id);
  tell("talk", id);
  let isTaken = false;
  const take = () => { if (!isTaken) { isTaken = true; now.untaken = null; taken(); } };
  let hasEnded = false;
  try {
    if (!seenOf(id)) sees(await call("GET", pathOf(id)));
    const { digest, n } = seenOf(id);
    for await (const event of events(pathOf(id, "generate"), { body: { ...body, follows: digest, stream: true }, signal: now.controller.signal })) {
      const value = JSON.parse(event.data);
      if (event.name === "token") { take(); hear(now, value); tell("piece", id); }
      if (event.name === "error") throw new Error(value.error.message);
      if (event.name === "end") {
        hasEnded = true;
        take();
        sees({ id, history_digest: value.history_digest, n_messages: n + (asked ? 2 : 0) });
        took.set(id, inWords(value.usage)); tell("talked", id, value.text);
      }
    }
    if (!hasEnded) throw new Error("the answer was cut off");
  } catch (error) {
    if (hasMovedOn(error)) await movedOn(id, asked, error, take);
    else if (error.name !== "AbortError") {
      toast(trouble(error));
      if (isTaken && asked) { // how much of it the server has is not known
        if (drafts.get(id)) queues.set(id, [asked, ...queues.get(id)]); // and something else is typed by now
        else drafts.set(id, asked);
        if (state.chosen === id) fill(drafts.get(id));
      }
    }
  }
  state.talks.delete(id);
  if (hasEnded && state.heard?.id === id) state.heard = null; // it was this one
  tell("talk", id);
  await tell("answered", id);
  refresh();
  return hasEnded;
}

// Another tab, or another client, was first: what it did is shown, and what was to be sent stays where it is,
// unless it is the very text that the other has sent, which then has left the queue of both.
async function movedOn(id, asked, error, take) {
  const before = seenOf(id)?.n ?? 0;
  const now = await call("GET", pathOf(id)).catch(() => null);
  const isSent = error.said.asked === asked || now?.messages.slice(before).some((one) => one.role === "user" && one.content === asked);
  if (now) sees(now);
  if (asked && isSent && queues.get(id).includes(asked)) take();
  else toast(trouble(error));
}

function inWords(usage) {
  const first = usage.time_to_first_token_s;
  return `reused ${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)}`
    + (usage.restored_tokens ? `, ${count(usage.restored_tokens)} restored` : "")
    + (first === null ? "" : `; first word after ${seconds(first)}`);
}

on("send", (id, text) => {
  queues.set(id, [...queues.get(id), text]);
  show();
  next(id);
});
on("free", (id, reason) => { if (reason === "stop" || reason === "length") next(id); });
on("go-on", (id) => { if (!isBusy(id)) talk(id, "", { go_on: true, ...samplingOf(id) }); });

// What waits -------------------------------------------------------------------------------------

// The first of the queue leaves it when the server has it. Other tabs may send it too: the server takes one of them.
function next(id) {
  const [first] = queues.get(id);
  if (first === undefined || isBusy(id)) return;
  send(id, first, () => { // which may have been moved meanwhile, or taken back
    const at = queues.get(id).indexOf(first);
    if (at >= 0) take(id, at);
  });
}
addEventListener("storage", ({ key }) => { if (key === `kvcellar-queue:${state.chosen}`) show(); });

function showQueue() {
  const id = state.chosen;
  const waiting = queues.get(id);
  $("queue").hidden = !waiting.length;
  $("queue").replaceChildren(...waiting.map((text, i) => el("li", {}, el("span", { title: text }, text),
    i || isBusy(id) ? null : button("Send now", () => next(id)),
    button("Edit", () => { take(id, i); drafts.set(id, [text, prompt.value].filter(Boolean).join("\n")); fill(drafts.get(id)); prompt.focus(); }, { "aria-label": "Take it back and edit it" }),
    button("✕", () => { take(id, i); toast("it is not sent", () => { queues.set(id, queues.get(id).toSpliced(i, 0, text)); show(); }); }, { "aria-label": "Do not send this" }))));
}
function take(id, i) {
  queues.set(id, queues.get(id).filter((_, at) => at !== i));
  show();
}

// Files ------------------------------------------------------------------------------------------

async function add(list) {
  const id = state.chosen;
  for (const file of list) {
    if (file.size > MOST_BYTES) { toast(`${file.name} has ${count(file.size)} bytes; a text file of up to 1 MiB can go with a message`); continue; }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("it has zeros");
      if (!files.set(id, [...files.get(id), { name: file.name, text }])) toast(`${file.name} is too large for this browser to keep over a reload; it goes with the message all the same`);
    } catch {
      toast(`${file.name} is no text`);
    }
  }
  showFiles();
  prompt.focus();
}
function showFiles() {
  const id = state.chosen;
  const there = files.get(id);
  $("files").hidden = !there.length;
  $("files").replaceChildren(...there.map(({ name, text }, i) => el("li", {}, el("span", {}, `${name}, ${count(text.length)} characters`),
    button("✕", () => { files.set(id, there.filter((_, at) => at !== i)); showFiles(); }, { "aria-label": `Leave ${name} out` }))));
}
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { add([...$("file").files]); $("file").value = ""; });
for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, (event) => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  $("ask").classList.add("over");
});
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("ask").classList.remove("over"); });
document.addEventListener("drop", (event) => {
  $("ask").classList.remove("over");
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  add([...event.dataTransfer.files]);
});
prompt.addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  add([...event.clipboardData.files]);
});

// A new agent ------------------------------------------------------------------------------------

export function askNew() {
  const kept = inBrowser.get("make", {});
  $("make-name").value = kept.name ?? "";
  $("make-system").value = kept.system ?? "";
  const names = state.snapshot?.states.map((one) => one.name) ?? [];
  $("make-model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (state.model) $("make-model").value = state.model;
  $("make-trouble").textContent = "";
  $("make").showModal();
}
const keepMake = () => inBrowser.set("make", { name: $("make-name").value, system: $("make-system").value });
$("make-name").addEventListener("input", keepMake);
$("make-system").addEventListener("input", keepMake);
$("make-form").addEventListener("submit", (event) => {
  event.preventDefault();
  once("make", make);
});
async function make() {
  const body = { model: $("make-model").value || undefined, title: $("make-name").value, system: $("make-system").value || undefined };
  try {
    await create(body);
    inBrowser.set("make", null);
    $("make").close();
    prompt.focus();
  } catch (error) {
    $("make-trouble").textContent = trouble(error);
  }
}
$("new-more").addEventListener("click", askNew);

// A chat without a name becomes an agent with its first message.
export function newChat() {
  tell("choose", null);
  prompt.focus();
}
$("new").addEventListener("click", newChat);
