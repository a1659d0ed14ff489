// Shows the messages of the open conversation.

import { byId, follow } from "./dom.js";
import { messageElement, updateMessage } from "./message-view.js";

const DRAW_SHARE = 3; // The pause after a drawing, as a multiple of the drawing's duration.
const NEAR_END = 80; // Distance from the end within which the page follows new text, in pixels.

/** The list of messages. */
export class Thread {
  #chat;
  #list = byId("thread");
  #place = byId("place");
  #timer = 0;
  #drawMs = 0;
  #follows = true;
  #conversation = "";

  constructor(chat) {
    this.#chat = chat;
    this.#place.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.#place;
      this.#follows = scrollHeight - clientHeight - scrollTop < NEAR_END;
    });
    chat.addEventListener("text", () => this.#soon());
    chat.addEventListener("change", () => this.draw());
    for (const [name, act] of Object.entries({
      edit: ({ message, text }) => chat.edit(message, text),
      retry: ({ message }) => chat.retry(message),
      branch: ({ message }) => chat.branch(message),
      results: ({ message, results }) => chat.sendResults(message, results),
      version: ({ to }, event) => this.#show(to, event.target),
      draft: ({ ended }) => this.#drafted(ended),
    })) {
      this.#list.addEventListener(`chat-${name}`, (event) => act(event.detail, event));
    }
  }

  /** Shows the open conversation. */
  draw() {
    const { conversation, path } = this.#chat;
    if (conversation.id !== this.#conversation) {
      this.#conversation = conversation.id;
      this.#list.replaceChildren();
      this.#follows = true;
    }
    const last = path.at(-1);
    follow(this.#list, path, ({ id }) => id, messageElement, (item, message) =>
      updateMessage(item, message, conversation, message === last),
    );
    byId("blank").hidden = path.length > 0;
    if (this.#follows) this.#place.scrollTop = this.#place.scrollHeight;
  }

  /** Follows new text again, for example after a message was sent. */
  toEnd() {
    this.#follows = true;
    this.draw();
  }

  /** Draws soon. A slow drawing is repeated less often, so that the page remains usable. */
  #soon() {
    this.#timer ||= setTimeout(() => {
      requestAnimationFrame(() => {
        const began = performance.now();
        this.#timer = 0;
        this.draw();
        this.#drawMs = performance.now() - began;
      });
    }, DRAW_SHARE * this.#drawMs);
  }

  #show(message, button) {
    const name = document.activeElement?.getAttribute("aria-label") ?? "";
    this.#follows = false;
    this.#chat.show(message);
    const item = this.#list.querySelector(`[data-key="${message.id}"]`);
    const buttons = [...item.querySelectorAll(".versions button")];
    const same = buttons.find((one) => one.getAttribute("aria-label") === name && !one.disabled);
    if (!button.isConnected) (same ?? buttons.find((one) => !one.disabled))?.focus();
  }

  #drafted(ended) {
    if (ended) {
      this.draw();
      if (document.activeElement === document.body) byId("message").focus();
    }
    this.#chat.save(this.#chat.conversation);
  }
}
