// What the server said last, what is looked at, and who wants to know.

export const state = {
  snapshot: null, // what the server said last
  model: null, // the name of the model that a new chat is to have; null: nobody has said
  chosen: null, // the id of the agent that is looked at; null: a new chat
  made: null, // the id of an agent made here that the stream has not listed yet
  talks: new Map(), // agent's id, null for a new chat -> the answer that comes to this page, as `said` makes it
  heard: null, // the turn of another client that comes to the agent that is looked at: {id, reading}, and what is said in it
};

// What this page has seen of each agent's history, for the next turn to say what it follows: {digest, n}, n messages.
const seen = new Map();
export const sees = (agent) => seen.set(agent.id, { digest: agent.history_digest, n: agent.n_messages });
export const seenOf = (id) => seen.get(id);
export const isBusy = (id) => state.talks.has(id) || state.heard?.id === id;

let known = { snapshot: null, agents: new Map() }; // by id, for as long as the snapshot is the same
export function agentOf(id) {
  const { snapshot } = state;
  if (known.snapshot !== snapshot) known = { snapshot, agents: new Map(snapshot?.agents.map((agent) => [agent.id, agent])) };
  return known.agents.get(id) ?? null;
}
// The model that is looked at is the open agent's; of a new chat the one that it will have: what was chosen, or the
// server's default, which comes first.
export const modelName = () => agentOf(state.chosen)?.model ?? state.model ?? state.snapshot?.states[0]?.name ?? null;
export function model() { // where it is in memory; an adapter's agents are in its base model's cells
  const models = state.snapshot?.models ?? [];
  return models.find((one) => one.agents.includes(state.chosen)) ?? models.find((one) => one.name === modelName()) ?? null;
}

// What people call an agent: its id where somebody chose it, else its title.
export function nameOf(agent) {
  const found = typeof agent === "string" ? agentOf(agent) : agent;
  return found ? (found.is_named ? found.id : found.title || found.id) : agent;
}
// What is left to say beside that: the title, or the id by which clients know it.
export const besideName = (agent) => (nameOf(agent) === agent.id ? agent.title : agent.id);

const listeners = new Map();
export const on = (name, listener) => listeners.set(name, [...(listeners.get(name) ?? []), listener]);
export const tell = (name, ...facts) => Promise.all((listeners.get(name) ?? []).map((listener) => listener(...facts)));

// A colour per agent, by the digest of its id: the same in every browser, and none near that of what is shared.
const hues = [130, 385]; // of OKLCH; between them the other way round lies gold
function digest(text) {
  let found = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) found = Math.imul(found ^ byte, 0x01000193);
  found = Math.imul(found ^ (found >>> 16), 0x45d9f3b);
  return (found ^ (found >>> 15)) >>> 0;
}
export const isDark = () => document.documentElement.dataset.theme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
export function colour(id) {
  const found = digest(id);
  const hue = (hues[0] + (found % 1021) * ((hues[1] - hues[0]) / 1021)) % 360;
  const light = (isDark() ? [0.64, 0.72, 0.8] : [0.41, 0.49, 0.57])[(found >>> 12) % 3];
  return `oklch(${light} ${(found >>> 20) % 2 ? 0.13 : 0.075} ${hue.toFixed(1)})`;
}

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
