// Talking with the server: JSON, and server-sent events by fetch, which unlike EventSource can bring a key.

import { $ } from "./dom.js";
import { inTab } from "./kept.js";

const headers = (more = {}) => {
  const key = inTab.get("key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
};

export const pathOf = (id, verb = "") => `/v1/agents/${encodeURIComponent(id)}${verb && `/${verb}`}`;
export const hasMovedOn = (error) => error.said?.code === "history_moved_on";
export function trouble(error) {
  if (hasMovedOn(error)) return "somebody else has talked with it meanwhile: see what came, then send yours";
  return error instanceof TypeError ? "the server does not answer" : error.message;
}

async function refused(response) {
  if (response.status === 401) askForKey();
  const value = await response.json().catch(() => ({}));
  return Object.assign(new Error(value.error ? value.error.message : response.statusText), { status: response.status, said: value.error ?? {} });
}

const asJson = (method, body, more = {}) => ({
  method, headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
  body: body === undefined ? undefined : JSON.stringify(body), ...more,
});

export async function call(method, path, body) {
  const response = await fetch(path, asJson(method, body));
  if (!response.ok) throw await refused(response);
  return response.json();
}

export async function fileOf(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refused(response);
  return response.blob();
}

export async function download(path, name) {
  const file = await fileOf(path);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// `heard` is told of each piece that comes, pings too. `body` makes it a POST.
export async function* events(path, { signal, body, heard = () => {} } = {}) {
  const response = await fetch(path, asJson(body === undefined ? "GET" : "POST", body, { signal }));
  heard();
  if (!response.ok) throw await refused(response);
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

function askForKey() {
  if (!$("key").open) $("key").showModal();
}
$("key-form").addEventListener("submit", () => {
  inTab.set("key", $("key-value").value);
  location.reload();
});

// An answer as it comes: text, thought and calls, each in pieces.
export const said = (asked, pictures = []) => ({ asked, pictures, text: "", thought: "", calls: [] });
export function hear(talk, { text, reasoning_content: thought = "", tool_calls: calls = [] }) {
  talk.text += text;
  talk.thought += thought;
  for (const { index, function: piece } of calls) {
    const one = talk.calls[index] ??= { function: { name: piece.name, arguments: "" } };
    one.function.arguments += piece.arguments;
  }
  return talk;
}
