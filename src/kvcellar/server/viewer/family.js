// The tree of an agent's forks, drawn: walk it, compare two, prune.

import { markDifferences } from "./differences.js";
import { $, button, count, counted, el, toast } from "./dom.js";
import { NAMES, partsOf, resultsOf } from "./markdown.js";
import { call, pathOf, trouble } from "./net.js";
import { agentOf, colour, inOrder, nameOf, on, rootOf, state } from "./state.js";
import { choose, verb } from "./verbs.js";

const HEIGHT = 36; // of a row, as the style sheet has it
const marked = new Set();

function below(root) {
  const rows = inOrder(state.snapshot.agents);
  const at = rows.findIndex(({ agent }) => agent.id === root);
  let stop = at + 1;
  while (stop < rows.length && rows[stop].depth > rows[at].depth) stop += 1;
  return rows.slice(at, stop).map(({ agent, depth }) => ({ agent, depth: depth - rows[at].depth }));
}

export function openFamily() {
  if (!agentOf(state.chosen)) return;
  marked.clear();
  show();
  $("family").showModal();
  $("branch-list").querySelector('[aria-current="true"]')?.focus();
}

let mark = "";
function show() {
  const rows = below(rootOf(state.chosen));
  for (const id of marked) if (!agentOf(id)) marked.delete(id);
  const now = JSON.stringify([state.chosen, [...marked], rows.map(({ agent, depth }) => [agent.id, agent.title, depth, agent.n_tokens, agent.parted_from, agent.parted_at, agent.state])]);
  if (now === mark && $("family").open) return;
  mark = now;
  const focused = document.activeElement?.closest?.("#branch-list li")?.dataset.id;
  const longest = Math.max(1, ...rows.map(({ agent }) => agent.n_tokens));
  $("branch-list").replaceChildren(...rows.map(({ agent, depth }) => rowOf(agent, depth, longest)));
  if (focused) ($("branch-list").querySelector(`[data-id="${CSS.escape(focused)}"] .open`) ?? $("branch-list").querySelector(".open")).focus();
  $("compare-open").disabled = marked.size !== 2;
  $("family-said").textContent = counted(rows.length, "agent") + (marked.size ? `; ${[...marked].map(nameOf).join(" and ")} marked` : "");
  requestAnimationFrame(() => draw(rows, longest));
}

function rowOf(agent, depth, longest) {
  const from = agent.parted_at ?? 0;
  const bar = el("div", { class: "bar" });
  bar.style.left = `${(100 * from) / longest}%`;
  bar.style.width = `${(100 * Math.max(0, agent.n_tokens - from)) / longest}%`;
  bar.style.background = colour(agent.id);
  const open = el("button", { type: "button", class: "open", "aria-current": agent.id === state.chosen, onclick: () => { choose(agent.id); $("family").close(); }, title: agent.id }, nameOf(agent));
  open.style.setProperty("--depth", depth);
  const box = el("input", { type: "checkbox", "aria-label": `Mark ${nameOf(agent)} for comparing`, onchange: () => toggle(agent.id) });
  box.checked = marked.has(agent.id);
  return el("li", { "data-id": agent.id }, open, el("div", { class: "lane" }, bar),
    el("div", { class: "tail" }, `${count(agent.n_tokens)} tok`, box, button("Prune", () => prune(agent.id), { "aria-label": `Delete ${nameOf(agent)}` })));
}

// From each bar's beginning up to that of the relative with which it has most in common, where they part.
function draw(rows, longest) {
  $("branches").querySelector("svg")?.remove();
  const lane = $("branch-list").querySelector(".lane");
  if (!lane?.offsetWidth) return;
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("width", $("branch-list").scrollWidth);
  svg.setAttribute("height", rows.length * HEIGHT);
  svg.setAttribute("aria-hidden", "true");
  const at = new Map(rows.map(({ agent }, i) => [agent.id, i]));
  for (const [i, { agent }] of rows.entries()) {
    if (!at.has(agent.parted_from)) continue;
    const x = lane.offsetLeft + (lane.offsetWidth * agent.parted_at) / longest + 1;
    const line = document.createElementNS(ns, "line");
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: at.get(agent.parted_from) * HEIGHT + 18, y2: i * HEIGHT + 18, stroke: colour(agent.id), "stroke-width": 2 })) line.setAttribute(name, value);
    svg.append(line);
  }
  $("branches").prepend(svg);
}

function toggle(id) {
  if (marked.has(id)) marked.delete(id);
  else marked.add(id);
  if (marked.size > 2) marked.delete([...marked][0]);
  show();
}

async function prune(id) {
  await verb("delete", undefined, id);
  if ($("family").open) show();
}

$("branch-list").addEventListener("keydown", (event) => {
  const row = event.target.closest("li");
  if (!row || event.target.matches("input")) return;
  const all = [...$("branch-list").children];
  const next = all[all.indexOf(row) + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? NaN)];
  if (next) next.querySelector(".open").focus();
  else if (event.key === " ") toggle(row.dataset.id);
  else if (event.key === "Delete") prune(row.dataset.id);
  else return;
  event.preventDefault();
});
$("family-open").addEventListener("click", openFamily);
on("shown", () => { if ($("family").open) { if (agentOf(state.chosen)) show(); else $("family").close(); } });

// Side by side -----------------------------------------------------------------------------------

$("compare-open").addEventListener("click", async () => {
  try {
    const both = await Promise.all([...marked].map((id) => call("GET", pathOf(id))));
    compare(both);
    if (!$("compare").open) $("compare").showModal();
  } catch (error) {
    toast(trouble(error));
  }
});

function compare(both) {
  const same = (i) => JSON.stringify(both[0].messages[i]) === JSON.stringify(both[1].messages[i]);
  let n = 0;
  while (n < Math.min(both[0].messages.length, both[1].messages.length) && same(n)) n += 1;
  $("common").textContent = `${count(n)} ${n === 1 ? "message is" : "messages are"} the same; then, with what differs marked:`;
  for (const [i, side] of ["left", "right"].entries()) {
    const results = resultsOf(both[i].messages);
    const rest = both[i].messages.flatMap((said, at) => (at < n || results.taken.has(at) ? [] : [
      el("div", { class: `said-by ${said.role}` }, el("div", { class: "by" }, NAMES[said.role] ?? said.role), ...partsOf(said, results.found.get(at)))]));
    $(side).setAttribute("aria-label", nameOf(both[i]));
    $(side).replaceChildren(el("h3", {}, nameOf(both[i])), ...(rest.length ? rest : [el("p", { class: "dim" }, "nothing more")]));
  }
  markDifferences($("left"), $("right"));
}
