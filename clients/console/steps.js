// Shows the steps of one sequence as a chart. A slider over the chart chooses a step.

import { byId, el, setText } from "./dom.js";
import { count, micros, percent, visible } from "./format.js";
import { allowedShare, surprise } from "./sequences.js";

const MAX_STEP = 16; // Maximum width of a step, in pixels.
const GAP = 10; // Pixels between two rows.
const CUTS = 16; // Height in pixels of the first row: the probability that masks cut off.
const TIMES = 16; // Height in pixels of the last row: the times of rounds.

const COLOURS = ["allowed", "cut", "surprise", "time"];

/** The chart. Event: `choose`, with the index of the step as its `detail`. */
export class Steps extends EventTarget {
  #canvas = byId("chart");
  #scrub = byId("scrub");
  #box = { width: 0, height: 0 };
  #items = [];
  #vocabSize = 0;
  #masked = false;

  constructor() {
    super();
    this.#scrub.addEventListener("input", () => {
      this.dispatchEvent(new CustomEvent("choose", { detail: Number(this.#scrub.value) }));
    });
    new ResizeObserver(([{ contentRect }]) => {
      this.#box = contentRect;
      this.#draw();
    }).observe(this.#canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  /** Shows the steps of a sequence and marks the chosen step. */
  show(sequence, chosen, vocabSize) {
    this.#items = sequence.items;
    this.#vocabSize = vocabSize;
    const item = this.#items[chosen];
    this.#scrub.max = String(Math.max(0, this.#items.length - 1));
    this.#scrub.value = String(chosen);
    this.#scrub.disabled = !item;
    if (item)
      this.#scrub.setAttribute(
        "aria-valuetext",
        spoken(item, chosen, this.#items.length, vocabSize),
      );
    this.#masked = this.#items.some((i) => i.allowed !== null);
    setText(byId("steps-hint"), this.#hint(sequence));
    this.#draw();
  }

  #hint(sequence) {
    const times = this.#items.map((i) => i.roundUs).filter(Boolean);
    const rounds = times.length ? `; median round: ${micros(median(times))}` : "";
    return `One column for each step of #${sequence.seq}${rounds}`;
  }

  /** The rows of the chart from top to bottom: name, upper and lower scale value, and pixel range. */
  #rows(height, slowest) {
    const top = this.#masked ? CUTS + GAP : 0;
    const bottom = slowest ? height - TIMES - GAP : height;
    const allowed = ["allowed", count(this.#vocabSize), "1", top, bottom];
    const unlikely = ["surprise", "≤\u00a00.25\u00a0%", "100\u00a0%", top, bottom];
    const rows = [this.#masked ? allowed : unlikely];
    if (this.#masked) rows.unshift(["cut off", "100\u00a0%", "", 0, CUTS]);
    if (slowest) rows.push(["round", micros(slowest), "", bottom + GAP, height]);
    return rows;
  }

  #label(rows) {
    const labels = rows.map(([name, most, least, from, to]) => {
      const label = el("span", {}, name, el("small", {}, el("b", {}, most), el("b", {}, least)));
      label.style.setProperty("inset-block-start", `${from}px`);
      label.style.setProperty("block-size", `${to - from}px`);
      return label;
    });
    byId("axes").replaceChildren(...labels);
  }

  /** Draws again, for example after a change of colours. */
  redraw() {
    this.#draw();
  }

  #draw() {
    const canvas = this.#canvas;
    const box = this.#box;
    if (!box.width) return;
    const scale = devicePixelRatio;
    canvas.width = Math.round(box.width * scale);
    canvas.height = Math.round(box.height * scale);
    const step = Math.min(MAX_STEP, box.width / Math.max(1, this.#items.length));
    const track = Math.max(step * this.#items.length, step);
    this.#scrub.style.setProperty("inline-size", `${track}px`);
    this.#scrub.style.setProperty("--step", `${step}px`);
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colours = Object.fromEntries(
      COLOURS.map((name) => [name, style.getPropertyValue(`--chart-${name}`)]),
    );
    const gap = step > 4 ? 1 : 0;
    const slowest = Math.max(0, ...this.#items.map((item) => item.roundUs));
    const rows = this.#rows(box.height, slowest);
    this.#label(rows);
    const [, , , top, bottom] = rows[this.#masked ? 1 : 0];
    const bar = (i, name, y, height) => {
      paint.fillStyle = colours[name];
      paint.fillRect(i * step, y, step - gap, height);
    };
    this.#items.forEach((item, i) => {
      const share = this.#masked ? allowedOf(item, this.#vocabSize) : surpriseOf(item);
      paint.globalAlpha = item.taken ? 0.35 : 1;
      if (share !== null) {
        const height = Math.max(2, share * (bottom - top));
        bar(i, this.#masked ? "allowed" : "surprise", bottom - height, height);
      }
      if (item.cut.size) bar(i, "cut", 0, Math.max(1, item.cutOff * CUTS));
      // The scale is a square root, so that one slow round does not hide the others.
      const time = TIMES * Math.sqrt(item.roundUs / slowest);
      if (item.roundUs) bar(i, "time", bottom + GAP, Math.max(1, time));
    });
  }
}

/** The height of a step's column, 0 to 1, from its mask; null if the step has no mask. */
function allowedOf(item, vocabSize) {
  return item.allowed === null ? null : allowedShare(item.allowed, vocabSize);
}

/**
 * The height of a step's column, 0 to 1, in a chart without masks; null if the token was not
 * sampled.
 */
function surpriseOf(item) {
  return item.appended ? null : surprise(item);
}

/** The text of a step for a screen reader. */
function spoken(item, index, of, vocabSize) {
  const parts = [`${index + 1} of ${of}: ${visible(item.text) || "no text"}`];
  if (item.taken) parts.push("taken back");
  parts.push(item.appended ? "appended" : `probability ${percent(Math.exp(item.logprob))}`);
  if (item.allowed !== null) parts.push(`${item.allowed} of ${vocabSize} tokens allowed`);
  if (item.cut.size) parts.push(`${item.cut.size} likely tokens cut off`);
  return parts.join(", ");
}

function median(values) {
  return values.toSorted((a, b) => a - b)[values.length >> 1];
}
