// What sequences wrote to variables, and what their controllers logged.

import { byId, el } from "./dom.js";
import { bytes, micros } from "./format.js";

const SHOWN = 300; // Characters of a value,
const BYTES_SHOWN = 24; // or bytes, where it is no text.
const utf8 = new TextDecoder("utf-8", { fatal: true });

/** The two lists, which only grow while a generation runs. */
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

/** A write to a variable: `said = "yes"`, `texts += 01 00 00`. */
export function writeText({ name, op, value }) {
  return `${name} ${op === "Append" ? "+=" : "="} ${valueText(value)}`;
}

function valueText(value) {
  let text;
  try {
    text = utf8.decode(value);
    if (/[\x00-\x08\x0e-\x1f]/.test(text)) throw new TypeError("not a text");
    text = `"${text}"`;
  } catch {
    const shown = [...value.slice(0, BYTES_SHOWN)].map((b) => b.toString(16).padStart(2, "0"));
    text = shown.join(" ");
    if (value.length > BYTES_SHOWN) return `${text} … (${bytes(value.length)})`;
  }
  return text.length > SHOWN ? `${text.slice(0, SHOWN)}… (${bytes(value.length)})` : text;
}
