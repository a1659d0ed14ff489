// Shows the messages of a program, and sends inputs to the program.

import { byId, el } from "./dom.js";

/** The dialogue with the program of the running generation. */
export class Dialogue {
  #section = byId("dialogue");
  #list = this.#section.querySelector("ol");
  #form = byId("answer");
  #input = byId("input");
  #fault = byId("input-fault");
  #send = null;
  #number = 0;
  #waiting = byId("waiting");
  /** For each sequence, the number of the input that its program waits for, or 0. */
  #waits = new Map();

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#answer();
    });
  }

  /**
   * Begins the dialogue of a stream. `send(number, text)` sends an input; numbers begin at 1. It
   * returns a promise, which is rejected with a RequestFault if the input is refused.
   */
  begin(send) {
    this.#send = send;
    this.#number = 0;
    this.#waits.clear();
    this.#showWaiting();
    this.#section.hidden = true;
    this.#form.hidden = false;
    this.#fault.hidden = true;
    this.#list.replaceChildren();
  }

  /** Adds the messages of an entry, and shows whether the program waits for an input. */
  add({ seq = 0, messages = [], waiting = 0 }) {
    this.#waits.set(seq, waiting);
    this.#showWaiting();
    if (!messages.length && !waiting) return;
    this.#section.hidden = false;
    for (const message of messages) this.#show(`#${seq}`, message);
  }

  #showWaiting() {
    const waits = this.#send && [...this.#waits.values()].some((number) => number > this.#number);
    this.#waiting.hidden = !waits;
  }

  /** Ends the dialogue: the program does not receive further inputs. */
  end() {
    this.#send = null;
    this.#form.hidden = true;
    this.#showWaiting();
  }

  #show(from, text) {
    const where = el("span.where", {}, from);
    const value = el("span.value", {}, text);
    this.#list.append(el("li", {}, where, el("span.what", {}, value)));
  }

  async #answer() {
    const send = this.#send;
    const text = this.#input.value;
    const button = this.#form.querySelector("button");
    if (!send || button.disabled) return;
    button.disabled = true; // The next input is sent only after the answer to this input.
    this.#fault.hidden = true;
    try {
      await send(this.#number + 1, text);
      if (send === this.#send) {
        this.#number++;
        this.#showWaiting();
        this.#show("you", text);
        this.#input.value = "";
      }
    } catch (fault) {
      if (send === this.#send) {
        this.#fault.textContent = fault.message;
        this.#fault.hidden = false;
      }
    } finally {
      button.disabled = false;
    }
  }
}
