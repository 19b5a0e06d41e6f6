// Elements, numbers as people read them, and messages that pass by.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const button = (text, onclick, more = {}) => el("button", { type: "button", class: "quiet", onclick, ...more }, text);

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${n < 10 && i ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}
export const count = (n) => Number(n).toLocaleString("en-US");
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
export const percent = (x) => `${Math.round(100 * x)}%`;
export const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${s.toFixed(s < 10 ? 1 : 0)} s`);

// A message for a while; with something that can be done about it, if there is.
export function toast(text, act = null) {
  $("toast-text").textContent = text;
  $("toast-do").hidden = act === null;
  $("toast-do").onclick = () => { $("toast").hidden = true; act(); };
  $("toast").style.setProperty("--above", `${Math.max(22, innerHeight - $("ask").getBoundingClientRect().top + 10)}px`); // nothing typed is covered
  $("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { $("toast").hidden = true; }, act === null ? 7000 : 12000);
}

// A browser has six connections to a server for all of its tabs: those that nobody looks at hold none.
export async function inSight() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}
export function untilHidden(controller) {
  const hide = () => { if (document.hidden) controller.abort(); };
  document.addEventListener("visibilitychange", hide, { signal: controller.signal });
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or no secure context: the old way
    const area = el("textarea", { class: "sr" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("copied");
}
