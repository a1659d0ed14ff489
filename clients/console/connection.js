// LMTP over one WebSocket: requests and their answers, streams and their entries.

const SUBPROTOCOL = "tokenbus";
const HELLO = { versions: [1], encodings: ["json"], client: "console" };
const LONGEST_PAUSE_MS = 5000;

/** What a request ended with: `code`, `message`, and `path` where one field is at fault. */
export class RequestFault extends Error {
  constructor({ code = "internal", message, path = null }) {
    super(message);
    this.code = code;
    this.path = path;
  }
}

/**
 * A connection that is opened again when it breaks.
 *
 * Event `state`: its `detail` is "connecting"; "waiting" for the broker's answer; "open"; "lost";
 * or "refused" if the gateway is there but does not accept it, as without an API key.
 */
export class Connection extends EventTarget {
  #url;
  #key;
  #socket = null;
  #state = "";
  #failures = 0;
  #timer = 0;
  #lastId = 0;
  #calls = new Map();

  /** `url` of the WebSocket; `key` is the API key, or empty. */
  constructor(url, key) {
    super();
    this.#url = url;
    this.#key = key;
  }

  get open() {
    return this.#state === "open";
  }

  /** Connects with another key. */
  useKey(key) {
    this.#key = key;
    this.#become("connecting");
    this.connect();
  }

  /** Connects now. */
  connect() {
    clearTimeout(this.#timer);
    this.#socket?.close();
    if (this.#state !== "refused") this.#become("connecting");
    const key = this.#key;
    const protocols = key ? [SUBPROTOCOL, `key.${key}`] : [SUBPROTOCOL];
    let socket;
    try {
      socket = new WebSocket(this.#url, protocols);
    } catch {
      this.#become("refused"); // The key has characters that no key has.
      return;
    }
    this.#socket = socket;
    let opened = false;
    socket.onopen = () => {
      opened = true;
      this.#become("waiting");
      this.#send("HELLO", HELLO);
    };
    socket.onmessage = ({ data }) => this.#receive(data);
    socket.onclose = () => {
      if (socket === this.#socket) this.#closed(opened);
    };
  }

  /** Ends the session, and with it what still runs, as the page is left. */
  leave() {
    if (this.open) this.#send("BYE", {});
    this.#socket?.close();
  }

  /** The body of the `MSG` that answers a request; throws a RequestFault. */
  request(type, fields = {}) {
    return new Promise((resolve, reject) => {
      this.stream(type, fields, { answered: resolve, failed: reject });
    });
  }

  /**
   * Begins a stream. `receiver` has `entries(list)`, `notice(system)` and `failed(fault)`;
   * its end is in an entry. Returns a function that cancels it.
   */
  stream(type, fields, receiver) {
    const id = ++this.#lastId;
    this.#calls.set(id, receiver);
    if (this.open) this.#send(type, { stream_id: id, ...fields });
    else this.#fail(id, { code: "connection_lost", message: "not connected to the gateway" });
    return () => {
      if (this.#calls.has(id) && this.open) this.#send("CANCEL", { stream_id: id });
    };
  }

  #send(type, body) {
    this.#socket.send(`${type} ${JSON.stringify(body)}`);
  }

  #receive(line) {
    const space = line.indexOf(" ");
    const type = line.slice(0, space);
    // A request's number has 64 bits, more than a number of JavaScript.
    const json = line.slice(space + 1).replace(/"request":(\d+)/g, '"request":"$1"');
    const body = JSON.parse(json);
    if (type === "TOKEN") return this.#receiveEntries(body);
    if (type === "WELCOME") {
      this.#failures = 0;
      this.#become("open");
    }
    const receiver = this.#calls.get(body.stream_id);
    if (type === "SYSTEM") receiver?.notice?.(body);
    else if (type === "ERROR") this.#fail(body.stream_id, body);
    else if (type === "MSG") {
      this.#calls.delete(body.stream_id);
      receiver?.answered?.(body);
    }
  }

  #receiveEntries(list) {
    for (const [id, entries] of Map.groupBy(list, (entry) => entry.stream_id)) {
      const receiver = this.#calls.get(id);
      const last = entries.at(-1);
      if (last.finish_reason && !last.live) this.#calls.delete(id);
      receiver?.entries?.(entries);
    }
  }

  #fail(id, error) {
    const receiver = this.#calls.get(id);
    this.#calls.delete(id);
    receiver?.failed?.(new RequestFault(error));
  }

  async #closed(opened) {
    const fault = { code: "connection_lost", message: "the connection to the gateway was lost" };
    for (const id of [...this.#calls.keys()]) this.#fail(id, fault);
    const socket = this.#socket;
    const alive = !opened && (await this.#gatewayLives());
    if (socket !== this.#socket) return; // Connected again meanwhile.
    this.#become(alive ? "refused" : "lost");
    const pause = Math.min(LONGEST_PAUSE_MS, 250 * 2 ** this.#failures++);
    this.#timer = setTimeout(() => this.connect(), pause);
  }

  async #gatewayLives() {
    try {
      return (await fetch(new URL("live", location.href), { cache: "no-store" })).ok;
    } catch {
      return false;
    }
  }

  #become(state) {
    if (state === this.#state) return;
    this.#state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
