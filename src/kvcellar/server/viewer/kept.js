// What this browser keeps: what is typed and not sent, what waits to be sent, settings. A full or
// forbidden storage loses nothing that is on the page.

const refused = new Map(); // storage and key -> what there was no room for: it is kept until a reload
function read(storage, key, otherwise) {
  try {
    return (refused.has(storage + key) ? refused.get(storage + key) : JSON.parse(window[storage].getItem(`kvcellar-${key}`))) ?? otherwise;
  } catch {
    return otherwise;
  }
}
function write(storage, key, value) {
  const isNothing = value === null || value === "" || (Array.isArray(value) && !value.length);
  try {
    if (isNothing) window[storage].removeItem(`kvcellar-${key}`);
    else window[storage].setItem(`kvcellar-${key}`, JSON.stringify(value));
    refused.delete(storage + key);
    return true;
  } catch {
    refused.set(storage + key, isNothing ? null : value);
    return false;
  }
}

const of = (name, otherwise, storage = "localStorage") => ({
  get: (id) => read(storage, `${name}:${id ?? ""}`, otherwise),
  set: (id, value) => write(storage, `${name}:${id ?? ""}`, value),
});

export const drafts = of("draft", ""); // agent -> what is typed
export const queues = of("queue", []); // agent -> what is to be sent when the answer has ended: texts, or {text, pictures}
export const files = of("files", []); // agent -> [{name, text} or, of a picture, {name, key}] that go with what is typed
export const sent = of("sent", null, "sessionStorage"); // agent -> {text, pictures, typed, files, n}: on its way from this tab, behind n messages
export const samplings = of("sampling", null); // agent -> settings; "" is for whoever has none

export const inTab = { get: (key, otherwise = null) => read("sessionStorage", key, otherwise), set: (key, value) => write("sessionStorage", key, value) };
export const inBrowser = { get: (key, otherwise = null) => read("localStorage", key, otherwise), set: (key, value) => write("localStorage", key, value) };

// What was kept for one agent goes to another, to what is there: for what is typed before there is one, or
// while it is deleted elsewhere.
export function move(from, to) {
  drafts.set(to, [drafts.get(to), drafts.get(from)].filter(Boolean).join("\n"));
  for (const kept of [queues, files]) kept.set(to, [...kept.get(to), ...kept.get(from)]);
  if (sent.get(from)) sent.set(to, sent.get(from));
  for (const kept of [drafts, queues, files, sent]) kept.set(from, null);
}
