// Text of models as Markdown. It is hostile until proven otherwise: what the renderer makes is cleaned, no
// picture is fetched, no style, form or id is let through, and links open elsewhere without a referrer.

import { marked } from "./vendor/marked.js";
import highlight from "./vendor/highlight.js";
import { button, copy, count, el } from "./dom.js";

const MOST_RENDERED = 100000; // characters of one message
const MOST_MARKS = 2000; // in one paragraph
const MOST_HIGHLIGHTED = 20000; // characters of one piece of code

const CLEAN = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align"], // no addresses: else the line above takes them away
  RETURN_DOM_FRAGMENT: true,
};

// Formulas, which Markdown would take for emphasis: $x$ and \(x\) in a line, $$x$$ and \[x\] by themselves.
// A dollar before a space, behind one, or before a digit is money.
const DISPLAY = String.raw`\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\]`;
const IN_LINE = String.raw`\\\(([\s\S]{1,2000}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n]){0,2000}?(?:\\.|[^\\$\s]))\$(?!\d)`;
const formula = (name, level, shape, more) => ({
  name, level, ...more,
  tokenizer(src) {
    const found = src.match(shape);
    return found ? { type: name, raw: found[0], text: found.slice(1).find(Boolean), isDisplay: Boolean(found[1] || found[2]) } : undefined;
  },
  renderer: ({ text, isDisplay }) => `<code class="tex${isDisplay ? " display" : ""}">${escaped(text)}</code>`,
});
const FORMULAS = [
  formula("formulas", "block", new RegExp(`^ {0,3}(?:${DISPLAY})[ \\t]*(?:\\n+|$)`)),
  formula("formula", "inline", new RegExp(`^(?:${DISPLAY}|${IN_LINE})`), { start: (src) => src.match(/\$|\\[([]/)?.index }),
];

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

marked.use({
  extensions: FORMULAS,
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text), // markup of a model is text
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "), // no forms
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text) || "picture"}</a>`,
  },
});

// A text that the renderer cannot take (a thousand quotes in each other) or that would take it long is plain.
export function render(text) {
  try {
    if (text.length <= MOST_RENDERED && !isTangled(text)) return rendered(text);
  } catch (error) {
    console.warn("shown as plain text", error);
  }
  return el("div", { class: "plain" }, text);
}

// Marks of emphasis that never close take the square of their number.
const isTangled = (text) => text.replace(/^ *(```|~~~)[\s\S]*?^ *\1/gm, "").split(/\n\s*\n/)
  .some((paragraph) => paragraph.length > MOST_MARKS && paragraph.match(/[*_~[\]]/g)?.length > MOST_MARKS);

function rendered(text) {
  const made = window.DOMPurify.sanitize(marked.parse(text), CLEAN);
  for (const link of made.querySelectorAll("a")) {
    if (!link.getAttribute("href")) { link.replaceWith(...link.childNodes); continue; }
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const list of made.querySelectorAll("ol")) list.style.setProperty("--digits", String((list.start || 1) + list.children.length - 1).length);
  for (const tex of made.querySelectorAll("code.tex")) typeset(tex);
  for (const code of made.querySelectorAll("pre > code")) code.parentElement.replaceWith(codeBlock(code));
  for (const node of made.querySelectorAll("[class]")) if (!node.closest(".code, .tex, math")) node.removeAttribute("class");
  return made;
}

// A formula is shown as it is written until its library is there, and where that cannot take it.
let temml = null;
async function typeset(tex) {
  const isDisplay = tex.classList.contains("display");
  const source = tex.textContent;
  tex.className = isDisplay ? "tex display" : "tex";
  try {
    temml ??= (await import("./vendor/temml.js")).default;
    const made = temml.renderToString(source, { displayMode: isDisplay, trust: false, throwOnError: true, maxExpand: 200, maxSize: [20, 200] })
      .replace(/ style="[^"]*"/g, ""); // which the page's policy forbids; quotes of a formula's text are escaped
    const math = window.DOMPurify.sanitize(made, { USE_PROFILES: { mathMl: true }, FORBID_ATTR: ["href", "id"], RETURN_DOM_FRAGMENT: true });
    math.firstElementChild.setAttribute("aria-label", source);
    tex.replaceWith(isDisplay ? el("span", { class: "formula", tabindex: "0" }, math) : math);
  } catch (error) {
    tex.title = error.message;
  }
}

function codeBlock(code) {
  const text = code.textContent;
  const named = [...code.classList].find((one) => one.startsWith("language-"))?.slice(9) ?? "";
  const known = highlight.getLanguage(named) ? named : "";
  const inside = el("code");
  if (known && text.length <= MOST_HIGHLIGHTED) {
    inside.append(window.DOMPurify.sanitize(highlight.highlight(text, { language: known, ignoreIllegals: true }).value, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
  } else {
    inside.textContent = text;
  }
  return el("div", { class: "code" },
    el("div", { class: "bar" }, el("span", {}, named || "code"), button("Copy", () => copy(text), { "aria-label": "Copy this code" })),
    el("pre", { tabindex: "0" }, inside));
}

// Reasoning apart from what is said, as the server has it.
export function parted(message) {
  const text = typeof message.content === "string" ? message.content : Array.isArray(message.content) ? message.content.map(partText).join("\n\n") : "";
  return { thought: String(message.reasoning_content ?? message.reasoning ?? message.thinking ?? ""), text };
}
const partText = (part) => (typeof part === "string" ? part : part.text ?? `[${part.type ?? "part"}]`);

// What one says, as it is shown everywhere -----------------------------------------------------------

export const NAMES = { user: "You", assistant: "Model", system: "System prompt", tool: "Result of a tool" };

export const markdownOf = (text) => el("div", { class: "md" }, render(text));

export const thoughtOf = (thought, isOpen = false, name = `Thought (${count(thought.length)} characters)`) =>
  el("details", { class: "thought", open: isOpen }, el("summary", {}, name), el("div", {}, thought.trim()));

const MOST_OPEN = 600; // characters of a result that is not folded

// A call, and what came of it: {text, number of its message}, once that is known.
export function callOf(one, result = null) {
  const card = el("div", { class: "call" },
    el("div", { class: "called" }, "Calls ", el("code", {}, one.function?.name ?? one.name ?? "?")),
    el("pre", { "aria-label": "Arguments" }, pretty(one.function?.arguments ?? one.arguments ?? {})));
  if (result) {
    card.append(el("details", { class: "result", open: result.text.length <= MOST_OPEN, "data-message": result.number },
      el("summary", {}, "Result"), el("pre", {}, pretty(result.text))));
  }
  return card;
}

function pretty(value) {
  if (typeof value !== "string") return JSON.stringify(value, null, 2);
  try {
    return value.length > MOST_RENDERED ? value : JSON.stringify(JSON.parse(value), null, 2);
  } catch { // it is no JSON, or not whole yet
    return value;
  }
}

// Results by the number of the message that called for them, in the order of its calls; and the numbers of
// those messages, which need no rows of their own.
export function resultsOf(messages) {
  const found = new Map();
  const taken = new Set();
  let caller = null;
  messages.forEach((said, number) => {
    if (said.role === "assistant") caller = said.tool_calls?.length ? number : null;
    else if (said.role !== "tool") caller = null;
    else if (caller !== null) {
      const calls = messages[caller].tool_calls;
      const results = found.get(caller) ?? found.set(caller, Array(calls.length).fill(null)).get(caller);
      const own = calls.findIndex((one, i) => results[i] === null && one.id && one.id === said.tool_call_id);
      const at = own >= 0 ? own : said.tool_call_id && calls.some((one) => one.id === said.tool_call_id) ? -1 : results.indexOf(null);
      if (at < 0) return;
      results[at] = { text: parted(said).text, number };
      taken.add(number);
    }
  });
  return { found, taken };
}

// Thought, text and calls of a message, as nodes.
export function partsOf(said, results = []) {
  const { thought, text } = parted(said);
  const calls = said.tool_calls ?? [];
  return [
    thought && thoughtOf(thought),
    (text || !(calls.length || thought)) && el("div", { class: "body" }, said.role === "assistant" && text ? markdownOf(text) : el("div", { class: "plain" }, text || "(nothing)")),
    ...calls.map((one, i) => callOf(one, results[i])),
  ].filter(Boolean);
}
