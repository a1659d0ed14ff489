// The field for the next message, and the buttons that send it and stop an answer.

import { byId, setText } from "./dom.js";

const SAVE_MS = 400; // Pause after which typed text is saved.
const SAID = { done: "The answer is complete.", stopped: "Stopped.", failed: "The answer failed." };

/** Event `sent`: a message was sent. */
export class Composer extends EventTarget {
  #chat;
  #field = byId("message");
  #timer = 0;
  #shown = "";

  constructor(chat) {
    super();
    this.#chat = chat;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#field.addEventListener("keydown", (event) => this.#press(event));
    this.#field.addEventListener("input", () => this.#typed());
    byId("stop").addEventListener("click", () => chat.stop());
    chat.addEventListener("change", () => this.#update());
    chat.addEventListener("ended", ({ detail }) => setText(byId("said"), SAID[detail]));
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
    });
    addEventListener("pagehide", () => this.#save());
  }

  #press(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && this.#field.value === "") this.#editLast(event);
  }

  #editLast(event) {
    const buttons = document.querySelectorAll("#thread .message.user .tail button");
    const edit = [...buttons].filter((button) => button.textContent === "Edit").at(-1);
    if (!edit) return;
    event.preventDefault();
    edit.click();
  }

  #typed() {
    this.#chat.conversation.draft = this.#field.value;
    this.#fit();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), SAVE_MS);
  }

  #save() {
    clearTimeout(this.#timer);
    const { conversation } = this.#chat;
    if (conversation?.draft || conversation?.messages.length) this.#chat.save(conversation);
  }

  #send() {
    const text = this.#field.value;
    if (!text.trim() || this.#chat.runningAnswer) return;
    clearTimeout(this.#timer);
    setText(byId("said"), "");
    this.#chat.send(text);
    this.#field.value = "";
    this.#fit();
    this.dispatchEvent(new Event("sent"));
  }

  #update() {
    const { conversation } = this.#chat;
    // The field and the button are disabled until the page has loaded a conversation.
    this.#field.disabled = byId("send").disabled = false;
    if (conversation.id !== this.#shown) {
      this.#shown = conversation.id;
      this.#field.value = conversation.draft;
      this.#fit();
    }
    const running = Boolean(this.#chat.runningAnswer);
    const stop = byId("stop");
    if (!running && document.activeElement === stop) this.#field.focus();
    stop.hidden = !running;
    byId("send").hidden = running;
  }

  /** Makes the field as high as its text, up to 10 lines. The stylesheet may bound it further. */
  #fit() {
    const lines = this.#field.value.split("\n").length;
    this.#field.rows = Math.min(10, Math.max(1, lines));
  }
}
