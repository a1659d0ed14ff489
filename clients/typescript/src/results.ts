/** The sequences of a stream, collected from its entries. */

import { Row } from "./columns.js";
import { RequestTimeoutError, type TokenbusError, errorFor } from "./errors.js";
import type { Json, Token } from "./messages.js";

/**
 * One sequence of a stream: one of `n`, or a fork that a controller made.
 *
 * A fork begins with the tokens of its parent. Both sequences may later remove some of these
 * tokens. Each sequence has its own logs and storage. Nothing is removed from them.
 */
export class GeneratedSequence {
  /** All tokens after the prompt, including tokens that the controller appended. */
  readonly tokens: number[] = [];
  /** The log-probability of each token; NaN for an appended token, which was not sampled. */
  readonly logprobs: number[] = [];
  /** The text of each token; `""` if the request did not ask for text. */
  readonly texts: string[] = [];
  /** The output of the controller. */
  logs = "";
  /** The controller's writes to variables, in order, in the form of AICI's storage commands. */
  readonly storage: Json[] = [];
  /** The texts that the program has sent to the client, in order. */
  readonly messages: string[] = [];
  /** The number of the input that the program waits for; 0 if it does not wait for an input. */
  waiting = 0;
  finish_reason: Token["finish_reason"] = null;
  /** The reason and the code of a failure, or null. */
  error: string | null = null;
  code: string | null = null;
  /** How the text ended under a built-in constraint: `complete`, `closed` or `cut`. */
  constraint: Token["constraint"] = null;
  /** Number of tokens of the stream's prompt, including its buffers. */
  prompt_tokens = 0;
  /** Number of prompt tokens that were in the worker's prefix cache. */
  cached_tokens = 0;

  /**
   * For each position: the log-probabilities of the most likely tokens. Null if the entry has only
   * the token's own log-probability.
   */
  readonly #top_logprobs: (Readonly<Record<string, number>> | null)[] = [];

  constructor(
    readonly seq: number,
    /** The number of the sequence from which this one was forked; null if it is not a fork. */
    readonly parent: number | null,
  ) {}

  /** The text so far; empty if the request did not ask for text. */
  get text(): string {
    return this.texts.join("");
  }

  /**
   * For each token: the log-probabilities of the most likely tokens and of the token itself, by id.
   * Empty for an appended token.
   */
  get top_logprobs(): Readonly<Record<string, number>>[] {
    return this.#top_logprobs.map(
      (top, at) => top ?? { [String(this.tokens[at])]: this.logprobs[at] ?? NaN },
    );
  }

  /** The sum of the log-probabilities of all tokens; NaN if one of them was appended. */
  get cumulative_logprob(): number {
    return this.logprobs.reduce((sum, one) => sum + one, 0);
  }

  /** @internal */
  fork(seq: number, at: number): GeneratedSequence {
    const child = new GeneratedSequence(seq, this.seq);
    child.tokens.push(...this.tokens.slice(0, at));
    child.logprobs.push(...this.logprobs.slice(0, at));
    child.#top_logprobs.push(...this.#top_logprobs.slice(0, at));
    child.texts.push(...this.texts.slice(0, at));
    return child;
  }

  /** @internal */
  add(entry: Row | Token): void {
    this.waiting = entry instanceof Row ? 0 : entry.waiting;
    if (entry instanceof Row) {
      this.tokens.push(entry.token);
      this.logprobs.push(entry.logprob);
      this.#top_logprobs.push(null);
      this.texts.push(entry.text ?? "");
      return;
    }
    if (entry.backtrack > 0) {
      for (const parts of [this.tokens, this.logprobs, this.#top_logprobs, this.texts]) {
        parts.length = Math.max(0, parts.length - entry.backtrack);
      }
    }
    const text = entry.text ?? "";
    if (entry.token !== null) {
      this.tokens.push(entry.token);
      this.logprobs.push(entry.logprob ?? NaN);
      this.#top_logprobs.push(entry.top_logprobs ?? {});
      this.texts.push(text);
    } else if (text && this.texts.length > 0) {
      // An entry without a token may have text that the worker has held back until now. This text
      // belongs to the last token.
      this.texts.push(this.texts.pop() + text);
    }
    this.logs += entry.logs;
    this.storage.push(...entry.storage);
    this.messages.push(...entry.messages);
    if (entry.finish_reason !== null) {
      this.finish_reason = entry.finish_reason;
      this.error = entry.error;
      this.code = entry.code;
      this.constraint = entry.constraint;
    }
  }
}

/** Collects the entries of one stream. */
export class Sequences {
  readonly #bySeq = new Map<number, GeneratedSequence>();
  /** The first entry that contains the number of prompt tokens. */
  #first: Token | null = null;

  /** Adds one entry. */
  add(sent: Row | Token): void {
    const known = this.#bySeq.get(sent.seq);
    if (sent instanceof Row && known !== undefined) {
      known.add(sent);
      return;
    }
    const entry = sent instanceof Row ? sent.entry() : sent;
    if (entry.prompt_tokens > 0) this.#first ??= entry;
    let sequence = known;
    if (sequence === undefined) {
      const parent = entry.parent === null ? undefined : this.#bySeq.get(entry.parent);
      sequence =
        parent?.fork(entry.seq, entry.pos + entry.backtrack) ??
        new GeneratedSequence(entry.seq, entry.parent);
      sequence.prompt_tokens = this.#first?.prompt_tokens ?? 0;
      sequence.cached_tokens = this.#first?.cached_tokens ?? 0;
      this.#bySeq.set(entry.seq, sequence);
    }
    sequence.add(entry);
  }

  /** All sequences, by number. */
  listed(): GeneratedSequence[] {
    return [...this.#bySeq.values()].sort((a, b) => a.seq - b.seq);
  }

  /**
   * The error if the stream has timed out, or if its only sequence has failed. Null in all other
   * cases.
   */
  failure(): TokenbusError | null {
    const ended = [...this.#bySeq.values()];
    if (ended.some((one) => one.finish_reason === "timeout")) {
      return new RequestTimeoutError("timeout", "the timeout of the request has expired");
    }
    const [only] = ended;
    if (ended.length === 1 && only?.finish_reason === "error") {
      return errorFor(only.code ?? "internal", only.error ?? "the sequence failed");
    }
    return null;
  }
}

/** The answer of `score`: each token of the scored text, and its natural log-probability. */
export type Scores = Pick<
  GeneratedSequence,
  "tokens" | "logprobs" | "texts" | "cumulative_logprob" | "prompt_tokens" | "cached_tokens"
>;
