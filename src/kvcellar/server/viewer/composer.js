// What one writes: sent when the agent is free, kept until the server has it.

import { $, button, count, el, seconds, toast } from "./dom.js";
import { drafts, files, inBrowser, move, queues, samplings, sent } from "./kept.js";
import { call, events, hasMovedOn, hear, pathOf, said, trouble } from "./net.js";
import { MOST_PICTURE_BYTES, forgetPictures, isPicture, keepPicture, pictureOf, thumbnail } from "./pictures.js";
import { samplingOf } from "./sampling.js";
import { agentOf, isBusy, model, modelName, on, seenOf, sees, state, tell } from "./state.js";
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
  if (event.key === "Escape") { if (isBusy(state.chosen)) stop(); else prompt.blur(); }
});
$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
export async function stop() {
  const id = state.chosen;
  if (id === null || !isBusy(id)) return;
  try {
    const { stopped } = await call("POST", pathOf(id, "stop"));
    if (!stopped && state.talks.has(id)) setTimeout(() => { if (state.chosen === id) stop(); }, 200); // it is on its way still
  } catch (error) {
    toast(trouble(error));
  }
}
$("stop").addEventListener("click", stop);

function show() {
  const isTalking = isBusy(state.chosen);
  $("stop").hidden = !isTalking;
  $("send").textContent = isTalking ? "Queue" : "Send";
  $("took").textContent = took.get(state.chosen) ?? "";
  showQueue();
  showFiles();
}
on("chosen", (id) => { fill(drafts.get(id)); show(); });
on("talk", show);

// What is asked ----------------------------------------------------------------------------------

function whole(typed, added) {
  return [typed.trim(), ...added.filter(({ text }) => text !== undefined).map(({ name, text }) => `File ${name}:\n\n${fenced(text)}`)].filter(Boolean).join("\n\n");
}
function fenced(text) { // in more marks than the text itself has in a row
  const most = Math.max(2, ...[...text.matchAll(/`+/g)].map((found) => found[0].length));
  const fence = "`".repeat(most + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

// What waits is a text, or one with pictures.
const entryOf = (text, pictures) => (pictures.length ? { text, pictures } : text);
const ofEntry = (entry) => (typeof entry === "string" ? { text: entry, pictures: [] } : entry);

// What is written is a message from now on: behind what waits, or on its way. The box is free.
function ask() {
  const id = state.chosen;
  const typed = prompt.value, added = files.get(id);
  const text = whole(typed, added), pictures = added.filter(({ key, url }) => key || url);
  if (!text && !pictures.length) return;
  drafts.set(id, "");
  files.set(id, []);
  fill("");
  if (isBusy(id) || queues.get(id).length) {
    queues.set(id, [...queues.get(id), entryOf(text, pictures)]);
    show();
    next(id);
  } else {
    send(id, { text, pictures, typed, files: added });
  }
}

// Until the server has it in a history this tab keeps it, also over a reload, and gives it back where it was refused.
function send(id, message) {
  sent.set(id, { ...message, n: seenOf(id)?.n ?? 0 });
  return talk(id, message.text, { text: message.text }, message.pictures);
}
function giveBack(id) {
  const message = sent.get(id);
  sent.set(id, null);
  if (!message) return;
  if (message.typed === undefined) { // it has waited before
    queues.set(id, [entryOf(message.text, message.pictures ?? []), ...queues.get(id)]);
  } else {
    drafts.set(id, [message.typed, drafts.get(id)].filter(Boolean).join("\n"));
    files.set(id, [...message.files, ...files.get(id)]);
    if (state.chosen === id) fill(drafts.get(id));
  }
  if (state.chosen === id) show();
}

// The turn goes on in the server whatever becomes of this page; only Stop ends it.
async function talk(id, asked, what, pictures = []) {
  const now = said(asked, pictures);
  state.talks.set(id, now);
  took.delete(id);
  tell("talk", id);
  let reason = null, isIn = false;
  try {
    if (id === null || (!agentOf(id) && state.made !== id)) id = await begin(id, now);
    if (!seenOf(id)) sees(await call("GET", pathOf(id)));
    const { digest, n } = seenOf(id);
    if (asked !== null && sent.get(id)) sent.set(id, { ...sent.get(id), n });
    const images = await Promise.all(pictures.map(pictureOf));
    if (images.includes(null)) throw Object.assign(new Error("a picture is not here any more; choose it again"), { status: 0 });
    const body = { ...what, ...(images.length ? { images } : {}), ...samplingOf(id), follows: digest, background: true, stream: true };
    for await (const event of events(pathOf(id, "generate"), { body })) {
      const value = JSON.parse(event.data);
      if (event.name === "token") { hear(now, value); tell("piece", id); }
      if (event.name === "error") throw new Error(value.error.message);
      if (event.name === "end") {
        reason = value.finish_reason;
        isIn = asked === null || value.history_digest !== digest;
        if (isIn) sees({ id, history_digest: value.history_digest, n_messages: n + (asked !== null ? 2 : 0) });
        else giveBack(id); // stopped before its first word
        sent.set(id, null);
        took.set(id, inWords(value.usage));
        tell("talked", id, value.text);
      }
    }
    if (reason === null) throw new TypeError("the connection was cut");
  } catch (error) {
    await failed(id, asked, error);
  }
  await tell("answered", id); // it stands in the history before it goes from where it came
  state.talks.delete(id);
  if (isIn) forgetPictures(pictures); // the server has them
  if (reason !== null && state.heard?.id === id) state.heard = null; // it was this one
  tell("talk", id);
  refresh();
  goOn(id, reason);
}

// A chat without a name becomes an agent with its first message; an agent that others delete meanwhile, one anew.
async function begin(from, now) {
  const { id } = await create(from === null ? {} : { id: from }, (made) => {
    if (from === made) return;
    move(from, made);
    state.talks.delete(from);
    state.talks.set(made, now);
  });
  return id;
}

// What has waited is sent where an answer has ended by itself.
function goOn(id, reason) { if (reason === "stop" || reason === "length") next(id); }

async function failed(id, asked, error) {
  const is = asked !== null ? await whereIs(id, asked, error.said) : "nowhere";
  if (hasMovedOn(error) && is !== "nowhere" && sent.get(id)?.typed === undefined) {
    sent.set(id, null); // another tab has sent it, out of the queue of both
    return;
  }
  const isKnown = error.status === undefined && is !== "nowhere"; // the server has it, or cannot be asked yet
  if (!isKnown) giveBack(id);
  if (!isKnown || !(error instanceof TypeError)) toast(trouble(error));
}

// Where a message is by now: "history", "now" (it is being answered), "nowhere"; null where the server cannot be asked.
async function whereIs(id, asked, refusal = {}) {
  if (refusal.asked === asked) return "now";
  if (id === null) return "nowhere";
  try {
    const agent = await call("GET", pathOf(id));
    const n = sent.get(id)?.n ?? agent.messages.length;
    sees(agent);
    if (agent.under_way?.asked === asked) return "now";
    return agent.messages.slice(n).some((one) => one.role === "user" && one.content === asked) ? "history" : "nowhere";
  } catch (error) {
    return error.status === 404 ? "nowhere" : null;
  }
}

// What was on its way when the page went, or the server did, is found out about when both are back.
const finding = new Set();
async function findSent(id) {
  const text = sent.get(id)?.text;
  if (text === undefined || isBusy(id) || finding.has(id)) return;
  finding.add(id);
  let is = await whereIs(id, text);
  if (is === "nowhere") { // a page that was loaded again at once is quicker than what it has sent
    await new Promise((done) => setTimeout(done, 1000));
    is = await whereIs(id, text);
  }
  finding.delete(id);
  if (isBusy(id) || sent.get(id)?.text !== text) return;
  if (is === "history") sent.set(id, null);
  if (is === "nowhere") {
    giveBack(id);
    toast("your last message had not arrived; here it is again");
  }
  tell("talk", id);
}
on("shown", () => { findSent(state.chosen); });

function inWords(usage) {
  const first = usage.time_to_first_token_s;
  return `reused ${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)}`
    + (usage.restored_tokens ? `, ${count(usage.restored_tokens)} restored` : "")
    + (first === null ? "" : `; first word after ${seconds(first)}`);
}

on("send", (id, text, pictures = []) => {
  queues.set(id, [...queues.get(id), entryOf(text, pictures)]);
  show();
  next(id);
});
on("free", goOn);
on("go-on", (id) => { if (!isBusy(id)) talk(id, null, { go_on: true }); });

// What waits -------------------------------------------------------------------------------------

// Other tabs may send the first of the queue too: the server takes one of them.
function next(id) {
  const [entry] = queues.get(id);
  if (entry === undefined || isBusy(id)) return;
  queues.set(id, queues.get(id).slice(1));
  send(id, ofEntry(entry));
}
addEventListener("storage", ({ key }) => { if (key === `kvcellar-queue:${state.chosen}`) show(); });

function showQueue() {
  const id = state.chosen;
  const waiting = queues.get(id);
  $("queue").hidden = !waiting.length;
  $("queue").replaceChildren(...waiting.map((entry, i) => {
    const { text, pictures } = ofEntry(entry);
    return el("li", {}, ...pictures.map(thumbnail), el("span", { title: text }, text),
      i || isBusy(id) ? null : button("Send now", () => next(id)),
      button("Edit", () => {
        take(id, i);
        drafts.set(id, [text, prompt.value].filter(Boolean).join("\n"));
        files.set(id, [...pictures, ...files.get(id)]);
        fill(drafts.get(id));
        showFiles();
        prompt.focus();
      }, { "aria-label": "Take it back and edit it" }),
      button("✕", () => { take(id, i); toast("it is not sent", () => { queues.set(id, queues.get(id).toSpliced(i, 0, entry)); show(); }); }, { "aria-label": "Do not send this" }));
  }));
}
function take(id, i) {
  queues.set(id, queues.get(id).filter((_, at) => at !== i));
  show();
}

// Files ------------------------------------------------------------------------------------------

async function add(list) {
  const id = state.chosen;
  for (const file of list) {
    if (file.type.startsWith("image/")) { await addPicture(id, file); continue; }
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
async function addPicture(id, file) {
  if (!isPicture(file)) { toast(`${file.name} is no PNG, JPEG, WebP or GIF`); return; }
  if (file.size > MOST_PICTURE_BYTES) { toast(`${file.name} has ${count(file.size)} bytes; a picture of up to 16 MiB can go with a message`); return; }
  if (model()?.reads_pictures === false) { toast(`${modelName()} reads text alone, so no picture can go with a message to it`); return; }
  try {
    const key = await keepPicture(file);
    files.set(id, [...files.get(id), { name: file.name || "picture", key }]);
  } catch {
    toast(`${file.name} cannot be read`);
  }
}
function showFiles() {
  const id = state.chosen;
  const there = files.get(id);
  $("files").hidden = !there.length;
  $("files").replaceChildren(...there.map((one, i) => {
    const { name, text, key, url } = one;
    const isText = !(key || url);
    const leave = () => { files.set(id, there.filter((_, at) => at !== i)); if (!isText) toast(`${name} was left out`, () => { files.set(id, files.get(id).toSpliced(i, 0, one)); showFiles(); }); showFiles(); };
    return el("li", {}, isText ? null : thumbnail(one), el("span", {}, isText ? `${name}, ${count(text.length)} characters` : name),
      button("✕", leave, { "aria-label": `Leave ${name} out` }));
  }));
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
  if (modelName()) $("make-model").value = modelName();
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
