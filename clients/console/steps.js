// The steps of one sequence as a chart, with a slider over it that chooses one.

import { byId, setText } from "./dom.js";
import { counted, micros, percent, visible } from "./format.js";
import { allowedShare, surprise } from "./sequences.js";

const WIDEST = 16; // Pixels of a step.
const GAP = 6; // Between the three rows:
const CUTS = 16; // the probability that masks cut off,
const TIMES = 16; // below it the shares that they allowed, and the times of rounds.

const COLOURS = ["allowed", "free", "cut", "surprise", "time"];

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

  /** Shows the steps of a sequence, the chosen one among them. */
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
    const parts = [counted(this.#items.length, "step") + ` of #${sequence.seq}`];
    if (this.#masked) parts.push("above: probability cut off", "middle: allowed share");
    else parts.push("height: surprise");
    const times = this.#items.map((i) => i.roundUs).filter(Boolean);
    if (times.length) parts.push(`below: time of the round, median ${micros(median(times))}`);
    return parts.join("; ");
  }

  /** Draws again, as after a change of colours. */
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
    const step = Math.min(WIDEST, box.width / Math.max(1, this.#items.length));
    const track = Math.max(step * this.#items.length, step);
    this.#scrub.style.setProperty("inline-size", `${track}px`);
    this.#scrub.style.setProperty("--step", `${step}px`);
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colours = Object.fromEntries(
      COLOURS.map((name) => [name, style.getPropertyValue(`--chart-${name}`)]),
    );
    const top = this.#masked ? CUTS + GAP : 0;
    const bottom = box.height - TIMES - GAP;
    const gap = step > 4 ? 1 : 0;
    const slowest = Math.max(1, ...this.#items.map((item) => item.roundUs));
    const bar = (i, name, y, height) => {
      paint.fillStyle = colours[name];
      paint.fillRect(i * step, y, step - gap, height);
    };
    this.#items.forEach((item, i) => {
      const [share, name] = this.#masked ? maskBar(item, this.#vocabSize) : surpriseBar(item);
      const height = Math.max(2, share * (bottom - top));
      paint.globalAlpha = item.taken ? 0.35 : 1;
      bar(i, name, bottom - height, height);
      if (item.cut.size) bar(i, "cut", 0, Math.max(1, item.cutOff * CUTS));
      // By the square root: one slow round leaves the others visible.
      const time = TIMES * Math.sqrt(item.roundUs / slowest);
      if (item.roundUs) bar(i, "time", bottom + GAP, Math.max(1, time));
    });
  }
}

/** Height and colour of a step under masks: nothing was left to choose where it was appended. */
function maskBar(item, vocabSize) {
  if (item.appended) return [0, "free"];
  if (item.allowed === null) return [1, "free"];
  return [allowedShare(item.allowed, vocabSize), "allowed"];
}

/** And without any mask. */
function surpriseBar(item) {
  return item.appended ? [0, "free"] : [surprise(item), "surprise"];
}

/** A step as a screen reader says it. */
function spoken(item, index, of, vocabSize) {
  const parts = [`${index + 1} of ${of}: ${visible(item.text) || "no text"}`];
  if (item.taken) parts.push("taken back");
  parts.push(item.appended ? "appended" : `probability ${percent(Math.exp(item.logprob))}`);
  if (item.allowed !== null) parts.push(`${item.allowed} of ${vocabSize} tokens allowed`);
  if (item.cut.size) parts.push(`${item.cut.size} likely ones cut off`);
  return parts.join(", ");
}

function median(values) {
  return values.toSorted((a, b) => a - b)[values.length >> 1];
}
