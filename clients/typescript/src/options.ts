/** The names of all options, and a check of the options that JavaScript code gives. */

import { GENERATE_FIELDS, SCORE_FIELDS } from "./messages.js";
import type { ClientOptions } from "./client.js";
import type {
  AskOptions,
  RunOptions,
  StatusOptions,
  StreamOptions,
  UploadOptions,
} from "./requests.js";

type Own<T, Base> = Omit<T, keyof Base>;

const ASK = named<AskOptions>({ timeout_s: true, signal: true });
const STREAM = [
  ...ASK,
  ...named<Own<StreamOptions, AskOptions>>({ stall_s: true, retry_s: true, on_system: true }),
];
/**
 * Fields of messages that are not options: the arguments of methods, and a field that the session
 * sets.
 */
const NOT_OPTIONS: readonly string[] = ["stream_id", "prompt", "scored"];

export const CLIENT_OPTIONS: ReadonlySet<string> = new Set(
  named<ClientOptions>({ patience_s: true, keep_s: true, api_key: true }),
);
export const ASK_OPTIONS: ReadonlySet<string> = new Set(ASK);
export const STATUS_OPTIONS: ReadonlySet<string> = new Set([
  ...ASK,
  ...named<Own<StatusOptions, AskOptions>>({ streams: true }),
]);
export const UPLOAD_OPTIONS: ReadonlySet<string> = new Set([
  ...ASK,
  ...named<Own<UploadOptions, AskOptions>>({ tag: true }),
]);
export const GENERATE_OPTIONS = withFields(GENERATE_FIELDS);
export const SCORE_OPTIONS = withFields(SCORE_FIELDS);
export const RUN_OPTIONS: ReadonlySet<string> = new Set([
  ...[...GENERATE_OPTIONS].filter((name) => name !== "controller" && name !== "controller_arg"),
  "arg" satisfies keyof RunOptions,
]);

/**
 * Throws TypeError if an option is not in `known`. The error names the most similar known option.
 * If no known option is similar, it names all known options.
 */
export function checkOptions(options: object, known: ReadonlySet<string>): void {
  for (const name of Object.keys(options)) {
    if (!known.has(name)) throw new TypeError(`unknown option ${name}; ${remedy(name, known)}`);
  }
}

/** The names of all fields of `T`. The compiler checks that `keys` has every field. */
function named<T>(keys: Readonly<Record<keyof T, true>>): readonly string[] {
  return Object.keys(keys);
}

function withFields(fields: readonly string[]): ReadonlySet<string> {
  return new Set([...STREAM, ...fields.filter((name) => !NOT_OPTIONS.includes(name))]);
}

function remedy(name: string, known: ReadonlySet<string>): string {
  const names = [...known].sort();
  const distances = names.map((other) => distance(name, other));
  const least = Math.min(...distances);
  if (2 * least > name.length) return `the options are ${names.join(", ")}`;
  return `did you mean ${names[distances.indexOf(least)]}?`;
}

/**
 * The edit distance of two texts: how many characters must be inserted, deleted or replaced to
 * change `a` into `b`.
 */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, column) => column);
  for (const [index, letter] of [...a].entries()) {
    const next = [index + 1];
    for (let column = 1; column <= b.length; column += 1) {
      const [left = 0, above = 0, corner = 0] = [next[column - 1], row[column], row[column - 1]];
      const replaced = corner + (letter === b[column - 1] ? 0 : 1);
      next.push(Math.min(left + 1, above + 1, replaced));
    }
    row = next;
  }
  return row[b.length] ?? 0;
}
