/**
 * A *call*: one request of this client, and the state of the request. If a request fails, the
 * client may send it again. Each time, a new *attempt* of the call begins, with another
 * `stream_id`.
 */

import { Row } from "./columns.js";
import type { TokenbusError } from "./errors.js";
import type { ClientMessages, Msg, System, Token } from "./messages.js";

/** A message to the broker. */
export type Outgoing = {
  [T in keyof ClientMessages]: {
    readonly type: T;
    readonly body: ClientMessages[T];
    /** The bytes of the body's `data`. Each transport chooses their form. */
    readonly data?: Uint8Array | undefined;
  };
}[keyof ClientMessages];

/** A message that a call sends. Each attempt sets its own `stream_id`. */
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

/** An event of a call. The last event is an `ended`. */
export type Event =
  | Row
  | { readonly kind: "entry"; readonly entry: Token }
  | { readonly kind: "answer"; readonly answer: Msg }
  | { readonly kind: "notice"; readonly notice: System }
  | { readonly kind: "ended"; readonly error: TokenbusError | null };

/** An input for the program of a stream. The client keeps the input until the stream ends. */
export interface SentInput {
  /** The number of the input in its stream, from 1. */
  number: number;
  readonly text: string;
  /** Whether the broker has confirmed the input in the present attempt. */
  stored: boolean;
  /** Called once: with null when the input is stored, or with the error. Null after the call. */
  report: ((error: TokenbusError | null) => void) | null;
}

/** Time limits of a call, in seconds. */
export interface Timing {
  /** Time after which the call ends with a `timeout` error. */
  readonly timeoutS?: number | undefined;
  /** If no message arrives during this time, the request is sent again. */
  readonly stallS?: number | undefined;
  /** After the first retryable failure, the request may be sent again until this time has passed. */
  readonly retryS?: number | undefined;
}

/** One request, with all its attempts, on any connection. */
export class Call {
  readonly timeoutS: number;
  readonly stallS: number;
  readonly retryS: number;
  /** Called with the events when they arrive. */
  take: (events: readonly Event[]) => void = () => {};

  /** The `stream_id` of this attempt, unique in its session. */
  number = 0;
  began = 0;
  heard = 0;
  sent = false;
  /** Whether an ATTACH is unanswered. Entries are then dropped, because they are sent again. */
  attaching = false;
  over = false;
  failedAt: number | null = null;
  tries = 0;
  resendAt: number | null = null;
  /** Number of entries that arrived in this attempt. */
  received = 0;
  /**
   * Number of entries that the broker will now send a second time, in the same order. The answer to
   * ATTACH determines this number.
   */
  repeats = 0;
  /** Last known number of times that the stream of this attempt has moved. */
  moves = 0;
  /** All inputs of the stream, in order. */
  readonly inputs: SentInput[] = [];
  /** The time at which the oldest input that is not stored is sent again; null if it was not sent. */
  inputAt: number | null = null;
  /** Number of the program's messages that were delivered in any attempt, by sequence. */
  readonly #seenMessages = new Map<number, number>();
  /** Number of the program's messages that arrived in this attempt, by sequence. */
  readonly #cameMessages = new Map<number, number>();
  /** Number of entries that were delivered in any attempt, by sequence. */
  readonly #seen = new Map<number, number>();
  /**
   * Number of entries that arrived in this attempt, by sequence. An entry is a duplicate if this
   * number is not above `#seen`.
   */
  readonly #came = new Map<number, number>();
  /** Sequences whose end was delivered, in any attempt. */
  readonly #ends = new Set<number>();
  /** Sequences that have ended in this attempt. */
  readonly #endsAgain = new Set<number>();

  constructor(
    public request: Request,
    timing: Timing,
  ) {
    this.timeoutS = timing.timeoutS ?? Infinity;
    this.stallS = timing.stallS ?? Infinity;
    this.retryS = timing.retryS ?? 0;
  }

  /**
   * Whether the client waits, after a restart of the broker, until a worker reports the stream. If
   * this is false, the client sends the request again at once. It is true if an entry of the stream
   * was received, or if `retryS` is 0.
   */
  get mayBeLive(): boolean {
    const { type } = this.request;
    return (type === "GENERATE" || type === "SCORE") && (this.received > 0 || this.retryS === 0);
  }

  /**
   * For a stream that the broker does not know, because no worker has reported it: whether the
   * client sends the request again, even if `retryS` is 0. Such a stream was lost: the broker was
   * restarted before it read the request, or the broker and the workers of the request were lost.
   */
  get resendsUnknown(): boolean {
    const { type } = this.request;
    return (type === "GENERATE" || type === "SCORE") && this.received === 0;
  }

  /** Begins another attempt with a new number. The counts of delivered entries are kept. */
  beginTry(number: number): void {
    this.number = number;
    this.sent = false;
    this.attaching = false;
    this.resendAt = null;
    this.moves = 0;
    this.inputAt = null;
    for (const sent of this.inputs) sent.stored = false;
    this.beginCopy();
  }

  /**
   * Prepares for receiving all entries of the stream again. The entries of different sequences may
   * come in another order. The counts of delivered entries are kept, so that nothing is delivered
   * twice.
   */
  beginCopy(): void {
    this.received = 0;
    this.repeats = 0;
    this.#cameMessages.clear();
    this.#came.clear();
    this.#endsAgain.clear();
  }

  /**
   * Counts an entry, and returns whether the entry is delivered. An entry that an earlier attempt
   * has delivered is not delivered again. A report (`isReport`) is delivered only if it has a new
   * message, or says that the program waits.
   */
  isNew(entry: Row | Token): boolean {
    this.received += 1;
    if (!(entry instanceof Row)) {
      const messages = this.#newMessages(entry);
      // A report is not counted as an entry: in another attempt, the same messages may come in more
      // or in fewer entries.
      if (isReport(entry)) return messages > 0 || entry.waiting > 0;
    }
    const count = (this.#came.get(entry.seq) ?? 0) + 1;
    this.#came.set(entry.seq, count);
    if (count <= (this.#seen.get(entry.seq) ?? 0)) return false;
    this.#seen.set(entry.seq, count);
    return true;
  }

  /**
   * Removes the messages that an earlier attempt has delivered; returns the number of remaining
   * messages.
   */
  #newMessages(entry: Token): number {
    const { seq, messages } = entry;
    const came = this.#cameMessages.get(seq) ?? 0;
    const seen = this.#seenMessages.get(seq) ?? 0;
    const after = came + messages.length;
    // The entry may be changed, because the reader has not received it yet.
    (messages as string[]).splice(0, Math.max(0, seen - came));
    this.#cameMessages.set(seq, after);
    this.#seenMessages.set(seq, Math.max(seen, after));
    return messages.length;
  }

  /**
   * Counts the end of a sequence, and returns the entry with a corrected `live`. In two attempts,
   * sequences may end in a different order. If an earlier attempt has delivered the end of a
   * sequence, `live` must not count this sequence, even if it is still live in this attempt.
   */
  ended(entry: Token, isNew: boolean): Token {
    this.#endsAgain.add(entry.seq);
    if (!isNew) return entry;
    const body = this.request.body as { readonly n?: number };
    const again = [...this.#ends].filter(
      (seq) => !this.#endsAgain.has(seq) && (seq < (body.n ?? 1) || this.#came.has(seq)),
    );
    this.#ends.add(entry.seq);
    return again.length > 0 ? { ...entry, live: entry.live - again.length } : entry;
  }
}

/**
 * Whether an entry is a report. A report has only messages, logs or writes, or says that the
 * program waits.
 */
function isReport(entry: Token): boolean {
  const changes = entry.token !== null || entry.backtrack > 0 || entry.prompt.length > 0;
  const read = entry.scores.length > 0 || entry.distribution !== null;
  const reports = !changes && !read && entry.parent === null;
  return reports && entry.finish_reason === null;
}
