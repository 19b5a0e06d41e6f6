// Text of models as Markdown. It is hostile until proven otherwise: what the renderer makes is cleaned, no
// picture is fetched, no style, form or id is let through, and links open elsewhere without a referrer.

import { marked } from "./vendor/marked.js";
import highlight from "./vendor/highlight.js";
import { button, copy, el } from "./dom.js";

const MOST_RENDERED = 100000; // characters of one message
const MOST_MARKS = 2000; // in one paragraph
const MOST_HIGHLIGHTED = 20000; // characters of one piece of code

const CLEAN = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

marked.use({
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
  for (const code of made.querySelectorAll("pre > code")) code.parentElement.replaceWith(codeBlock(code));
  for (const node of made.querySelectorAll("[class]")) if (!node.closest(".code")) node.removeAttribute("class");
  return made;
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

const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

// Reasoning apart from what is said: as the server has it, or where a text begins with its marks.
export function parted(message) {
  const content = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content) : "";
  const given = message.reasoning_content ?? message.reasoning ?? message.thinking;
  if (given) return { thought: String(given), text: content };
  const found = content.match(THOUGHT);
  return found ? { thought: found[1], text: content.slice(found[0].length).trimStart() } : { thought: "", text: content };
}
