// The smallest chat: a turn's text as it comes, how far its prompt is, and what the store spared.

import { ask, byId, duration, make, number, open, problem } from "./common.js";

let messages = [];
let stopping = null; // the AbortController of the answer that is coming

async function begin() {
  const models = (await (await ask("/v1/models")).json()).data;
  byId("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
}

function turn(role) {
  const text = make("div", { class: "text" });
  const about = make("p", { class: "facts" });
  const item = make("li", { class: role }, text, about);
  byId("turns").append(item);
  byId("empty").hidden = true;
  return { item, text, about };
}

async function answer() {
  const shown = turn("assistant");
  const bar = make("progress", { "aria-label": "Prefill" });
  const answered = { role: "assistant", content: "" };
  let thoughts = null;
  let usage = null;
  const began = performance.now();
  let first = null;
  stopping = new AbortController();
  busy(true);
  shown.about.textContent = "Waiting";
  window.scrollTo(0, document.body.scrollHeight);
  let ending = null;
  try {
    for await (const event of stream(stopping.signal)) {
      const follow = atEnd();
      if (event.done !== undefined) {
        if (!bar.isConnected) shown.item.insertBefore(bar, shown.about);
        bar.max = Math.max(event.total, 1);
        bar.value = event.done;
        shown.about.textContent = `Prefill ${event.said} tokens`;
        if (follow) window.scrollTo(0, document.body.scrollHeight);
        continue;
      }
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const delta = event.choices?.[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      first ??= performance.now();
      bar.remove();
      shown.about.textContent = "";
      if (delta.reasoning_content) {
        thoughts ??= reasoning(shown);
        thoughts.textContent += delta.reasoning_content;
        answered.reasoning_content = (answered.reasoning_content ?? "") + delta.reasoning_content;
      }
      if (delta.content) shown.text.append(delta.content);
      answered.content += delta.content ?? "";
      if (follow) window.scrollTo(0, document.body.scrollHeight);
    }
  } catch (error) {
    ending = error.name === "AbortError" ? "Stopped" : error.message;
  }
  const wasAtEnd = atEnd();
  bar.remove();
  stopping = null;
  busy(false);
  const seconds = { first: first && (first - began) / 1000, all: (performance.now() - began) / 1000 };
  shown.about.textContent = [ending, usage && told(usage, seconds)].filter(Boolean).join(" · ");
  if (wasAtEnd) window.scrollTo(0, document.body.scrollHeight);
  shown.about.classList.toggle("wrong", ending !== null && ending !== "Stopped");
  if (answered.content || answered.reasoning_content) messages.push(answered);
  else messages.pop(); // what was asked and got no answer is not sent again
}

/** Whoever scrolled up to read is left there. */
const atEnd = () => window.innerHeight + window.scrollY > document.body.scrollHeight - 40;

function reasoning(shown) {
  const text = make("div", { class: "text" });
  shown.item.insertBefore(make("details", {}, make("summary", {}, "Reasoning"), text), shown.text);
  return text;
}

/** What the store did for a turn, in words. */
function told(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { kvdb } = usage;
  const computed = kvdb ? kvdb.computed_tokens + kvdb.refilled_tokens : usage.prompt_tokens - cached;
  const parts = [`${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens cached, ${number(computed)} computed`];
  if (seconds.first !== null) parts.push(`first token after ${duration(seconds.first)}`);
  if (kvdb) {
    const { restore, prefill } = kvdb.ms;
    const steps = [["restore", restore], ["prefill", prefill]].filter(([, ms]) => ms);
    if (steps.length) parts.push(steps.map(([name, ms]) => `${name} ${Math.round(ms)} ms`).join(", "));
  }
  const generated = usage.completion_tokens;
  const rate = seconds.first && generated > 1 ? (generated - 1) / (seconds.all - seconds.first) : null;
  parts.push(`${number(generated)} tokens` + (rate && Number.isFinite(rate) ? ` at ${rate.toPrecision(2)}/s` : ""));
  const [cache, ...rest] = parts;
  return [cache, ...rest.map((part) => part.replaceAll(" ", "\u00a0"))].join(" · ");
}

/** The events of the answer, and how far the prefill is: the server says that in comments. */
async function* stream(signal) {
  const body = { model: byId("model").value, messages, stream: true, stream_options: { include_usage: true } };
  const response = await ask("/v1/chat/completions", {
    method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (text + value).split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      const progress = /^: Processing (\d+)(K?)\/(\d+)(K?)$/.exec(frame);
      if (progress) {
        const tokens = (digits, unit) => Number(digits) * (unit ? 1000 : 1);
        const said = `${progress[1]}${progress[2]} of ${progress[3]}${progress[4]}`;
        yield { said, done: tokens(progress[1], progress[2]), total: tokens(progress[3], progress[4]) };
      } else if (frame.startsWith("data: ") && frame !== "data: [DONE]") {
        yield JSON.parse(frame.slice(6));
      }
    }
  }
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  byId("new").disabled = is;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value;
  if (stopping || !text.trim()) return;
  byId("text").value = "";
  turn("user").text.textContent = text;
  messages.push({ role: "user", content: text });
  answer();
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => stopping?.abort());
byId("new").addEventListener("click", () => {
  messages = [];
  byId("turns").replaceChildren();
  byId("empty").hidden = false;
  byId("text").focus();
});
problem(null);
await open(begin);
byId("text").focus();
