// Shows the tree of sequences, and the tokens of each.

import { el, setText } from "./dom.js";
import { count, counted } from "./format.js";
import { writeText } from "./notes.js";

const SURPRISING = 6; // A log-probability of -6 (0.25 %) has the full tint.
const MARGIN = 24; // Pixels above and below a token that is scrolled into view.
const INHERITED_SHOWN = 60; // Maximum number of shown characters before a fork.

const ENDS = {
  stop: "stopped",
  length: "ended at max tokens",
  controller: "stopped by its controller",
  cancelled: "cancelled",
  timeout: "timed out",
  error: "failed",
};
const CONSTRAINT_ENDS = {
  complete: "complete",
  closed: "closed before the limit",
  cut: "cut off inside a value",
};

/** Draws the sequences of a generation into a list, and later adds their new tokens. */
export class SequenceList {
  #list;
  #views = new Map();
  #vocabSize = 0;
  #chosen = null;
  #selected = null;

  /** `select(sequence, index)` is called when a token is clicked. */
  constructor(list, select) {
    this.#list = list;
    list.addEventListener("click", (event) => {
      const token = event.target.closest(".token[data-at]");
      const view = this.#views.get(Number(event.target.closest("li[data-seq]")?.dataset.seq));
      if (view)
        select(view.sequence, token ? Number(token.dataset.at) : view.sequence.items.length - 1);
    });
  }

  clear(vocabSize) {
    this.#list.replaceChildren();
    this.#views.clear();
    this.#chosen = this.#selected = null;
    this.#vocabSize = vocabSize;
  }

  update(generation) {
    generation.inOrder.forEach((sequence, at) => {
      let view = this.#views.get(sequence.seq);
      if (!view) {
        view = new SequenceView(sequence, generation, this.#vocabSize);
        this.#views.set(sequence.seq, view);
      }
      if (this.#list.children[at] !== view.element) {
        this.#list.insertBefore(view.element, this.#list.children[at] ?? null);
      }
      view.update();
    });
  }

  /** Marks the selected token. Scrolls a newly selected token into view within the list. */
  select(sequence, index) {
    if (this.#chosen) this.#chosen.chosen = false;
    this.#selected?.classList.remove("chosen");
    this.#chosen = this.#views.get(sequence.seq);
    this.#chosen.chosen = true;
    const token = this.#chosen.token(index);
    token?.classList.add("chosen");
    if (token && token !== this.#selected) this.#show(token);
    this.#selected = token;
  }

  /** Scrolls only the list, not the page. */
  #show(token) {
    const list = this.#list.getBoundingClientRect();
    const box = token.getBoundingClientRect();
    if (box.bottom > list.bottom - MARGIN)
      this.#list.scrollTop += box.bottom - list.bottom + MARGIN;
    else if (box.top < list.top + MARGIN) this.#list.scrollTop += box.top - list.top - MARGIN;
  }
}

class SequenceView {
  #text = el("p.text");
  #pick = el("button.pick", { type: "button", "aria-pressed": "false" });
  #chosenBy = el("span.chosen-by", { hidden: true });
  #state = el("span.state");
  #writes = el("p.writes", { hidden: true });
  #fault = el("p.fault", { hidden: true });
  #spans = [];
  #vocabSize;
  #shownTaken = 0;

  constructor(sequence, generation, vocabSize) {
    this.sequence = sequence;
    this.#vocabSize = vocabSize;
    const { seq, parent, from } = sequence;
    this.#pick.textContent = `#${seq}`;
    const origin = parent ? `fork of #${parent.seq} at token ${from}` : "";
    this.element = el(
      "li.sequence",
      { "data-seq": seq, "data-depth": Math.min(6, depth(sequence)) },
      el("p.about", {}, this.#pick, el("span", {}, origin), this.#chosenBy, this.#state),
      this.#text,
      this.#writes,
      this.#fault,
    );
    this.#text.append(el("span.given", {}, given(sequence, generation.request.prompt)));
  }

  token(index) {
    return this.#spans[index];
  }

  set chosen(chosen) {
    this.element.classList.toggle("chosen", chosen);
    this.#pick.setAttribute("aria-pressed", chosen);
  }

  update() {
    const { items, splices, writes, finish, error, chosenBy } = this.sequence;
    if (this.#shownTaken !== splices.length) {
      items.slice(0, this.#spans.length).forEach((item, at) => {
        if (item.taken && !this.#spans[at].matches("del")) this.#replace(at, item);
      });
      this.#shownTaken = splices.length;
    }
    const added = items.slice(this.#spans.length).map((item, i) => {
      return tokenSpan(item, this.#spans.length + i, this.#vocabSize);
    });
    this.#spans.push(...added);
    this.#text.append(...added);
    this.element.dataset.state = finish ? (error ? "error" : "ended") : "running";
    setText(this.#state, this.#stateText());
    this.#chosenBy.hidden = !chosenBy;
    if (chosenBy) setText(this.#chosenBy, `✓ chosen by #${chosenBy.seq}`);
    this.#writes.hidden = !writes.length;
    if (writes.length) setText(this.#writes, writesText(writes));
    this.#fault.hidden = !error;
    setText(this.#fault, error ?? "");
  }

  #replace(at, item) {
    const span = tokenSpan(item, at, this.#vocabSize);
    this.#spans[at].replaceWith(span);
    this.#spans[at] = span;
  }

  #stateText() {
    const { finish, constraint, own, takenBack } = this.sequence;
    const taken = takenBack ? `${count(takenBack)} taken back` : "";
    const end = CONSTRAINT_ENDS[constraint];
    return [counted(own, "token"), taken, finish ? ENDS[finish] : "running", end]
      .filter(Boolean)
      .join(", ");
  }
}

/** The last write to each variable, and the number of writes. */
function writesText(writes) {
  const byName = Map.groupBy(writes, (write) => write.name);
  const each = [...byName.values()].map((list) => {
    const more = list.length > 1 ? ` (${counted(list.length, "write")})` : "";
    return `◆ ${writeText(list.at(-1))}${more}`;
  });
  return each.join("  ");
}

/**
 * Creates the element of a token. A token that a splice dropped becomes a `del` without line
 * breaks.
 */
function tokenSpan(item, at, vocabSize) {
  const span = el(item.taken ? "del.token" : "span.token", { "data-at": at });
  item.text.split("\n").forEach((line, i) => {
    if (i) span.append(el("i", { "aria-hidden": "true" }, "↵"), item.taken ? "" : "\n");
    span.append(line);
  });
  if (!item.text) span.append(el("i", {}, "·"));
  if (item.appended) span.classList.add("appended");
  else span.style.setProperty("--surprise", surprise(item).toFixed(3));
  if (item.allowed !== null) {
    span.classList.add("masked");
    span.style.setProperty("--allowed", allowedShare(item.allowed, vocabSize).toFixed(3));
  }
  if (item.cut.size) span.classList.add("cuts");
  return span;
}

/** The surprise of a token: 0 if it was certain, 1 at a probability of 0.25 % or less. */
export const surprise = (item) => Math.min(1, -item.logprob / SURPRISING);

/** The allowed share of the vocabulary on a logarithmic scale: 0 for one token, 1 for all tokens. */
export function allowedShare(allowed, vocabSize) {
  if (allowed <= 1 || vocabSize <= 1) return 0;
  return Math.min(1, Math.log(allowed) / Math.log(vocabSize));
}

function depth(sequence) {
  return sequence.parent ? 1 + depth(sequence.parent) : 0;
}

/** The text before the sequence's own tokens: the prompt, or the end of the text before a fork. */
function given(sequence, prompt) {
  if (!sequence.parent) return prompt;
  const before =
    prompt +
    sequence.kept
      .slice(0, sequence.inherited)
      .map((item) => item.text)
      .join("");
  return before.length > INHERITED_SHOWN ? `…${before.slice(-INHERITED_SHOWN)}` : before;
}
