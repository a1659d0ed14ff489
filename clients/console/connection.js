// Sends requests and receives answers and streams, with LMTP over one WebSocket.

const SUBPROTOCOL = "tokenbus";
const HELLO = { versions: [1], encodings: ["json"], client: "console" };
const LONGEST_PAUSE_MS = 5000;

/** The error of a request: `code`, `message`, and `path` if a field is faulty. */
export class RequestFault extends Error {
  constructor({ code = "internal", message, path = null }) {
    super(message);
    this.code = code;
    this.path = path;
  }
}

/**
 * A connection that reconnects when it is lost.
 *
 * The `detail` of the event `state` is "connecting", "waiting" (for the broker's answer), "open",
 * "lost", or "refused" (the gateway runs but refuses the connection, for example without a key).
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

  /** `url`: the URL of the WebSocket. `key`: the API key; empty without a key. */
  constructor(url, key) {
    super();
    this.#url = url;
    this.#key = key;
  }

  get open() {
    return this.#state === "open";
  }

  /** Reconnects with another API key. */
  useKey(key) {
    this.#key = key;
    this.#become("connecting");
    this.connect();
  }

  /** Connects immediately. */
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
      this.#become("refused"); // The key contains invalid characters.
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

  /** Ends the session and its running requests when the page is left. */
  leave() {
    if (this.open) this.#send("BYE", {});
    this.#socket?.close();
  }

  /** Sends a request; returns the body of the answer `MSG`. Throws a RequestFault. */
  request(type, fields = {}) {
    return new Promise((resolve, reject) => {
      this.stream(type, fields, { answered: resolve, failed: reject });
    });
  }

  /**
   * Begins a stream. `receiver` has `entries(list)`, `notice(system)` and `failed(fault)`. The last
   * entry reports the end. Returns the functions `cancel()` and `input(number, text)`. `input`
   * sends an input to the program of the stream. It returns a promise, which is rejected with a
   * RequestFault if the input is refused.
   */
  stream(type, fields, receiver) {
    const id = ++this.#lastId;
    this.#calls.set(id, receiver);
    if (this.open) this.#send(type, { stream_id: id, ...fields });
    else this.#fail(id, { code: "connection_lost", message: "not connected to the gateway" });
    const live = () => this.#calls.has(id) && this.open;
    const cancel = () => {
      if (live()) this.#send("CANCEL", { stream_id: id });
    };
    const input = (number, text) =>
      new Promise((resolve, reject) => {
        if (!live()) return reject(new RequestFault({ message: "the stream has ended" }));
        receiver.inputAnswered = (answer) =>
          answer.code ? reject(new RequestFault(answer)) : resolve();
        receiver.inputFailed = reject;
        this.#send("INPUT", { stream_id: id, number, text });
      });
    return { cancel, input };
  }

  #send(type, body) {
    this.#socket.send(`${type} ${JSON.stringify(body)}`);
  }

  #receive(line) {
    const space = line.indexOf(" ");
    const type = line.slice(0, space);
    // A request number has 64 bits, which a JavaScript number cannot represent.
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
    else if (type === "MSG" && body.input) receiver?.inputAnswered?.(body.input);
    else if (type === "MSG") {
      this.#calls.delete(body.stream_id);
      receiver?.answered?.(body);
    }
  }

  #receiveEntries(list) {
    for (const [id, entries] of Map.groupBy(list, (entry) => entry.stream_id)) {
      const receiver = this.#calls.get(id);
      const last = entries.at(-1);
      const ended = last.finish_reason && !last.live;
      if (ended) this.#calls.delete(id);
      receiver?.entries?.(entries);
      if (ended) receiver?.inputFailed?.(new RequestFault({ message: "the stream has ended" }));
    }
  }

  #fail(id, error) {
    const receiver = this.#calls.get(id);
    this.#calls.delete(id);
    receiver?.failed?.(new RequestFault(error));
    receiver?.inputFailed?.(new RequestFault(error));
  }

  async #closed(opened) {
    const fault = { code: "connection_lost", message: "the connection to the gateway was lost" };
    for (const id of [...this.#calls.keys()]) this.#fail(id, fault);
    const socket = this.#socket;
    const alive = !opened && (await this.#gatewayLives());
    if (socket !== this.#socket) return; // A new connection was opened in the meantime.
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
