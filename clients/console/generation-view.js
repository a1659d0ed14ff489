// Starts generations, one at a time, and shows their results.

import { Dialogue } from "./dialogue.js";
import { byId, el, setText } from "./dom.js";
import { drawForks } from "./forks.js";
import { count, counted, micros } from "./format.js";
import { Generation } from "./generation.js";
import { Notes } from "./notes.js";
import { SequenceList } from "./sequences.js";
import { showStep } from "./step.js";
import { Steps } from "./steps.js";
import { Vocabulary } from "./vocabulary.js";

const MIN_WIDTH = 240; // Minimum width of the tree of forks, in pixels.
const DRAW_SHARE = 3; // The pause after a drawing, as a multiple of the drawing's duration.

/** Events: `running` (detail: whether a generation is running), `fault` (detail: the error). */
export class GenerationView extends EventTarget {
  #connection;
  #generation = null;
  /** The generation on display: the last one that was not refused. */
  #shown = null;
  #cancel = null;
  #models = new Map();
  #chosen = null;
  #index = 0;
  #follows = true;
  #timer = 0;
  #drawMs = 0;
  #width = MIN_WIDTH;
  #list = new SequenceList(byId("sequences"), (sequence, index) => this.#choose(sequence, index));
  #steps = new Steps();
  #notes = new Notes();
  #dialogue = new Dialogue();

  constructor(connection) {
    super();
    this.#connection = connection;
    // The next connection may be to another system, so the cached models are dropped.
    connection.addEventListener("state", () => this.#models.clear());
    this.#steps.addEventListener("choose", ({ detail }) => this.#choose(this.#chosen, detail));
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = Math.max(MIN_WIDTH, Math.floor(contentRect.width));
      this.#update();
    }).observe(byId("result"));
  }

  /** Starts a generation with the fields of a GENERATE, and cancels a running generation. */
  async start(request) {
    this.stop();
    const generation = new Generation(request, performance.now());
    this.#generation = generation;
    dim(true);
    this.#say("starting");
    this.dispatchEvent(new CustomEvent("running", { detail: true }));
    try {
      generation.model = await this.#modelOf(request.model ?? "");
    } catch (fault) {
      if (generation === this.#generation) this.#fail(fault);
      return;
    }
    if (generation !== this.#generation) return;
    showHeading();
    generation.startedAt = performance.now();
    const { cancel, input } = this.#connection.stream("GENERATE", request, {
      entries: (entries) => generation === this.#generation && this.#receive(entries),
      notice: (system) => generation === this.#generation && this.#say(system.message),
      failed: (fault) => generation === this.#generation && this.#fail(fault),
    });
    this.#cancel = cancel;
    this.#dialogue.begin(input);
  }

  /** Cancels the running generation. */
  stop() {
    if (this.#generation?.running) this.#cancel?.();
  }

  /** Draws again, for example after a change of colours. */
  redraw() {
    this.#steps.redraw();
  }

  /** The size and the texts of a model's vocabulary, which are cached for later generations. */
  async #modelOf(model) {
    let known = this.#models.get(model);
    if (!known) {
      const { model_info: info } = await this.#connection.request("MODEL_INFO", { model });
      known = { vocabSize: info.vocab_size, vocabulary: null };
      this.#models.set(model, known);
      this.#connection
        .request("TOKENIZER", { model })
        .then(({ tokenizer }) => {
          known.vocabulary = new Vocabulary(tokenizer.json);
          this.#update();
        })
        .catch(() => {}); // Without a tokenizer, alternatives are shown by their ids.
    }
    return known;
  }

  /** Shows the running generation instead of the previous one. */
  #show() {
    const generation = this.#generation;
    this.#shown = generation;
    this.#chosen = null;
    this.#follows = true;
    this.#list.clear(generation.model.vocabSize);
    this.#notes.clear();
    byId("blank").hidden = true;
    byId("result").hidden = false;
    dim(false);
    byId("result").classList.toggle("steered", Boolean(generation.request.controller));
  }

  #receive(entries) {
    const now = performance.now();
    for (const entry of entries) {
      this.#generation.add(entry, now);
      this.#dialogue.add(entry);
    }
    const refused = this.#generation.failed && !this.#generation.received;
    const begun = this.#generation.received || !this.#generation.running;
    if (begun && !refused && this.#shown !== this.#generation) this.#show();
    const waits = entries.some((entry) => entry.messages?.length || entry.waiting);
    if (this.#generation.received || waits) this.#say("running");
    if (this.#generation.running) return this.#update();
    this.#draw();
    this.#ended();
  }

  #ended() {
    this.#dialogue.end();
    const sequences = [...this.#generation.sequences.values()];
    const failed = sequences.filter((s) => s.error);
    const end = failed.length
      ? failed.length < sequences.length
        ? "some sequences failed"
        : "failed"
      : "finished";
    this.#say(`${end}: ${counted(this.#generation.tokens, "token")}`);
    this.dispatchEvent(new CustomEvent("running", { detail: false }));
    if (failed.length === sequences.length) {
      const [{ code, error }] = failed;
      if (!this.#generation.received) this.#refused();
      this.dispatchEvent(
        new CustomEvent("fault", { detail: { code, message: error, path: null } }),
      );
    }
  }

  #fail(fault) {
    this.#dialogue.end();
    this.#generation.fail(fault, performance.now());
    this.#say("failed");
    if (!this.#generation.received) this.#refused();
    this.dispatchEvent(new CustomEvent("running", { detail: false }));
    this.dispatchEvent(new CustomEvent("fault", { detail: fault }));
    this.#update();
  }

  /** Handles a refusal. The form shows the error, and the previous result is dimmed. */
  #refused() {
    this.#say(this.#shown ? "refused; the previous result is below" : "refused");
    this.#generation = null;
  }

  #say(text) {
    setText(byId("progress"), text);
    byId("progress").dataset.running = Boolean(this.#generation?.running);
  }

  #choose(sequence, index) {
    if (!sequence?.items.length) return;
    this.#chosen = sequence;
    this.#index = Math.max(0, Math.min(index, sequence.items.length - 1));
    // If the last step of a running generation is chosen, the choice follows new steps.
    this.#follows = this.#shown.running && this.#index === sequence.items.length - 1;
    this.#draw();
  }

  /**
   * Schedules a drawing. If drawing is slow, it happens less often, so that the page remains
   * usable.
   */
  #update() {
    this.#timer ||= setTimeout(() => {
      requestAnimationFrame((began) => {
        this.#timer = 0;
        this.#draw();
        this.#drawMs = performance.now() - began;
      });
    }, DRAW_SHARE * this.#drawMs);
  }

  #draw() {
    const generation = this.#shown;
    if (!generation?.sequences.size) return;
    const { vocabSize, vocabulary } = generation.model;
    this.#list.update(generation);
    this.#notes.update(generation);
    showFigures(generation);
    drawForks(byId("forks"), this.#width, generation, this.#chosen, (s) =>
      this.#choose(s, s.items.length - 1),
    );
    if (!this.#chosen?.items.length) {
      const { inOrder } = generation;
      this.#chosen = inOrder.find((s) => s.items.length) ?? inOrder[0];
    }
    if (this.#follows) {
      this.#index = this.#chosen.items.length - 1;
      this.#follows = generation.running;
    }
    this.#steps.show(this.#chosen, this.#index, vocabSize);
    showStep(this.#chosen, this.#index, vocabSize, vocabulary);
    this.#list.select(this.#chosen, this.#index);
  }
}

/** Dims the previous result, or shows it as the current result. */
function dim(stale) {
  byId("result").closest("section").classList.toggle("stale", stale);
}

/** Scrolls the generation into view if it is below the form, for example on a phone. */
function showHeading() {
  const heading = byId("generation-title");
  if (heading.getBoundingClientRect().top < innerHeight * 0.8) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  heading.scrollIntoView({ behavior: calm ? "auto" : "smooth" });
}

function showFigures(generation) {
  const { tokens, received, takenBack, promptTokens, cachedTokens, request } = generation;
  const { startedAt, firstAt, endedAt } = generation;
  const list = byId("figures");
  list.hidden = false;
  const taken = takenBack ? `, ${count(takenBack)} taken back` : "";
  const facts = [["Tokens", count(tokens) + taken]];
  if (firstAt !== null) facts.push(["First token", micros((firstAt - startedAt) * 1000)]);
  if (endedAt !== null && received > 1 && endedAt > firstAt) {
    facts.push(["Tokens/s", count(Math.round(((received - 1) * 1000) / (endedAt - firstAt)))]);
  }
  if (promptTokens) facts.push(["Prompt", `${count(promptTokens)}, ${count(cachedTokens)} cached`]);
  if (generation.sequences.size > 1) facts.push(["Sequences", count(generation.sequences.size)]);
  facts.push(["Seed", String(request.seed)]);
  list.replaceChildren(
    ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}
