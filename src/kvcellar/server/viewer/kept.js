// What this browser keeps: what is typed and not sent, what waits to be sent, settings. A full or
// forbidden storage loses nothing that is on the page.

function read(storage, key, otherwise) {
  try {
    return JSON.parse(storage.getItem(`kvcellar-${key}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
function write(storage, key, value) {
  try {
    if (value === null || value === "" || (Array.isArray(value) && !value.length)) storage.removeItem(`kvcellar-${key}`);
    else storage.setItem(`kvcellar-${key}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const of = (name, otherwise) => ({
  get: (id) => read(localStorage, `${name}:${id ?? ""}`, otherwise),
  set: (id, value) => write(localStorage, `${name}:${id ?? ""}`, value),
});

export const drafts = of("draft", ""); // agent -> what is typed
export const queues = of("queue", []); // agent -> what is to be sent when the answer has ended
export const files = of("files", []); // agent -> [{name, text}] that go with what is typed
export const samplings = of("sampling", {}); // agent -> settings; "" is for whoever has none

export const inTab = { get: (key, otherwise = null) => read(sessionStorage, key, otherwise), set: (key, value) => write(sessionStorage, key, value) };
export const inBrowser = { get: (key, otherwise = null) => read(localStorage, key, otherwise), set: (key, value) => write(localStorage, key, value) };

// What was kept for one agent goes to another: for what is typed before there is one.
export function move(from, to) {
  for (const kept of [drafts, queues, files]) {
    kept.set(to, kept.get(from));
    kept.set(from, null);
  }
}
