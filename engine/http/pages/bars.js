// Bars as SVG: stacked over time (times are UTC), and one that says how full something is.

import { number } from "./common.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220;
const TOP = 26;
const BELOW = 22;
const LEFT = 56;
// With fewer periods a bar would not look like one.
const LEAST_PERIODS = 7;

const time = (text) => Date.parse(text.includes(" ") ? `${text.replace(" ", "T")}Z` : `${text}T00:00Z`);

/** How much `value` is of `most`. */
export function meter(name, value, most) {
  const share = most > 0 ? Math.min(value / most, 1) : 0;
  const svg = node("svg", { class: "meter", role: "meter", "aria-label": name, "aria-valuenow": share });
  svg.append(node("rect", { width: `${100 * share}%`, height: "100%", rx: 4 }));
  return svg;
}

/** A figure that draws itself again when its width changes. */
export function bars(figure) {
  const box = document.createElement("figure");
  box.className = "bars";
  const svg = box.appendChild(node("svg", { role: "img", "aria-label": figure.described }));
  if (figure.series.length > 1) box.append(legend(figure.series));
  new ResizeObserver(() => draw(svg, figure, box.clientWidth)).observe(box);
  return box;
}

function legend(series) {
  const list = document.createElement("figcaption");
  for (const { name, colour } of series) {
    const mark = node("svg", { class: "mark", viewBox: "0 0 10 10", "aria-hidden": "true" });
    mark.append(node("rect", { width: 10, height: 10, fill: colour }));
    const item = document.createElement("span");
    item.append(mark, name);
    list.append(item);
  }
  return list;
}

function draw(svg, figure, width) {
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const starts = figure.times.map(time);
  const period = figure.period_ms;
  const from = starts[0];
  const to = Math.max(starts.at(-1) + period, from + LEAST_PERIODS * period);
  const above = starts.map((_, i) => sum(figure.series, i, (value) => value > 0));
  const under = starts.map((_, i) => sum(figure.series, i, (value) => value < 0));
  const step = niceStep(Math.max(...above) - Math.min(0, ...under));
  const high = Math.max(step, Math.ceil(Math.max(...above) / step) * step);
  const low = Math.floor(Math.min(0, ...under) / step) * step;
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - 4);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BELOW);

  const parts = [text(figure.unit, { x: 0, y: 12 })];
  for (let value = low; value <= high + step / 2; value += step) {
    parts.push(node("line", { class: value ? "grid" : "zero", x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
    parts.push(text(short(value), { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }));
  }
  starts.forEach((start, i) => {
    const ends = { up: 0, down: 0 };
    for (const { name, colour, values } of figure.series) {
      const way = values[i] < 0 ? "down" : "up";
      const [base, end] = [ends[way], ends[way] + values[i]];
      ends[way] = end;
      const bar = node("rect", {
        x: x(start),
        width: Math.max(1, 0.85 * (x(start + period) - x(start))),
        y: Math.min(y(base), y(end)),
        height: Math.abs(y(base) - y(end)),
        fill: colour,
      });
      const title = node("title", {});
      title.textContent = `${figure.times[i]} UTC\n${name}: ${number(values[i])} ${figure.unit}`;
      bar.append(title);
      parts.push(bar);
    }
  });
  parts.push(...timeLabels(from, to, period, x));
  svg.replaceChildren(...parts);
}

/** Every so many periods one label, under where its bar begins. */
function timeLabels(from, to, period, x) {
  const hours = period < 86_400_000;
  const room = hours ? 100 : 60;
  const every = Math.ceil(room / (x(from + period) - x(from)));
  const labels = [];
  for (let at = from; at < to && x(at) + room / 2 < x(to); at += every * period) {
    const iso = new Date(at).toISOString();
    const shown = hours ? `${iso.slice(5, 10)} ${iso.slice(11, 16)}` : iso.slice(5, 10);
    labels.push(text(shown, { x: x(at), y: HEIGHT - 6 }));
  }
  return labels;
}

const sum = (series, i, wanted) =>
  series.reduce((total, { values }) => total + (wanted(values[i]) ? values[i] : 0), 0);

/** 1, 2 or 5 times a power of ten, so that three or four lines fit. */
function niceStep(range) {
  const rough = Math.max(range, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

function short(value) {
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return `${+(value / limit).toPrecision(3)}${unit}`;
  }
  return String(+value.toPrecision(3));
}

function text(content, attributes) {
  const element = node("text", attributes);
  element.textContent = content;
  return element;
}

function node(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
