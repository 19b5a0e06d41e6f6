// Pictures: those that are chosen and not sent lie in this browser's database, which has room for them; those of a
// conversation come from the server, by fetch, which unlike an address can bring a key.

import { $, button, el } from "./dom.js";
import { fileOf } from "./net.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_DAYS = 14;
export const MOST_PICTURE_BYTES = 16 << 20; // of one file
export const isPicture = (file) => KINDS.includes(file.type);

// What is chosen ---------------------------------------------------------------------------------

const chosen = new Map(); // key -> data URL; a database that is forbidden or full loses nothing that is on the page
const database = new Promise((done) => {
  try {
    const opening = indexedDB.open("kvcellar", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("pictures");
    opening.onsuccess = () => done(opening.result);
    opening.onerror = () => done(null);
  } catch {
    done(null);
  }
});
async function ask(mode, act) {
  const open = await database;
  if (!open) return null;
  return new Promise((done) => {
    try {
      const asked = act(open.transaction("pictures", mode).objectStore("pictures"));
      asked.onsuccess = () => done(asked.result ?? null);
      asked.onerror = () => done(null);
    } catch {
      done(null);
    }
  });
}

// Its key, by which it is kept until it is forgotten, also over a reload.
export async function keepPicture(file) {
  const data = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
  const key = `${Date.now()}-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  chosen.set(key, data);
  await ask("readwrite", (store) => store.put(data, key));
  return key;
}
export function forgetPictures(pictures) {
  for (const { key } of pictures) {
    if (!key) continue;
    chosen.delete(key);
    ask("readwrite", (store) => store.delete(key));
  }
}
// As a request has it: what was chosen as data, what the server has by its link. Null: it is gone.
export async function pictureOf({ key, url }) {
  if (url) return url;
  if (!chosen.has(key)) {
    const data = await ask("readonly", (store) => store.get(key));
    if (data) chosen.set(key, data);
  }
  return chosen.get(key) ?? null;
}
ask("readonly", (store) => store.getAllKeys()).then((keys) => {
  const old = Date.now() - MOST_DAYS * 86400000;
  forgetPictures((keys ?? []).filter((key) => parseInt(key, 10) < old).map((key) => ({ key })));
});

// What is shown ----------------------------------------------------------------------------------

const MOST_SHOWN = 200;
const shown = new Map(); // link -> a promise of an address of its file in this page
function addressOf(picture) {
  if (picture.key) return pictureOf(picture);
  if (!shown.has(picture.url)) {
    shown.set(picture.url, fileOf(picture.url).then((blob) => URL.createObjectURL(blob)));
    shown.get(picture.url).catch(() => shown.delete(picture.url));
    if (shown.size > MOST_SHOWN) shown.delete(shown.keys().next().value); // those that are on the page keep theirs
  }
  return shown.get(picture.url);
}

function imageOf(picture, alt) {
  const image = el("img", { alt, loading: "lazy" });
  addressOf(picture).then((src) => { if (src) image.src = src; else throw new Error("it is gone"); })
    .catch(() => image.replaceWith(el("span", { class: "gone" }, `${alt}: not here any more`)));
  return image;
}
export const thumbnail = (picture) => imageOf(picture, "");

// The pictures of a message, each of which opens.
export function picturesOf(pictures, what) {
  return el("ul", { class: "pictures", "aria-label": `Pictures of ${what}` }, ...pictures.map((picture, i) => {
    const name = pictures.length > 1 ? `Picture ${i + 1} of ${what}` : `Picture of ${what}`;
    const open = button("", () => show(picture, name), { "aria-label": `${name}: show it large` });
    open.append(imageOf(picture, ""));
    return el("li", {}, open);
  }));
}
function show(picture, name) {
  $("picture-title").textContent = name;
  $("picture-large").replaceChildren(imageOf(picture, name));
  $("picture").showModal();
}
