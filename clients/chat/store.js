// Keeps conversations in the browser's database, and reports changes by other tabs.

const DATABASE = "tokenbus-chat";
const WHOLE = "conversations";
const LIST = "list";

/** The database is full, or an operation on it failed. */
export class StoreFault extends Error {}

/** Event `changed`: another tab saved or removed a conversation (detail: its id). */
export class Store extends EventTarget {
  #database = null;
  #channel = new BroadcastChannel(DATABASE);

  constructor() {
    super();
    this.#channel.onmessage = ({ data }) => {
      this.dispatchEvent(new CustomEvent("changed", { detail: data }));
    };
  }

  /** The id, title, draft and time of each conversation, the most recently changed first. */
  async list() {
    const transaction = await this.#transaction("readonly");
    const found = await resultOf(transaction.objectStore(LIST).getAll());
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** A conversation; undefined if it does not exist. */
  async get(id) {
    return resultOf((await this.#transaction("readonly")).objectStore(WHOLE).get(id));
  }

  /** Saves a conversation. Messages that another tab added in the meantime are kept. */
  async put(conversation) {
    const transaction = await this.#transaction("readwrite");
    const whole = transaction.objectStore(WHOLE);
    const stored = await resultOf(whole.get(conversation.id));
    const own = new Set(conversation.messages.map(({ id }) => id));
    const added = (stored?.messages ?? []).filter(({ id }) => !own.has(id));
    conversation.messages.push(...added);
    const { id, title, draft, updated } = conversation;
    await Promise.all([
      resultOf(whole.put(conversation)),
      resultOf(transaction.objectStore(LIST).put({ id, title, draft, updated })),
    ]);
    this.#channel.postMessage(id);
  }

  /** Removes a conversation. */
  async remove(id) {
    const transaction = await this.#transaction("readwrite");
    await Promise.all([WHOLE, LIST].map((name) => resultOf(transaction.objectStore(name).delete(id))));
    this.#channel.postMessage(id);
  }

  async #transaction(mode) {
    this.#database ??= open();
    return (await this.#database).transaction([WHOLE, LIST], mode);
  }
}

function open() {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => {
    for (const name of [WHOLE, LIST]) opening.result.createObjectStore(name, { keyPath: "id" });
  };
  return resultOf(opening);
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => {
      const full = request.error?.name === "QuotaExceededError";
      const what = full
        ? "The browser's storage is full; delete a conversation."
        : `The browser does not store conversations: ${request.error?.message}`;
      reject(new StoreFault(what));
    };
  });
}
