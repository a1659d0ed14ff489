/** Runs the session of a client on a transport, and reconnects when the connection is lost. */

import type { Call } from "./calls.js";
import { ConnectionLostError, type TokenbusError } from "./errors.js";
import { Session } from "./session.js";
import type { Link, Received, Transport } from "./transport.js";

/**
 * The first and the longest pause before a new connection, in seconds. Each pause is twice the
 * previous one, up to the longest pause.
 */
const PAUSES_S = [0.05, 1] as const;
/** If the next connection may be to another broker, the longest pause before it, in seconds. */
const ELSEWHERE_S = 0.2;

/** The connection of a client, on which all of its calls are sent. */
export class Connection {
  readonly #session: Session;
  #link: Link | null = null;
  #open = false;
  #pauseS = 0;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #dueAt = Infinity;
  #closed = false;
  /** The time at which a new connection is opened. */
  #openAt = 0;

  /**
   * `patienceS`: if the broker does not answer for this number of seconds, calls fail. `keepS`: if
   * the connection is lost, the broker keeps the session for at least this number of seconds.
   */
  constructor(
    readonly transport: Transport,
    patienceS: number,
    keepS: number,
  ) {
    this.#session = new Session(transport.address, patienceS, now(), transport.several, keepS);
  }

  /**
   * Begins a call. The first call opens the connection. Throws if the client was closed or its
   * address is not valid.
   */
  submit(call: Call): void {
    if (this.#closed) {
      throw new ConnectionLostError("connection_lost", "this client was closed; create a new one");
    }
    if (this.#link === null && now() >= this.#openAt) this.#connect();
    this.#session.submit(call, now());
    this.#turn();
  }

  /** Cancels a call; its events are not delivered any more. */
  cancel(call: Call): void {
    this.#session.cancel(call);
    if (!this.#closed) this.#turn();
  }

  /** Sends an input to the program of a stream. Resolves when the input is stored. */
  sendInput(call: Call, text: string): Promise<void> {
    return new Promise((resolve, reject) => {
      const report = (error: TokenbusError | null): void => {
        if (error === null) resolve();
        else reject(error);
      };
      this.#session.sendInput(call, text, report, now());
      if (!this.#closed) this.#turn();
    });
  }

  /** Ends the session, and every call that has not ended. */
  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#session.bye();
    this.#flush();
    this.#link?.close();
    this.#link = null;
  }

  #connect(): void {
    this.#session.connecting(now());
    this.#link = this.transport.open({
      opened: () => {
        this.#open = true;
        this.#session.connected(now());
        this.#turn();
      },
      received: (messages: readonly Received[]) => {
        this.#pauseS = 0;
        for (const message of messages) this.#session.onMessage(message, now());
        this.#turn();
      },
      closed: (reason: string, refused?: TokenbusError) => {
        this.#drop(reason);
        if (refused !== undefined) this.#session.endAll(refused);
        this.#turn();
      },
    });
  }

  /** Handles the loss of the connection. A new connection is opened after a pause. */
  #drop(reason: string): void {
    const first = PAUSES_S[0];
    const longest = this.transport.several ? ELSEWHERE_S : PAUSES_S[1];
    this.#link = null;
    this.#open = false;
    this.#pauseS = Math.min(this.#pauseS * 2 || first, longest);
    this.#openAt = now() + this.#pauseS;
    this.#session.disconnected(now(), reason);
  }

  /** Handles due deadlines, sends messages, delivers events, and sets the timer. */
  #turn(): void {
    const at = now();
    this.#session.onTime(at);
    this.#flush();
    if (this.#closed) return; // A receiver of an event has closed the client.
    if (this.#link !== null && this.#session.lost(at)) {
      const link = this.#link;
      this.#drop("it does not answer");
      link.close();
    }
    if (this.#link === null && at >= this.#openAt) {
      try {
        this.#connect();
      } catch (error) {
        this.#drop(String(error));
      }
    }
    const waitS = Math.min(
      this.#session.waitS(at),
      this.#link === null ? this.#openAt - at : Infinity,
    );
    this.#wake(at + waitS);
  }

  #flush(): void {
    const { outgoing, ready } = this.#session;
    this.#session.outgoing = [];
    this.#session.ready = [];
    if (this.#open) for (const message of outgoing) this.#link?.send(message);
    for (const [call, events] of ready) call.take(events);
  }

  /** Makes the timer call `#turn` at the time `at` or earlier. */
  #wake(at: number): void {
    if (at >= this.#dueAt) return;
    clearTimeout(this.#timer);
    this.#dueAt = at;
    this.#timer = setTimeout(
      () => {
        this.#dueAt = Infinity;
        this.#turn();
      },
      Math.max(0, at - now()) * 1000,
    );
  }
}

/** Seconds of a monotonic clock. */
function now(): number {
  return performance.now() / 1000;
}
