// The list of conversations.

import { byId, el, follow, setText } from "./dom.js";

/** The list, which is a drawer on narrow screens. */
export class Sidebar {
  #chat;
  #store;
  #panel = byId("sidebar");
  #button = byId("menu");

  constructor(chat, store) {
    this.#chat = chat;
    this.#store = store;
    chat.addEventListener("list", () => this.refresh());
    chat.addEventListener("change", () => this.#mark());
    this.#button.addEventListener("click", () => this.#toggle(!this.#open));
    byId("new").addEventListener("click", () => {
      this.#chat.create();
      this.#toggle(false);
      byId("message").focus();
    });
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.#open) return;
      event.stopPropagation();
      this.#toggle(false);
      this.#button.focus();
    });
    byId("place").addEventListener("click", () => this.#toggle(false));
  }

  get #open() {
    return this.#button.getAttribute("aria-expanded") === "true";
  }

  #toggle(open) {
    this.#button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("drawer", open);
    if (open) byId("new").focus();
  }

  /** Reads the list from the store. */
  async refresh() {
    let list = [];
    try {
      list = await this.#store.list();
    } catch (error) {
      setText(byId("list-fault"), error.message);
      byId("list-fault").hidden = false;
    }
    const shown = ({ title, draft }) => title || draft.trim().split("\n", 1)[0] || "New conversation";
    follow(byId("conversations"), list, ({ id }) => id, ({ id }) => this.#row(id), (row, one) => {
      setText(row.querySelector(".title"), shown(one));
    });
    this.#mark();
    return list;
  }

  #row(id) {
    const open = el("button.title", { type: "button" });
    open.addEventListener("click", async () => {
      await this.#chat.open(id);
      this.#toggle(false);
      byId("message").focus();
    });
    const rename = el("button.quiet", { type: "button", "aria-label": "Rename", title: "Rename" }, "✎");
    const remove = el("button.quiet", { type: "button", "aria-label": "Delete", title: "Delete" }, "✕");
    const row = el("li", {}, open, rename, remove);
    rename.addEventListener("click", () => this.#rename(row, open, id));
    remove.addEventListener("click", () => this.#confirm(row, id));
    return row;
  }

  #rename(row, title, id) {
    const field = el("input", { "aria-label": "Title", maxlength: 100 });
    field.value = title.textContent;
    row.classList.add("asks");
    row.append(field);
    field.select();
    let ended = false;
    const end = (keeps) => {
      if (ended) return;
      ended = true;
      row.classList.remove("asks");
      field.remove();
      if (keeps && field.value.trim()) this.#chat.rename(id, field.value.trim());
      title.focus();
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // Otherwise Enter would also press `title`, which gets the focus.
      event.stopPropagation();
      end(event.key === "Enter");
    });
  }

  #confirm(row, id) {
    const yes = el("button.danger", { type: "button" }, "Delete");
    const no = el("button", { type: "button" }, "Keep");
    const question = el("span.question", {}, yes, no);
    row.classList.add("asks");
    row.append(question);
    no.focus();
    no.addEventListener("click", () => {
      question.remove();
      row.classList.remove("asks");
      row.querySelector(".title").focus();
    });
    yes.addEventListener("click", async () => {
      await this.#chat.remove(id);
      byId("new").focus();
    });
  }

  #mark() {
    for (const row of byId("conversations").children) {
      const current = row.dataset.key === this.#chat.conversation?.id;
      row.querySelector(".title").setAttribute("aria-current", String(current));
    }
  }
}
