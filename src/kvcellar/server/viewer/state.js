// What the server said last, what is looked at, and who wants to know.

export const state = {
  snapshot: null, // what the server said last
  model: null, // the name of the model that is looked at
  chosen: null, // the id of the agent that is looked at; null: a new chat
  made: null, // the id of an agent made here that the stream has not listed yet
  talks: new Map(), // agent's id -> the answer that comes to this page: {controller, asked, text}
  heard: null, // the turn of another client that comes to the agent that is looked at: {id, asked, text}
};

// What this page has seen of each agent's history, for the next turn to say what it follows: {digest, n}, n messages.
const seen = new Map();
export const sees = (agent) => seen.set(agent.id, { digest: agent.history_digest, n: agent.n_messages });
export const seenOf = (id) => seen.get(id);
export const isBusy = (id) => state.talks.has(id) || state.heard?.id === id;

export const model = () => state.snapshot?.models.find((one) => one.name === state.model) ?? null;
export const agentOf = (id) => state.snapshot?.agents.find((agent) => agent.id === id) ?? null;

const listeners = new Map();
export const on = (name, listener) => listeners.set(name, [...(listeners.get(name) ?? []), listener]);
export const tell = (name, ...facts) => (listeners.get(name) ?? []).forEach((listener) => listener(...facts));

// A colour per agent: far apart for neighbours, the same for as long as it lives.
const hues = new Map();
export function hue(id) {
  if (!hues.has(id)) hues.set(id, (200 + hues.size * 137.5) % 360);
  return hues.get(id);
}
export const isDark = () => document.documentElement.dataset.theme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
export const colour = (id, alpha = 1) => `hsl(${hue(id)} ${isDark() ? "58% 60%" : "52% 48%"} / ${alpha})`;

// Agents with their forks below them, the latest first: [{agent, depth}].
export function inOrder(agents) {
  const known = new Set(agents.map((agent) => agent.id));
  const children = new Map();
  for (const agent of agents) {
    const parent = known.has(agent.parent) ? agent.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(agent);
  }
  const rows = [];
  const seen = new Set();
  const visit = (agent, depth) => {
    if (seen.has(agent.id)) return;
    seen.add(agent.id);
    rows.push({ agent, depth });
    for (const child of (children.get(agent.id) ?? []).sort((a, b) => a.created_s - b.created_s)) visit(child, depth + 1);
  };
  for (const agent of (children.get(null) ?? []).sort((a, b) => b.created_s - a.created_s)) visit(agent, 0);
  for (const agent of agents) visit(agent, 0); // of a circle, which names used again can make
  return rows;
}

// The first ancestor that is still there.
export function rootOf(id) {
  const seen = new Set();
  let agent = agentOf(id);
  while (agent && agentOf(agent.parent) && !seen.has(agent.id)) {
    seen.add(agent.id);
    agent = agentOf(agent.parent);
  }
  return agent?.id ?? id;
}
