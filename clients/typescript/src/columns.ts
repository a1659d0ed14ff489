/** Reads tokens in columns (`protocol/columns.py`) as rows, and converts rows to entries. */

import { type Token, readToken } from "./messages.js";

/**
 * The body of a TOKEN in columns. Each column is a little-endian array with a value for each token.
 * Entries whose fields do not fit into the columns are in `e`.
 */
export interface TokenColumns {
  /** Stream ids, u64 each. */
  readonly s?: Uint8Array;
  /** Token ids, u32 each. */
  readonly t?: Uint8Array;
  /** Log-probabilities, f64 each. */
  readonly l?: Uint8Array;
  /** Positions, u32 each. */
  readonly p?: Uint8Array;
  /** Sequence numbers, u32 each; absent if all of them are 0. */
  readonly q?: Uint8Array;
  /** Texts. A row without text has null. Absent if no row has text. */
  readonly x?: readonly (string | null)[];
  /**
   * Values of `processed`, f64 each. A row without a value has NaN. Absent if no row has a value.
   */
  readonly d?: Uint8Array;
  /**
   * Values of `kept`: a number, or ids as u32 each. A row without a value has null. Absent if no
   * row has a value.
   */
  readonly k?: readonly (number | Uint8Array | null)[];
  /** Entries whose fields do not fit into the columns. */
  readonly e?: readonly Parameters<typeof readToken>[0][];
}

/**
 * A token whose fields all fit into the columns. An entry has more fields, so creating a row takes
 * less time.
 */
export class Row {
  constructor(
    readonly stream_id: number,
    readonly token: number,
    readonly logprob: number,
    readonly pos: number,
    readonly seq: number,
    readonly text: string | null = null,
    readonly processed: number | null = null,
    readonly kept: number | Uint8Array | null = null,
  ) {}

  /** Converts the row to an entry. */
  entry(): Token {
    const { stream_id, token, logprob, pos, seq } = this;
    const top_logprobs = { [token]: logprob };
    const text = this.text === null ? {} : { text: this.text };
    const processed = this.processed === null ? {} : { processed: this.processed };
    const kept = this.kept === null ? {} : { kept: keptOf(this.kept) };
    const entry = { stream_id, token, logprob, finish_reason: null, top_logprobs, pos, seq };
    return readToken({ ...entry, ...text, ...processed, ...kept });
  }
}

function keptOf(kept: number | Uint8Array): number | number[] {
  if (typeof kept === "number") return kept;
  const ids = viewOf(kept);
  return Array.from({ length: kept.length / 4 }, (_, place) => ids.getUint32(4 * place, true));
}

const NONE = new Uint8Array(0);

/**
 * The rows of a body, followed by its entries. Throws RangeError if the columns differ in length.
 */
export function readColumns(body: TokenColumns): (Row | Token)[] {
  const found: (Row | Token)[] = [];
  const { s = NONE, t = NONE, l = NONE, p = NONE, q = NONE, x = [], e = [] } = body;
  const { d = NONE, k = [] } = body;
  const rows = s.length / 8;
  const seqs = q.length > 0;
  if (
    !Number.isInteger(rows) ||
    [t, p, seqs ? q : t].some((column) => column.length !== 4 * rows) ||
    l.length !== 8 * rows ||
    (x.length > 0 && x.length !== rows) ||
    (d.length > 0 && d.length !== 8 * rows) ||
    (k.length > 0 && k.length !== rows)
  ) {
    throw new RangeError("the columns of a TOKEN differ in length");
  }
  const streams = viewOf(s);
  const tokens = viewOf(t);
  const logprobs = viewOf(l);
  const positions = viewOf(p);
  const numbers = viewOf(q);
  const processed = viewOf(d);
  for (let row = 0; row < rows; row += 1) {
    const value = d.length > 0 ? processed.getFloat64(8 * row, true) : Number.NaN;
    found.push(
      new Row(
        streams.getUint32(8 * row, true) + 2 ** 32 * streams.getUint32(8 * row + 4, true),
        tokens.getUint32(4 * row, true),
        logprobs.getFloat64(8 * row, true),
        positions.getUint32(4 * row, true),
        seqs ? numbers.getUint32(4 * row, true) : 0,
        x[row] ?? null,
        Number.isNaN(value) ? null : value,
        k[row] ?? null,
      ),
    );
  }
  for (const entry of e) found.push(readToken(entry));
  return found;
}

function viewOf(column: Uint8Array): DataView {
  return new DataView(column.buffer, column.byteOffset, column.byteLength);
}
