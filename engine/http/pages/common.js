// What both pages need: elements whose texts are never markup, numbers in words, and requests that
// carry the key of who looks. The key is in this tab's sessionStorage and nowhere else.

const KEY = "kvdb-key";
const RETRY_MS = 2000;
export const SILENT = "The server does not answer; trying again.";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; texts are text, whatever is in them. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** A name that somebody else chose: its direction stays inside it. */
export const foreign = (text) => make("bdi", {}, text);

export const number = (value) => value.toLocaleString("en-US");

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** Asks the server. Throws NeedsKey, or an Error with the server's own sentence. */
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const settings = { cache: "no-store", credentials: "omit", ...options, headers };
  const response = await fetch(path, settings);
  if (response.ok) return response;
  const said = await response.json().then((body) => body.error.message, () => null);
  if (response.status === 401) throw new NeedsKey(said);
  if (response.status === 403) throw new NeedsKey("This key may not see that; the main key and the admin key may.");
  throw new Error(said ?? `The server answered ${response.status}.`);
}

export class NeedsKey extends Error {}

/** Says what is wrong, or with null that nothing is. */
export function problem(text) {
  byId("problem").textContent = text ?? "";
  byId("problem").hidden = !text;
}

/** Shows the page, and `begin` fills it; first asks for a key where `begin` throws NeedsKey. */
export async function open(begin) {
  const form = byId("key-form");
  const input = byId("key");

  async function show() {
    try {
      await begin();
    } catch (error) {
      if (error instanceof NeedsKey) return askForKey(error);
      problem(error instanceof TypeError ? SILENT : error.message);
      return setTimeout(show, RETRY_MS);
    }
    problem(null);
    form.hidden = true;
    byId("page").hidden = false;
    byId("forget").hidden = sessionStorage.getItem(KEY) === null;
  }

  function askForKey(error) {
    const refused = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    byId("page").hidden = true;
    byId("forget").hidden = true;
    form.hidden = false;
    problem(refused ? error.message : null);
    input.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    input.value = "";
    show();
  });
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  await show();
  return askForKey;
}
