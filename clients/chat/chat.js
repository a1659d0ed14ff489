// The open conversation: sends messages, streams answers, saves conversations in the store.

import { addChunk, newAnswer } from "./answer.js";
import { Refusal, stream } from "./completion.js";
import * as trees from "./conversation.js";

const SAVE_MS = 500; // Pause between two saves of a running answer.

/**
 * Events: `change` (the open conversation changed), `text` (a running answer got text or a notice),
 * `ended` (detail: the state of an answer that has ended), `list` (a conversation was saved or
 * removed), `fault` (detail: a message for the user), `key` (the gateway requires an API key).
 */
export class Chat extends EventTarget {
  #store;
  #defaults;
  /** The conversations that are open or have a running answer, by id. */
  #live = new Map();
  /** The AbortController of each running answer, by the answer's id. */
  #running = new Map();
  /** Number of saves that have not ended. */
  #saves = 0;
  /** Removed conversations. An answer that ends later must not save its conversation again. */
  #removed = new Set();
  conversation = null;

  /** `defaults()` returns the settings of a new conversation. */
  constructor(store, defaults) {
    super();
    this.#store = store;
    this.#defaults = defaults;
    store.addEventListener("changed", ({ detail: id }) => this.#changedElsewhere(id));
  }

  /** The messages that the page shows. */
  get path() {
    return trees.pathOf(this.conversation);
  }

  /** The running answer that the page shows; undefined without one. */
  get runningAnswer() {
    return this.path.find((message) => this.#running.has(message.id));
  }

  /** Begins a conversation. It is saved when it has a message or a draft. */
  create() {
    this.#become(trees.newConversation(this.#defaults()));
  }

  /**
   * Opens a stored conversation, and resumes its answers that a closed tab left running. Begins a
   * new conversation if `id` is unknown.
   */
  async open(id) {
    const conversation = this.#live.get(id) ?? (await this.#store.get(id));
    if (!conversation) return this.create();
    this.#become(conversation);
    for (const message of conversation.messages) {
      if (message.state !== "running" || this.#running.has(message.id)) continue;
      this.#run(conversation, message, { ifAvailable: true });
    }
  }

  #become(conversation) {
    const left = this.conversation;
    // The text that was typed last may not be saved yet.
    if (left?.draft && left.id !== conversation.id) this.save(left);
    if (left && !left.messages.some(({ id }) => this.#running.has(id))) this.#live.delete(left.id);
    this.conversation = conversation;
    this.#live.set(conversation.id, conversation);
    this.#tell("change");
  }

  /** Removes a conversation. Its running answers are stopped. */
  async remove(id) {
    for (const { id: answer } of this.#live.get(id)?.messages ?? []) this.#running.get(answer)?.abort();
    this.#live.delete(id);
    this.#removed.add(id);
    await this.#attempt(() => this.#store.remove(id));
    this.#tell("list");
    if (this.conversation.id === id) this.create();
  }

  /** Gives a conversation another title. */
  async rename(id, title) {
    const conversation = this.#live.get(id) ?? (await this.#store.get(id));
    if (!conversation) return;
    conversation.title = title;
    await this.save(conversation);
  }

  /** Sends a user's message after the last message. */
  send(text) {
    const last = this.path.at(-1) ?? null;
    this.conversation.draft = "";
    this.#ask({ role: "user", text }, last);
  }

  /** Sends another version of a user's message. */
  edit(message, text) {
    message.draft = null;
    const parent = trees.messageOf(this.conversation, message.parent) ?? null;
    this.#ask({ role: "user", text }, parent);
  }

  /** Sends the results of an answer's calls. */
  sendResults(answer, results) {
    this.#ask({ role: "tool", results }, answer);
  }

  #ask(fields, parent) {
    const question = trees.addMessage(this.conversation, parent, fields);
    this.#answer(question);
  }

  #answer(parent) {
    const settings = trees.settingsOfAnswer(this.conversation.settings);
    const answer = trees.addMessage(this.conversation, parent, newAnswer(settings));
    this.#run(this.conversation, answer);
  }

  /** Asks for another version of an answer. A failed answer without text or calls is replaced. */
  retry(answer) {
    if (answer.state !== "failed" || answer.text || answer.calls.length) {
      return this.#answer(trees.messageOf(this.conversation, answer.parent));
    }
    const settings = trees.settingsOfAnswer(this.conversation.settings);
    Object.assign(answer, newAnswer(settings), { key: trees.newId() });
    return this.#run(this.conversation, answer);
  }

  /** Shows another version of a message. */
  show(message) {
    this.conversation.shown[message.parent] = message.id;
    this.#tell("change");
    this.save(this.conversation);
  }

  /** Opens a copy of the conversation that ends with `message`. */
  async branch(message) {
    const branch = trees.branchAt(this.conversation, message);
    await this.save(branch);
    this.#become(branch);
  }

  /** Stops the running answer that the page shows. */
  stop() {
    this.#running.get(this.runningAnswer?.id)?.abort();
  }

  /** Saves a conversation; reports an error as the event `fault`. */
  async save(conversation) {
    if (await this.#put(conversation)) this.#tell("list");
  }

  async #put(conversation) {
    if (this.#removed.has(conversation.id)) return false;
    document.body.toggleAttribute("data-saving", ++this.#saves > 0);
    const done = await this.#attempt(() => this.#store.put(conversation));
    document.body.toggleAttribute("data-saving", --this.#saves > 0);
    return done;
  }

  async #attempt(work) {
    try {
      await work();
      return true;
    } catch (error) {
      this.#tell("fault", error.message);
      return false;
    }
  }

  /** Streams an answer. `options`: the options of the answer's lock, which only one tab can hold. */
  #run(conversation, answer, options = {}) {
    const start = (lock) => (lock ? this.#start(conversation, answer) : null);
    return navigator.locks ? navigator.locks.request(answer.id, options, start) : start(true);
  }

  async #start(conversation, answer) {
    const stopping = new AbortController();
    this.#running.set(answer.id, stopping);
    this.#tell("change");
    await this.save(conversation);
    await this.#stream(conversation, answer, stopping.signal);
  }

  async #stream(conversation, answer, signal) {
    const place = { key: answer.key ?? answer.id, event: answer.event };
    const take = (chunk) => {
      addChunk(answer, chunk);
      this.#tell("text");
    };
    const notice = (words) => {
      answer.notice = words;
      this.#tell("text");
    };
    const saving = setInterval(() => {
      answer.event = place.event;
      this.#put(conversation);
    }, SAVE_MS);
    try {
      await stream(trees.requestOf(conversation, answer), place, { take, notice, signal });
      answer.state = answer.error ? "failed" : "done";
    } catch (error) {
      this.#failed(answer, error);
    }
    clearInterval(saving);
    answer.notice = "";
    answer.event = place.event;
    this.#running.delete(answer.id);
    await this.save(conversation);
    this.#tell("change");
    this.#tell("ended", answer.state);
  }

  #failed(answer, error) {
    if (error.name === "AbortError") {
      answer.state = "stopped";
      return;
    }
    answer.state = "failed";
    answer.error = { message: error.message, param: error.param ?? null };
    if (error instanceof Refusal && error.status === 401) this.#tell("key");
    else if (!(error instanceof Refusal)) console.info(error);
  }

  async #changedElsewhere(id) {
    this.#tell("list");
    if (id !== this.conversation?.id || this.runningAnswer) return;
    const stored = await this.#store.get(id);
    if (stored) this.#become({ ...stored, draft: this.conversation.draft });
  }

  #tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
