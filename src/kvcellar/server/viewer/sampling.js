// How answers are sampled: what is set here, and what goes for the rest.

import { $, el } from "./dom.js";
import { samplings } from "./kept.js";
import { SETTINGS } from "./sampler-settings.js";
import { modelName, state } from "./state.js";

const FIELDS = [
  ["max_tokens", "Tokens at most", { min: 1, step: 1 }], ...SETTINGS, ["seed", "Seed", { min: 0, step: 1 }],
];
const WHOSE = { model: "by the model", server: "by the server" };
const NOTHING = { top_k: "all tokens", seed: "another each time" };
const inputOf = (name) => $(`set-${name}`);

$("settings-fields").append(...FIELDS.map(([name, label, more]) => el("label", {}, label,
  el("input", { type: "number", name, id: `set-${name}`, "aria-describedby": `goes-${name}`, oninput: showWhatGoes, ...more }),
  el("small", { id: `goes-${name}` }))));

// Nothing was ever set for an agent: then what is set for new chats goes for it.
export const samplingOf = (id) => samplings.get(id) ?? samplings.get("") ?? {};

// Beside each setting what goes where it is left empty, and whose wish that is.
function showWhatGoes() {
  const name = modelName();
  const goes = state.snapshot?.models.find((one) => one.name === name)?.sampling;
  for (const [field] of FIELDS) {
    const found = goes?.[field];
    const value = found?.value || found?.value === 0 && !NOTHING[field] ? found.value : NOTHING[field] ?? "";
    const whose = found ? `${value}, ${WHOSE[found.by]}` : "known when the model is in memory";
    inputOf(field).placeholder = found ? value : "";
    $(`goes-${field}`).textContent = inputOf(field).value === "" ? whose : `yours; else ${whose}`;
  }
}

export function askSampling() {
  const values = samplingOf(state.chosen);
  for (const [name] of FIELDS) inputOf(name).value = values[name] ?? "";
  showWhatGoes();
  $("settings").showModal();
}
$("settings-open").addEventListener("click", askSampling);
$("settings-clear").addEventListener("click", () => {
  for (const [name] of FIELDS) inputOf(name).value = "";
  showWhatGoes();
});
$("settings").addEventListener("close", () => {
  const values = {};
  for (const [name] of FIELDS) {
    const input = inputOf(name);
    if (input.value !== "" && input.validity.valid) values[name] = Number(input.value);
  }
  samplings.set(state.chosen, values);
  if (samplings.get("") === null) samplings.set("", values); // the next new chat begins so
});
