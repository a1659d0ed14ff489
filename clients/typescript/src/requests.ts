/** Creates calls from the arguments of the client's methods. */

import { Call, type Request, type Timing } from "./calls.js";
import { RequestError } from "./errors.js";
import { type Generate, MAX_MODULE_BYTES, type Score, type System } from "./messages.js";
import {
  ASK_OPTIONS,
  GENERATE_OPTIONS,
  SCORE_OPTIONS,
  STATUS_OPTIONS,
  UPLOAD_OPTIONS,
  checkOptions,
} from "./options.js";

/** Text, which the worker tokenizes, or token ids. */
export type Prompt = string | readonly number[] | Uint32Array;

/** Options of all methods that wait for an answer. */
export interface AskOptions {
  /** Time after which the call ends with a RequestTimeoutError, in seconds. */
  readonly timeout_s?: number | undefined;
  /** A signal that ends the call. The promise is rejected with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** The options that `generate`, `run` and `score` have in common. Times are in seconds. */
export interface StreamOptions extends AskOptions {
  /** If no message arrives during this time, the request is sent again. */
  readonly stall_s?: number | undefined;
  /**
   * If a queue is full or a worker is lost, the request is sent again until this time has passed.
   * Default: 30.
   */
  readonly retry_s?: number | undefined;
  /** Called with each notice: loading, queued, retrying. */
  readonly on_system?: ((notice: System) => void) | undefined;
}

type Given<T> = Omit<T, "stream_id" | "prompt" | "scored" | "timeout_s">;

/** The options of `generate`: the fields of GENERATE and the package's own options. */
export type GenerateOptions = Given<Generate> & StreamOptions;

/** The options of `score`. */
export type ScoreOptions = Given<Score> & StreamOptions;

/** The options of `run`. */
export interface RunOptions extends Omit<GenerateOptions, "controller" | "controller_arg"> {
  /** The argument of the controller: text unchanged, an object or an array as JSON. */
  readonly arg?: Generate["controller_arg"];
}

/** The options of `status`. */
export interface StatusOptions extends AskOptions {
  /** Whether to list the live streams too. */
  readonly streams?: boolean | undefined;
}

/** The options of `upload`. */
export interface UploadOptions extends AskOptions {
  /** A name for the module, in addition to its id. */
  readonly tag?: string | undefined;
}

const RETRY_S = 30;
/** Default of `timeout_s` for requests with a short answer. */
const ASK_S = 30;
/** Default of `timeout_s` for an upload. A large module takes long to compile. */
const UPLOAD_S = 120;
/**
 * If no worker is available for a request to the store of modules, it is sent again for this number
 * of seconds.
 */
const STORE_RETRY_S = 10;

/**
 * The call of a GENERATE. A sampled request receives a seed. So if the request is sent again, the
 * tokens are the same.
 */
export function generateCall(prompt: Prompt, options: GenerateOptions): Call {
  checkOptions(options, GENERATE_OPTIONS);
  const { fields, timing } = split(options);
  if (fields.controller_arg != null && !fields.controller) {
    throw new RequestError(
      "invalid_field",
      "controller_arg is given without a controller; add controller",
      { path: "$.controller_arg" },
    );
  }
  const body: Generate = {
    text: typeof prompt === "string",
    ...fields,
    seed: fields.seed ?? (fields.temperature ? randomSeed() : undefined),
    prompt: checkedPrompt(prompt, "$.prompt"),
    timeout_s: timing.timeoutS,
    stream_id: 0,
  };
  return checkedCall({ type: "GENERATE", body }, timing);
}

/** The call of a SCORE. */
export function scoreCall(prompt: Prompt, scored: Prompt, options: ScoreOptions): Call {
  checkOptions(options, SCORE_OPTIONS);
  const { fields, timing } = split(options);
  const body: Score = {
    text: typeof scored === "string",
    ...fields,
    prompt: checkedPrompt(prompt, "$.prompt"),
    scored: checkedPrompt(scored, "$.scored"),
    timeout_s: timing.timeoutS,
    stream_id: 0,
  };
  return checkedCall({ type: "SCORE", body }, timing);
}

/** The call of a BUFFER. If `content` is null, the call deletes the buffer. */
export function bufferCall(name: string, content: Prompt | null, options: AskOptions): Call {
  const prompt = content === null ? null : checkedPrompt(content, "$.tokens");
  const body =
    typeof prompt === "string" ? { name, text: prompt } : { name, tokens: prompt ?? undefined };
  return checkedCall({ type: "BUFFER", body }, asking(options));
}

/** The call of an UPLOAD. */
export function uploadCall(wasm: Uint8Array, options: UploadOptions): Call {
  checkOptions(options, UPLOAD_OPTIONS);
  if (wasm.byteLength > MAX_MODULE_BYTES) {
    throw new RequestError(
      "too_large",
      `the module has ${wasm.byteLength} bytes; the limit is ${MAX_MODULE_BYTES}`,
      { path: "$.data" },
    );
  }
  const body = { stream_id: 0, tag: options.tag };
  return checkedCall({ type: "UPLOAD", body, data: wasm }, storing(options, UPLOAD_S));
}

/**
 * The call of a request to the store of modules, except an upload. The request may be sent again,
 * because a second request has no further effect.
 */
export function storeCall(request: Request, options: AskOptions): Call {
  checkOptions(options, ASK_OPTIONS);
  return checkedCall(request, storing(options, ASK_S));
}

/** The call of a request that the service answers only after it has loaded the model. */
export function modelCall(request: Request, options: AskOptions): Call {
  const timing = asking(options);
  return checkedCall(request, { ...timing, retryS: timing.timeoutS });
}

/** The call of a STATUS. */
export function statusCall(options: StatusOptions): Call {
  checkOptions(options, STATUS_OPTIONS);
  const body = { stream_id: 0, streams: options.streams };
  return checkedCall({ type: "STATUS", body }, { timeoutS: options.timeout_s ?? ASK_S });
}

function asking(options: AskOptions): Timing {
  checkOptions(options, ASK_OPTIONS);
  return { timeoutS: options.timeout_s ?? ASK_S };
}

function storing(options: AskOptions, longest: number): Timing {
  return { timeoutS: options.timeout_s ?? longest, retryS: STORE_RETRY_S };
}

/** Splits options into the fields of the message and the options of the call. */
function split<T extends StreamOptions>(options: T) {
  const { timeout_s, stall_s, retry_s, on_system, signal, ...fields } = options;
  if (stall_s != null) checkSeconds("stall_s", stall_s, stall_s > 0, "above 0");
  if (retry_s != null) checkSeconds("retry_s", retry_s, retry_s >= 0, "of at least 0");
  const timing = { timeoutS: timeout_s, stallS: stall_s, retryS: retry_s ?? RETRY_S };
  return { fields, timing } as const;
}

function checkSeconds(name: string, seconds: unknown, inRange: boolean, expected: string): void {
  if (typeof seconds === "number" && inRange) return;
  const shown = typeof seconds === "number" ? String(seconds) : JSON.stringify(seconds);
  throw new RequestError(
    "invalid_field",
    `${name} is ${shown}; it must be a number of seconds ${expected}`,
    { path: `$.${name}` },
  );
}

function randomSeed(): number {
  return Math.floor(Math.random() * Number.MAX_SAFE_INTEGER);
}

function checkedPrompt(prompt: Prompt, path: string): string | readonly number[] {
  if (typeof prompt === "string") return prompt;
  const ids = Array.from(prompt);
  const wrong = ids.findIndex((id) => !Number.isInteger(id) || id < 0 || id > 0xffff_ffff);
  if (wrong >= 0) {
    throw new RequestError(
      "invalid_field",
      `${String(ids[wrong])} at ${path}[${wrong}] is not a token id; expected a whole number from 0 ` +
        "to 2**32 - 1",
      { path: `${path}[${wrong}]` },
    );
  }
  return ids;
}

function checkedCall(request: Request, timing: Timing): Call {
  for (const [name, value] of Object.entries(request.body)) {
    const checked = Array.isArray(value) && ["prompt", "scored", "tokens"].includes(name);
    if (!checked) checkJson(value, `$.${name}`);
  }
  return new Call(request, timing);
}

/** Throws RequestError if JSON cannot represent a value, or if a text is not valid Unicode. */
function checkJson(value: unknown, path: string): void {
  if (typeof value === "string") {
    if (!/\p{Surrogate}/u.test(value)) return;
    throw new RequestError(
      "invalid_field",
      `the text at ${path} has half of a surrogate pair; it must be valid Unicode`,
      { path },
    );
  }
  if (typeof value === "bigint" || (typeof value === "number" && !Number.isFinite(value))) {
    throw new RequestError(
      "invalid_field",
      `${String(value)} at ${path} is not valid JSON; numbers must be finite and of type number`,
      { path },
    );
  }
  if (Array.isArray(value)) {
    value.forEach((item, index) => checkJson(item, `${path}[${index}]`));
  } else if (typeof value === "object" && value !== null) {
    for (const [name, item] of Object.entries(value)) {
      checkJson(name, path);
      checkJson(item, `${path}.${name}`);
    }
  }
}
