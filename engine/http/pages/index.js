// The overview: asks the server again and again, and shows what changed.

import { bars, meter } from "./bars.js";
import { NeedsKey, SILENT, ask, byId, bytes, duration, foreign, make, number, open, plural, problem } from "./common.js";

const BUSY_MS = 500;
const IDLE_MS = 2000;
let seen = 0;
let askForKey = null;
let timer = null;

async function look() {
  const span = byId("span").value;
  const response = await ask(`/v1/kvdb/overview?span=${span}&seen=${seen}`);
  const said = await response.json();
  byId("state").textContent = `${said.state}, up ${duration(said.up_seconds)}`;
  showRunning(said.running);
  byId("models").replaceChildren(...said.models.map(model));
  showMemory(said.memory);
  if (said.figures && span === byId("span").value) showFigures(said.figures);
  return said.running.length > 0;
}

async function again() {
  clearTimeout(timer);
  if (document.hidden) return; // until it is looked at
  let busy = false;
  try {
    busy = await look();
    problem(null);
  } catch (error) {
    if (error instanceof NeedsKey) return askForKey(error);
    problem(error instanceof TypeError ? SILENT : error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(again, busy ? BUSY_MS : IDLE_MS);
}

// Rows stay the same elements while a request runs, so that bars move and nothing flickers.
const rows = new Map();

function showRunning(running) {
  const here = new Set(running.map((each) => each.id));
  for (const [id, row] of rows) {
    if (!here.has(id)) {
      row.element.remove();
      rows.delete(id);
    }
  }
  for (const each of running) {
    if (!rows.has(each.id)) rows.set(each.id, newRow(each));
    update(rows.get(each.id), each);
  }
  byId("none-running").hidden = running.length > 0;
}

function newRow(each) {
  const state = make("strong");
  const detail = make("span", { class: "detail" });
  const bar = make("progress", { "aria-label": "Prefill" });
  const facts = [each.model, each.tenant && `tenant ${each.tenant}`, each.client];
  if (each.priority !== "interactive") facts.push(each.priority);
  const who = make("span", { class: "facts" });
  facts.filter(Boolean).forEach((fact, i) => who.append(i ? " · " : "", foreign(fact)));
  const element = make("li", {}, make("div", { class: "line" }, state, detail), bar, who);
  byId("running").append(element);
  return { element, state, detail, bar };
}

function update(row, each) {
  const names = { waiting: "Waiting", prefill: "Prefill", decode: "Answering" };
  row.state.textContent = names[each.state];
  row.element.dataset.state = each.state;
  row.bar.hidden = each.state !== "prefill";
  row.bar.max = Math.max(each.total, 1);
  row.bar.value = each.done;
  const share = each.total ? Math.floor((100 * each.done) / each.total) : 0;
  const detail = {
    waiting: "",
    prefill: `${number(each.done)} of ${number(each.total)} tokens, ${share} %, `,
    decode: `${plural(each.generated, "token")}, `,
  };
  row.detail.textContent = detail[each.state] + duration(each.seconds);
}

function model(each) {
  const facts = each.loaded
    ? [bytes(each.nbytes), each.users ? plural(each.users, "request") : "idle", each.pinned && "pinned"]
    : ["not in memory"];
  return make("li", {}, make("strong", {}, foreign(each.name)),
    make("span", { class: "facts" }, facts.filter(Boolean).join(" · ")));
}

function showMemory({ held, ceiling, ram, ram_budget }) {
  const gauges = [["Memory of the server", held, ceiling], ["RAM for blocks", ram, ram_budget]];
  byId("memory").replaceChildren(...gauges.map(([name, used, most]) => {
    const text = bytes(used) + (most ? ` of ${bytes(most)}` : "");
    return make("li", {}, make("strong", {}, name), make("span", { class: "facts" }, text),
      most ? meter(name, used, most) : null);
  }));
}

function showFigures(figures) {
  seen = figures.version;
  const tiles = figures.tiles ?? [];
  byId("tiles").replaceChildren(...tiles.map(({ value, meaning }) => make("li", {}, make("strong", {}, value), ` ${meaning}`)));
  if (figures.problem) {
    byId("sections").replaceChildren(make("p", { class: "note" }, figures.problem));
    return;
  }
  byId("sections").replaceChildren(...figures.sections.map(section));
}

function section({ title, sentences, figure, bars: levels, table, cards, note }) {
  return make("section", {}, make("h2", {}, title),
    ...sentences.map((sentence) => make("p", {}, sentence)),
    figure && bars(figure),
    levels.length ? make("ul", { class: "levels" }, ...levels.map(level(levels[0].value))) : null,
    table && tableOf(table),
    cards.length ? make("ol", { class: "cards" }, ...cards.map(card)) : null,
    note ? make("p", { class: "note" }, note) : null);
}

/** A line with its bar; `most` is what a whole bar stands for. */
const level = (most) => ({ name, value, text }) =>
  make("li", {}, foreign(name), make("span", { class: "facts" }, text), meter(name, value, most));

function tableOf({ headers, rows, numbers }) {
  const kind = (i) => (numbers.includes(i) ? { class: "number" } : {});
  const head = make("tr", {}, ...headers.map((header, i) => make("th", kind(i), header)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", kind(i), foreign(cell)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function card({ value, facts, sentences, texts }) {
  const line = make("p", { class: "facts" });
  facts.forEach((fact, i) => line.append(i ? " · " : "", foreign(fact)));
  const compared = Object.entries(texts).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, foreign(text))]);
  return make("li", {}, make("h3", {}, value), line,
    ...sentences.map((sentence) => make("p", {}, sentence)),
    compared.length ? make("dl", {}, ...compared) : null);
}

byId("span").addEventListener("change", () => {
  seen = 0;
  again();
});
document.addEventListener("visibilitychange", again);
askForKey = await open(async () => {
  await look();
  clearTimeout(timer);
  timer = setTimeout(again, BUSY_MS);
});
