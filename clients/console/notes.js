// Shows the variables that sequences wrote, and the logs of their controllers.

import { byId, el } from "./dom.js";
import { bytes, micros } from "./format.js";

const SHOWN = 300; // Maximum number of shown characters of a text.
const BYTES_SHOWN = 24; // Maximum number of shown bytes of a binary value.
const MIN_TEXT = 4; // Minimum length of a text inside a binary value.
const utf8 = new TextDecoder("utf-8", { fatal: true });

/** The lists of writes and logs. They only grow during a generation. */
export class Notes {
  #variables = byId("variables");
  #log = byId("log");
  #writes = 0;
  #logs = 0;

  clear() {
    this.#writes = this.#logs = 0;
    for (const section of [this.#variables, this.#log]) {
      section.hidden = true;
      section.querySelector("ol").replaceChildren();
    }
  }

  update({ writes, logs }) {
    add(this.#variables, writes.slice(this.#writes), (write) => [
      el("span.value", {}, writeText(write)),
    ]);
    add(this.#log, logs.slice(this.#logs), (entry) => [el("span.value", {}, entry.text.trimEnd())]);
    this.#writes = writes.length;
    this.#logs = logs.length;
  }
}

function add(section, entries, content) {
  if (!entries.length) return;
  section.hidden = false;
  const items = entries.map((entry) => {
    const time = entry.roundUs ? el("span.time", {}, micros(entry.roundUs)) : null;
    const where = el("span.where", {}, `#${entry.seq} at ${entry.pos}`);
    return el("li", {}, where, el("span.what", {}, ...content(entry)), time);
  });
  section.querySelector("ol").append(...items);
}

/** A write to a variable: `said = "yes"`, `texts += 01 00 "red"`. */
export function writeText({ name, op, value }) {
  return `${name} ${op === "Append" ? "+=" : "="} ${valueText(value)}`;
}

function valueText(value) {
  const text = textOf(value);
  if (text !== null) return cutShort(`"${text}"`, value);
  const parts = [];
  let begin = 0;
  for (const { index, 0: run } of latin1(value).matchAll(PRINTABLE)) {
    parts.push(hex(value.slice(begin, index)), `"${run}"`);
    begin = index + run.length;
  }
  parts.push(hex(value.slice(begin)));
  return cutShort(parts.filter(Boolean).join(" "), value);
}

const PRINTABLE = new RegExp(`[\\x20-\\x7e]{${MIN_TEXT},}`, "g");

/** The value as a text; null if it is not a text. */
function textOf(value) {
  try {
    const text = utf8.decode(value);
    return /[\x00-\x08\x0e-\x1f]/.test(text) ? null : text;
  } catch {
    return null;
  }
}

function latin1(value) {
  return String.fromCharCode(...value.slice(0, SHOWN));
}

function hex(value) {
  const shown = [...value.slice(0, BYTES_SHOWN)].map((b) => b.toString(16).padStart(2, "0"));
  return shown.join(" ") + (value.length > BYTES_SHOWN ? " …" : "");
}

function cutShort(text, value) {
  const size = ` (${bytes(value.length)})`;
  if (text.length > SHOWN) return `${text.slice(0, SHOWN)}…${size}`;
  return text.endsWith("…") ? text + size : text;
}
