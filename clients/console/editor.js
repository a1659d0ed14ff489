// A text area with line numbers and a mark at an error.

import { el } from "./dom.js";

/**
 * An editor inside `host`. `id` is the id of the text area. `fault` and `hint` are the ids of the
 * elements that describe the text area.
 */
export class Editor {
  #gutter = el("div.gutter", { "aria-hidden": "true" });
  #under = el("pre.under", { "aria-hidden": "true" });
  #place = null;

  constructor(host, id, fault, hint) {
    this.area = el("textarea.code", {
      id,
      rows: 6,
      wrap: "off",
      spellcheck: "false",
      autocapitalize: "off",
      autocomplete: "off",
      "aria-describedby": `${fault} ${hint}`,
    });
    host.append(el("div.editor", {}, this.#gutter, el("div.sheet", {}, this.#under, this.area)));
    this.area.addEventListener("input", () => this.mark(null));
    this.area.addEventListener("scroll", () => this.#scroll());
    this.#draw();
  }

  get text() {
    return this.area.value;
  }

  set text(value) {
    this.area.value = value;
    this.mark(null);
  }

  /** Marks a place (`placeOf`); null removes the mark. */
  mark(place) {
    this.#place = place;
    if (!place) this.area.removeAttribute("aria-invalid");
    this.#draw();
  }

  /** Marks the whole text as faulty, without a place. */
  invalid() {
    this.area.setAttribute("aria-invalid", "true");
  }

  /** Focuses the text area, and selects the marked place. */
  goToMark() {
    this.area.focus();
    if (this.#place) this.area.setSelectionRange(this.#place.start, this.#place.end);
  }

  #draw() {
    const text = this.area.value;
    const numbers = text.split("\n").map((_, line) => {
      return el(this.#place?.line === line + 1 ? "span.at-fault" : "span", {}, String(line + 1));
    });
    this.#gutter.replaceChildren(el("div", {}, ...numbers));
    this.#under.replaceChildren(...(this.#place ? marked(text, this.#place) : [text]), "\n");
    this.area.rows = Math.min(14, Math.max(3, numbers.length));
    this.#scroll();
  }

  #scroll() {
    this.#under.scrollTop = this.area.scrollTop;
    this.#under.scrollLeft = this.area.scrollLeft;
    this.#gutter.scrollTop = this.area.scrollTop;
  }
}

function marked(text, { start, end }) {
  const inside = text.slice(start, end).split("\n", 1)[0];
  // At the end of a line or of the text, no character can be marked, so a space is added.
  const shown = inside || " ";
  return [text.slice(0, start), el("mark", {}, shown), text.slice(start + inside.length)];
}
