/** A call: a request of this client, and its state over all connections and attempts. */

import type { Row } from "./columns.js";
import type { TokenbusError } from "./errors.js";
import type { ClientMessages, Msg, System, Token } from "./messages.js";

/** A message to the broker. */
export type Outgoing = {
  [T in keyof ClientMessages]: {
    readonly type: T;
    readonly body: ClientMessages[T];
    /** The bytes of the body's `data`, which a transport sends in the form that suits it. */
    readonly data?: Uint8Array | undefined;
  };
}[keyof ClientMessages];

/** A message that a call sends; its `stream_id` is of the attempt. */
export type Request = Extract<
  Outgoing,
  {
    readonly type:
      | "GENERATE"
      | "SCORE"
      | "BUFFER"
      | "MODEL_INFO"
      | "TOKENIZER"
      | "STATUS"
      | "UPLOAD"
      | "TAG"
      | "TAGS"
      | "DELETE";
  }
>;

/** What happens to a call, in order; the last event is an `ended`. */
export type Event =
  | Row
  | { readonly kind: "entry"; readonly entry: Token }
  | { readonly kind: "answer"; readonly answer: Msg }
  | { readonly kind: "notice"; readonly notice: System }
  | { readonly kind: "ended"; readonly error: TokenbusError | null };

/** How long a call may take. Times in seconds. */
export interface Timing {
  /** End the call, with a `timeout` error, this long after it began. */
  readonly timeoutS?: number | undefined;
  /** Send the request again if nothing has arrived for this long. */
  readonly stallS?: number | undefined;
  /** How long to send the request again after its first retryable failure. */
  readonly retryS?: number | undefined;
}

/** One request, over all of its connections and attempts. */
export class Call {
  readonly timeoutS: number;
  readonly stallS: number;
  readonly retryS: number;
  /** Takes the events as they arrive. */
  take: (events: readonly Event[]) => void = () => {};

  /** The `stream_id` of this attempt, unique in its session. */
  number = 0;
  began = 0;
  heard = 0;
  sent = false;
  /** Between ATTACH and its answer: entries that arrive are dropped, as they are sent again. */
  attaching = false;
  over = false;
  failedAt: number | null = null;
  tries = 0;
  resendAt: number | null = null;
  /** TOKEN entries of this attempt. */
  received = 0;
  /** How many of the next ones were received before: those that the answer to ATTACH says. */
  repeats = 0;
  /** How often the stream of this attempt has moved, as far as is known. */
  moves = 0;
  /** Entries delivered, by sequence, over all attempts. */
  readonly #seen = new Map<number, number>();
  /** Entries of this attempt, by sequence; the first `#seen` of each are duplicates. */
  readonly #came = new Map<number, number>();

  constructor(
    public request: Request,
    timing: Timing,
  ) {
    this.timeoutS = timing.timeoutS ?? Infinity;
    this.stallS = timing.stallS ?? Infinity;
    this.retryS = timing.retryS ?? 0;
  }

  /**
   * Whether to wait for a worker that still has the stream, where a broker was restarted. A request
   * of which nothing has arrived is rather sent again, if it may be.
   */
  get mayBeLive(): boolean {
    const { type } = this.request;
    return (type === "GENERATE" || type === "SCORE") && (this.received > 0 || this.retryS === 0);
  }

  /** Begins another attempt under a new number; what was delivered stays delivered. */
  beginTry(number: number): void {
    this.number = number;
    this.sent = false;
    this.attaching = false;
    this.resendAt = null;
    this.received = 0;
    this.repeats = 0;
    this.moves = 0;
    this.#came.clear();
  }

  /** Counts an entry; whether no earlier attempt has delivered it. */
  isNew(entry: Row | Token): boolean {
    this.received += 1;
    const count = (this.#came.get(entry.seq) ?? 0) + 1;
    this.#came.set(entry.seq, count);
    if (count <= (this.#seen.get(entry.seq) ?? 0)) return false;
    this.#seen.set(entry.seq, count);
    return true;
  }
}
