/** Tokens in columns, as `protocol/columns.py` has them, and the entries that they stand for. */

import { type Token, readToken } from "./messages.js";

/**
 * The body of a TOKEN in columns: little-endian arrays, with a token of a stream in each row, and
 * entries of the streams with something that no column has.
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
  /** Sequences, u32 each; absent where all of them are 0. */
  readonly q?: Uint8Array;
  readonly e?: readonly Parameters<typeof readToken>[0][];
}

const NONE = new Uint8Array(0);

/**
 * The entries of a body: those of the rows, then the others. Throws RangeError where the columns do
 * not have the same length.
 */
export function columnEntries(body: TokenColumns): Token[] {
  const entries: Token[] = [];
  const { s = NONE, t = NONE, l = NONE, p = NONE, q = NONE, e = [] } = body;
  const rows = s.length / 8;
  const seqs = q.length > 0;
  if (
    !Number.isInteger(rows) ||
    [t, p, seqs ? q : t].some((column) => column.length !== 4 * rows) ||
    l.length !== 8 * rows
  ) {
    throw new RangeError("the columns of a TOKEN do not have the same length");
  }
  const streams = viewOf(s);
  const tokens = viewOf(t);
  const logprobs = viewOf(l);
  const positions = viewOf(p);
  const numbers = viewOf(q);
  for (let row = 0; row < rows; row += 1) {
    const token = tokens.getUint32(4 * row, true);
    const logprob = logprobs.getFloat64(8 * row, true);
    entries.push(
      readToken({
        token,
        stream_id:
          streams.getUint32(8 * row, true) + 2 ** 32 * streams.getUint32(8 * row + 4, true),
        logprob,
        finish_reason: null,
        top_logprobs: { [token]: logprob },
        pos: positions.getUint32(4 * row, true),
        seq: seqs ? numbers.getUint32(4 * row, true) : 0,
      }),
    );
  }
  for (const entry of e) entries.push(readToken(entry));
  return entries;
}

function viewOf(column: Uint8Array): DataView {
  return new DataView(column.buffer, column.byteOffset, column.byteLength);
}
