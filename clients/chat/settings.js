// The settings of a conversation: model, instructions, sampling, tools.

import { apiKey, Refusal, send, useApiKey } from "./completion.js";
import { toolsIn } from "./conversation.js";
import { byId, el, setText } from "./dom.js";

const LAST = "tokenbus-chat-settings";
const TEXTS = ["system", "tools"];
const NUMBERS = ["temperature", "max_tokens"];
const EMPTY = { model: "", system: "", tools: "", temperature: null, max_tokens: null };

/** The settings of a new conversation: the last saved settings, without instructions and tools. */
export function defaults() {
  try {
    const { model, temperature, max_tokens } = JSON.parse(localStorage.getItem(LAST) ?? "{}");
    return { ...EMPTY, model: model ?? "", temperature: temperature ?? null, max_tokens: max_tokens ?? null };
  } catch {
    return { ...EMPTY };
  }
}

/** The choice of the model and the dialog with the other settings. */
export class Settings {
  #chat;
  #dialog = byId("settings");
  #model = byId("model");
  #models = [];

  constructor(chat) {
    this.#chat = chat;
    byId("open-settings").addEventListener("click", () => this.open());
    byId("thread").addEventListener("chat-settings", ({ detail }) => this.open(detail.message.error));
    this.#model.addEventListener("change", () => this.#keep({ model: this.#model.value }));
    this.#dialog.addEventListener("submit", (event) => this.#submit(event));
    byId("cancel-settings").addEventListener("click", () => this.#dialog.close());
    chat.addEventListener("change", () => this.#showModels());
    chat.addEventListener("key", () => this.#askForKey());
    byId("key-dialog").addEventListener("submit", () => {
      useApiKey(byId("key").value.trim());
      this.refreshModels();
    });
  }

  /** Opens the dialog. `error`: an error to show at the field that it names, or null. */
  open(error = null) {
    const { settings } = this.#chat.conversation;
    for (const name of [...TEXTS, ...NUMBERS]) byId(name).value = settings[name] ?? "";
    this.#clear();
    const field = /^\w+/.exec(error?.param ?? "")?.[0];
    if ([...TEXTS, ...NUMBERS].includes(field)) this.#fault(field, error.message);
    this.#dialog.showModal();
  }

  #clear() {
    for (const name of ["tools", ...NUMBERS]) {
      byId(`${name}-fault`).hidden = true;
      byId(name).removeAttribute("aria-invalid");
    }
  }

  #fault(name, words) {
    const fault = byId(`${name}-fault`);
    if (!fault) return;
    setText(fault, words);
    fault.hidden = false;
    byId(name).setAttribute("aria-invalid", "true");
    byId(name).focus();
  }

  #submit(event) {
    this.#clear();
    const settings = {};
    for (const name of TEXTS) settings[name] = byId(name).value;
    for (const name of NUMBERS) {
      const { value, validity } = byId(name);
      settings[name] = value === "" ? null : Number(value);
      if (validity.valid) continue;
      event.preventDefault();
      this.#fault(name, byId(name).validationMessage);
    }
    try {
      if (settings.tools.trim()) toolsIn(settings.tools);
    } catch (error) {
      event.preventDefault();
      this.#fault("tools", error.message);
    }
    if (!event.defaultPrevented) this.#keep(settings);
  }

  #keep(changes) {
    const { conversation } = this.#chat;
    Object.assign(conversation.settings, changes);
    localStorage.setItem(LAST, JSON.stringify(conversation.settings));
    if (conversation.messages.length) this.#chat.save(conversation);
  }

  /** Requests and shows the names of the served models. */
  async refreshModels() {
    const fault = byId("model-fault");
    fault.hidden = true;
    try {
      const { data } = await (await send("v1/models")).json();
      this.#models = data.map(({ id }) => id);
      this.#showModels();
      if (data.length) return;
      setText(fault, "No model is served. Start a worker with “tokenbus up”, then reload the page.");
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) this.#askForKey();
      setText(fault, error.message);
    }
    fault.hidden = false;
  }

  #showModels() {
    const { settings } = this.#chat.conversation;
    if (this.#models.length && !settings.model) [settings.model] = this.#models;
    const names = new Set([...this.#models, settings.model].filter(Boolean));
    if ([...this.#model.options].map(({ value }) => value).join("\n") !== [...names].join("\n")) {
      this.#model.replaceChildren(...[...names].map((name) => el("option", { value: name }, name)));
    }
    this.#model.value = settings.model;
  }

  #askForKey() {
    const dialog = byId("key-dialog");
    setText(byId("key-hint"), apiKey() ? "The gateway refused the API key." : "The gateway requires an API key.");
    if (!dialog.open) dialog.showModal();
  }
}
