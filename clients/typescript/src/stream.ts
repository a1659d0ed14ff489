/** The tokens of one request, as they arrive. */

import type { Call, Event } from "./calls.js";
import { Row } from "./columns.js";
import type { Connection } from "./connection.js";
import type { Msg, System, Token } from "./messages.js";
import { type GeneratedSequence, Sequences } from "./results.js";

/**
 * The tokens of one request, as they arrive. Iterate over the stream with `for await`.
 *
 * The request is cancelled if the loop is left, if `cancel()` is called, or if the request's
 * AbortSignal is aborted. At its end, a failed stream throws a TokenbusError, and an aborted stream
 * throws the signal's reason. Unread entries stay in memory. So cancel a stream that you do not
 * need any more.
 */
export class TokenStream implements AsyncIterableIterator<Token> {
  readonly #connection: Connection;
  readonly #call: Call;
  readonly #signal: AbortSignal | undefined;
  readonly #notify: ((notice: System) => void) | undefined;
  readonly #entries: (Row | Token)[] = [];
  readonly #read = new Sequences();
  #answer: Msg | null = null;
  #waiting: (() => void)[] = [];
  #state: "running" | "ended" | "cancelled" = "running";
  #failure: unknown = null;
  /** Number of inputs that were sent to the program, not counting refused inputs. */
  #inputs = 0;

  /** @internal */
  constructor(
    connection: Connection,
    call: Call,
    signal?: AbortSignal,
    notify?: (notice: System) => void,
  ) {
    signal?.throwIfAborted();
    this.#connection = connection;
    this.#call = call;
    this.#signal = signal;
    this.#notify = notify;
    call.take = (events) => this.#take(events);
    connection.submit(call);
    signal?.addEventListener("abort", this.#onAbort);
  }

  /** The sequences up to the last entry that was read. */
  get sequences(): GeneratedSequence[] {
    return this.#read.listed();
  }

  /**
   * Whether the program waits for an input (`ctx.receive`) that was not sent yet, according to the
   * entries that have been read. Workers of earlier releases do not report that a program waits;
   * the value is then false.
   */
  get waiting(): boolean {
    const running = this.sequences.filter((one) => one.finish_reason === null);
    return this.#state === "running" && running.some((one) => one.waiting > this.#inputs);
  }

  /** Reads to the end; returns all sequences. */
  async wait(): Promise<GeneratedSequence[]> {
    for (;;) {
      for (const entry of this.#entries.splice(0)) this.#read.add(entry);
      if (this.#state !== "running") break;
      await this.#arrival();
    }
    await this.next(); // Throws if the stream has failed.
    if (this.#state === "cancelled") {
      throw new Error(
        "this stream was cancelled before its end; its sequences have the entries that were read",
      );
    }
    return this.sequences;
  }

  /** Reads to the end; returns the text of the first sequence. Rejected if the stream has no text. */
  async text(): Promise<string> {
    const { type, body } = this.#call.request;
    if (type !== "GENERATE" || body.text !== true) {
      throw new TypeError(
        "this stream has no text, because its prompt was token ids or text was false; " +
          "use text: true",
      );
    }
    return (await this.wait())[0]?.text ?? "";
  }

  /** Reads to the end; returns the tokens of the first sequence. */
  async tokens(): Promise<number[]> {
    return (await this.wait())[0]?.tokens ?? [];
  }

  /**
   * Sends an input to the program of this stream. The program receives the input from
   * `ctx.receive()` exactly once, even if processes die. Resolved when the input is stored. Rejected
   * if too many inputs wait for the program, or if the stream has ended or has no program.
   */
  async send(text: string): Promise<void> {
    this.#inputs++;
    try {
      await this.#connection.sendInput(this.#call, text);
    } catch (fault) {
      this.#inputs--;
      throw fault;
    }
  }

  /** Cancels the request unless it has ended. A loop over the stream ends. */
  cancel(): void {
    if (this.#state !== "running") return;
    this.#end("cancelled", null);
    this.#entries.length = 0;
    this.#connection.cancel(this.#call);
  }

  /** The next entry. */
  async next(): Promise<IteratorResult<Token, undefined>> {
    for (;;) {
      const entry = this.#entries.shift();
      if (entry !== undefined) {
        this.#read.add(entry);
        return { done: false, value: entry instanceof Row ? entry.entry() : entry };
      }
      if (this.#state !== "running") break;
      await this.#arrival();
    }
    const failure = this.#failure ?? (this.#state === "ended" ? this.#read.failure() : null);
    if (failure !== null) throw failure;
    return { done: true, value: undefined };
  }

  /** Cancels the request. Called when a loop over the stream is left. */
  async return(): Promise<IteratorResult<Token, undefined>> {
    this.cancel();
    return { done: true, value: undefined };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** @internal The answer to a request that is not a stream. */
  async answer(): Promise<Msg> {
    await this.wait();
    return this.#answer ?? { stream_id: 0, moves: 0 };
  }

  /** Resolved at the next event. */
  #arrival(): Promise<void> {
    return new Promise((wake) => this.#waiting.push(wake));
  }

  readonly #onAbort = (): void => {
    this.cancel();
    this.#failure = this.#signal?.reason;
  };

  #take(events: readonly Event[]): void {
    for (const event of events) {
      if (event instanceof Row) {
        this.#entries.push(event);
        continue;
      }
      switch (event.kind) {
        case "entry":
          this.#entries.push(event.entry);
          break;
        case "answer":
          this.#answer = event.answer;
          break;
        case "notice":
          // The function is not called now, but later, so that its exceptions do not affect other
          // streams.
          queueMicrotask(() => this.#notify?.(event.notice));
          break;
        case "ended":
          this.#end("ended", event.error);
      }
    }
    this.#wake();
  }

  #end(state: "ended" | "cancelled", failure: unknown): void {
    this.#state = state;
    this.#failure = failure;
    this.#signal?.removeEventListener("abort", this.#onAbort);
    this.#wake();
  }

  #wake(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const wake of waiting) wake();
  }
}
