// The steps of one sequence as a chart, with a slider over it that chooses one.

import { byId, setText } from "./dom.js";
import { counted, micros, percent, visible } from "./format.js";
import { allowedShare, surprise } from "./sequences.js";

const WIDEST = 16; // Pixels of a step.
const TIMES = 18; // Height of the part that shows the times of rounds.

/** The chart. Event: `choose`, with the index of the step as its `detail`. */
export class Steps extends EventTarget {
  #canvas = byId("chart");
  #scrub = byId("scrub");
  #items = [];
  #vocabSize = 0;
  #masked = false;

  constructor() {
    super();
    this.#scrub.addEventListener("input", () => {
      this.dispatchEvent(new CustomEvent("choose", { detail: Number(this.#scrub.value) }));
    });
    new ResizeObserver(() => this.#draw()).observe(this.#canvas.parentElement);
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
    if (item) this.#scrub.setAttribute("aria-valuetext", spoken(item, chosen, this.#items.length, vocabSize));
    this.#masked = this.#items.some((i) => i.allowed !== null);
    setText(byId("steps-hint"), this.#hint(sequence));
    this.#draw();
  }

  #hint(sequence) {
    const height = this.#masked ? "allowed share" : "surprise";
    const parts = [`${counted(this.#items.length, "step")} of #${sequence.seq}`, `height: ${height}`];
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
    const box = canvas.parentElement.getBoundingClientRect();
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
    const colour = (name) => style.getPropertyValue(name);
    const height = box.height - TIMES - 6;
    const gap = step > 4 ? 1 : 0;
    const slowest = Math.max(1, ...this.#items.map((item) => item.roundUs));
    this.#items.forEach((item, i) => {
      const left = i * step;
      const [share, name] = this.#masked ? maskBar(item, this.#vocabSize) : surpriseBar(item);
      const bar = Math.max(2, share * height);
      paint.globalAlpha = item.taken ? 0.35 : 1;
      paint.fillStyle = colour(name);
      paint.fillRect(left, height - bar, step - gap, bar);
      if (item.cut.size) {
        paint.fillStyle = colour("--chart-cut");
        paint.fillRect(left, 0, step - gap, 2);
      }
      paint.fillStyle = colour("--chart-time");
      const time = (item.roundUs / slowest) * TIMES;
      if (item.roundUs) paint.fillRect(left, height + 6, step - gap, Math.max(1, time));
    });
  }
}

/** Height and colour of a step under masks: nothing was left to choose where it was appended. */
function maskBar(item, vocabSize) {
  if (item.appended) return [0, "--chart-free"];
  if (item.allowed === null) return [1, "--chart-free"];
  return [allowedShare(item.allowed, vocabSize), "--chart-allowed"];
}

/** And without any mask. */
function surpriseBar(item) {
  return item.appended ? [0, "--chart-free"] : [surprise(item), "--chart-surprise"];
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
