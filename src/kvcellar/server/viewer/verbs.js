// What is done to agents: each is one call, says what it did, and can be undone where something went.

import { $, counted, toast } from "./dom.js";
import { inTab } from "./kept.js";
import { call, download, pathOf, trouble } from "./net.js";
import { agentOf, nameOf, seenOf, sees, state, tell } from "./state.js";

// The address says who is open, so a link opens an agent and a reload stays with it.
export function choose(id) {
  if (id !== state.chosen) {
    state.chosen = id;
    history.replaceState(null, "", id === null ? location.pathname : `#${encodeURIComponent(id)}`);
    tell("chosen", id);
  }
  if (state.snapshot) tell("shown");
}

// An agent that was just made is looked at. Others may delete it before the stream lists it: so not for ever.
export function lookAtNew(id) {
  choose(id);
  state.made = id;
  setTimeout(() => { if (state.made === id) state.made = null; }, 10000);
}

// What was done is done, also where the server then has no answer; the stream brings the rest.
export const refresh = () => call("GET", "/v1/cache").then((snapshot) => tell("snapshot", snapshot), () => {});

// Whoever asks twice, by a double click, is answered once.
const busy = new Set();
export async function once(name, act) {
  if (busy.has(name)) return undefined;
  busy.add(name);
  try {
    return await act();
  } finally {
    busy.delete(name);
  }
}

// `made` is called before anything is shown of it.
export async function create(body = {}, made = () => {}) {
  const agent = await call("POST", "/v1/agents", { ...(state.model ? { model: state.model } : {}), ...body });
  sees(agent);
  made(agent.id);
  lookAtNew(agent.id);
  await refresh();
  return agent;
}

export async function fork(id, body = {}) {
  const done = await call("POST", pathOf(id, "fork"), body);
  sees(done);
  lookAtNew(done.id);
  toast(done.parent_position
    ? `a fork shares ${counted(done.parent_position, "token")} with ${quoted(id)}; nothing was copied`
    : `${quoted(id)} stays as it is; what comes now stands beside it`);
  await refresh();
  return done;
}

const quoted = (id) => `“${nameOf(id)}”`;

const DO = {
  fork,
  async rename(id, title) { await call("POST", pathOf(id, "rename"), { title }); },
  async rewind(id, body = {}) {
    const done = await call("POST", pathOf(id, "rewind"), { ...body, follows: seenOf(id)?.digest });
    sees(done);
    dropped(id, `${quoted(id)} went back to ${counted(done.n_tokens, "token")}`);
  },
  async keep(id) {
    const done = await call("POST", pathOf(id, "keep"));
    if (done.deleted.length) dropped(id, `deleted ${done.deleted.map(quoted).join(", ")}`);
    else toast("it has no siblings");
  },
  async delete(id) {
    const said = `deleted ${quoted(id)}`;
    await call("DELETE", pathOf(id));
    state.made = null;
    dropped(id, said);
  },
  async pause(id) { toast((await call("POST", pathOf(id, "pause"))).state === "paused" ? `all of ${quoted(id)} is on disk` : `${quoted(id)} goes on`); },
  async resume(id) {
    const done = await call("POST", pathOf(id, "resume"));
    toast(`${counted(done.restored_tokens, "token")} restored in ${done.restore_s.toFixed(3)} s`);
  },
  async export(id, { format }) { await download(`${pathOf(id, "export")}?format=${format}`, `${id}.${{ markdown: "md", json: "json" }[format] ?? format}`); },
};

export async function verb(name, body, id = state.chosen) {
  if (!id) return;
  await once(`${name} ${id}`, async () => {
    try {
      await DO[name](id, body);
      await refresh();
    } catch (error) {
      toast(trouble(error));
    }
  });
}

// What rewind, keep and delete have dropped can be brought back, the last first; also after a reload.
let undoable = inTab.get("undo", []);
function keepUndoable() {
  inTab.set("undo", undoable.slice(-50));
  $("undo").hidden = !undoable.length;
  $("undo").title = undoable.length ? `Bring back what was dropped of ${quoted(undoable.at(-1))} (u)` : "";
}
function dropped(id, said) {
  undoable.push(id);
  keepUndoable();
  toast(`${said}; Undo brings it back`, undo);
}
export const undo = () => once("undo", undoLast);
async function undoLast() {
  const id = undoable.at(-1);
  if (id === undefined) return;
  try {
    const done = await call("POST", pathOf(id, "undo"));
    undoable.pop();
    done.restored.forEach(sees);
    toast(`${done.restored.map((agent) => `“${nameOf(agent)}”`).join(", ")} ${done.restored.length > 1 ? "are" : "is"} as before`);
    if (done.restored.length) lookAtNew(done.restored.at(-1).id);
    await refresh();
  } catch (error) {
    if (error.status === 404 || error.status === 409) undoable.pop();
    toast(trouble(error));
  }
  keepUndoable();
}
keepUndoable();
$("undo").addEventListener("click", undo);
$("verbs").addEventListener("click", (event) => {
  if (!event.target.dataset.verb) return;
  event.target.closest("details")?.removeAttribute("open");
  if (event.target.dataset.verb === "rename") askTitle();
  else verb(event.target.dataset.verb, event.target.dataset.format && { format: event.target.dataset.format });
});

// Another title ------------------------------------------------------------------------------------

let renamed = null; // whose title is asked for
function askTitle() {
  renamed = state.chosen;
  $("title-value").value = nameOf(renamed);
  $("title").showModal();
  $("title-value").select();
}
$("title-form").addEventListener("submit", (event) => {
  if (event.submitter?.value === "rename") verb("rename", $("title-value").value, renamed);
});
