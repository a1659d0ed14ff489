/** Tests the decoding of MessagePack and columns. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Row } from "../src/columns.js";
import { unpackAll } from "../src/msgpack.js";
import { decodeMessages } from "../src/transport.js";

const bytes = (...parts: (number | readonly number[] | Uint8Array | string)[]) =>
  Uint8Array.from(
    parts.flatMap((part) =>
      typeof part === "number" ? [part] : [...(typeof part === "string" ? utf8(part) : part)],
    ),
  );
const utf8 = (text: string) => new TextEncoder().encode(text);

/** The field `name` of a TOKEN body in columns, with little-endian numbers of a type. */
function column(name: string, type: "f64" | "u32" | "u64", values: readonly number[]): Uint8Array {
  const size = type === "u32" ? 4 : 8;
  const view = new DataView(new ArrayBuffer(size * values.length));
  values.forEach((value, index) => {
    if (type === "f64") view.setFloat64(8 * index, value, true);
    else if (type === "u32") view.setUint32(4 * index, value, true);
    else view.setBigUint64(8 * index, BigInt(value), true);
  });
  return bytes(0xa1, name, 0xc4, view.byteLength, new Uint8Array(view.buffer));
}

test("every type of value is decoded to the value that JSON would have", () => {
  const cases: [Uint8Array, unknown][] = [
    [bytes(0x00), 0],
    [bytes(0x7f), 127],
    [bytes(0xff), -1],
    [bytes(0xe0), -32],
    [bytes(0xc0), null],
    [bytes(0xc2), false],
    [bytes(0xc3), true],
    [bytes(0xcc, 200), 200],
    [bytes(0xcd, 1, 0), 256],
    [bytes(0xce, 255, 255, 255, 255), 2 ** 32 - 1],
    [bytes(0xcf, 0, 0, 0, 1, 0, 0, 0, 0), 2 ** 32],
    [bytes(0xd0, 0x80), -128],
    [bytes(0xd1, 0xff, 0), -256],
    [bytes(0xd2, 0xff, 0xff, 0, 0), -65536],
    [bytes(0xd3, 255, 255, 255, 254, 255, 255, 255, 255), -(2 ** 32) - 1],
    [bytes(0xca, 0x3f, 0xc0, 0, 0), 1.5],
    [bytes(0xcb, 0xbf, 0xf8, 0, 0, 0, 0, 0, 0), -1.5],
    [bytes(0xa5, "token"), "token"],
    [bytes(0xa2, "é"), "é"],
    [bytes(0xd9, 40, "x".repeat(38), "é"), "x".repeat(38) + "é"],
    [bytes(0xda, 1, 0, "y".repeat(256)), "y".repeat(256)],
    [bytes(0xdb, 0, 0, 0, 1, "z"), "z"],
    [bytes(0xc4, 2, 1, 2), Uint8Array.of(1, 2)],
    [bytes(0xc5, 0, 1, 7), Uint8Array.of(7)],
    [bytes(0xc6, 0, 0, 0, 0), new Uint8Array(0)],
    [bytes(0x92, 1, 0xc0), [1, null]],
    [bytes(0xdc, 0, 1, 5), [5]],
    [bytes(0xdd, 0, 0, 0, 0), []],
    [bytes(0x82, 0xa1, "a", 1, 0xcd, 4, 0, 0x80), { a: 1, 1024: {} }],
    [bytes(0xde, 0, 1, 0xd9, 1, "n", 0x90), { n: [] }],
    [bytes(0xdf, 0, 0, 0, 1, 0xa1, "n", 2), { n: 2 }],
  ];
  for (const [sent, value] of cases) assert.deepEqual(unpackAll(sent), [value]);
  assert.equal(unpackAll(bytes(...cases.map(([sent]) => sent))).length, cases.length);
});

test("field names with the same hash are not confused", () => {
  const named = (name: string) => bytes(0x81, 0xa4, name, 1);
  for (const name of ["abcd", "axyd", "abcd", "aéd", "axyd"]) {
    assert.deepEqual(unpackAll(named(name)), [{ [name]: 1 }]);
  }
});

test("invalid and incomplete messages are refused", () => {
  const whole = bytes(0x82, 0xa1, "a", 0x92, 0xcd, 1, 2, 0xc4, 1, 9, 0xa3, "key", 0xa2, "xy");
  for (let size = 1; size < whole.length; size += 1) {
    assert.throws(() => unpackAll(whole.subarray(0, size)), RangeError, String(size));
  }
  assert.throws(() => unpackAll(bytes(0xc1)), RangeError);
  assert.throws(() => unpackAll(bytes(0xd4, 1, 1)), RangeError);
  assert.throws(() => unpackAll(bytes(...Array<number>(5000).fill(0x91), 1)), /nested too deeply/);
  assert.throws(() => unpackAll(bytes(0xa1, 0xff)), TypeError);
  const [object] = unpackAll(bytes(0x81, 0xa9, "__proto__", 0x81, 0xa1, "x", 1));
  assert.equal((object as { x?: number }).x, undefined);
});

test("the rows of columns are entries, and several bodies are several messages", () => {
  const rows = bytes(
    0x86,
    column("s", "u64", [1, 2 ** 40]),
    column("t", "u32", [70_000, 5]),
    column("l", "f64", [-0.5, -0.25]),
    column("p", "u32", [3, 4]),
    column("q", "u32", [0, 2]),
    bytes(0xa1, "e", 0x91, 0x82, 0xa5, "token", 9, 0xa9, "stream_id", 7),
  );
  const plain = bytes(
    0x84,
    column("s", "u64", [1]),
    column("t", "u32", [6]),
    column("l", "f64", [-1]),
    column("p", "u32", [4]),
  );
  const none = bytes(0x80);
  const messages = decodeMessages("TOKEN", bytes(rows, plain, none));
  const bodies = messages.map(({ type, body }) =>
    type === "TOKEN" ? body.map((one) => (one instanceof Row ? one.entry() : one)) : [],
  );
  assert.deepEqual(
    bodies.map((body) => body.map((entry) => [entry.stream_id, entry.token, entry.pos])),
    [
      [
        [1, 70_000, 3],
        [2 ** 40, 5, 4],
        [7, 9, 0],
      ],
      [[1, 6, 4]],
      [],
    ],
  );
  const [[first, second] = [], [third] = []] = bodies;
  assert.deepEqual([first?.seq, second?.seq, third?.seq], [0, 2, 0]);
  assert.deepEqual(second?.top_logprobs, { 5: -0.25 });
  assert.deepEqual([first?.logprob, first?.finish_reason, first?.parent], [-0.5, null, null]);
});

test("a row has the text at its place in the column of texts, if there is one", () => {
  const rows = [
    column("s", "u64", [1, 2, 3]),
    column("t", "u32", [5, 6, 7]),
    column("l", "f64", [-1, -1, -1]),
    column("p", "u32", [0, 0, 0]),
  ];
  const texts = bytes(0xa1, "x", 0x93, 0xa2, "ho", 0xc0, 0xa0);
  const [message] = decodeMessages("TOKEN", bytes(0x85, ...rows, texts));
  assert.ok(message?.type === "TOKEN");
  const read = message.body.map((one) => (one instanceof Row ? one.entry() : one).text);
  assert.deepEqual(read, ["ho", undefined, ""]);
  const short = bytes(0xa1, "x", 0x91, 0xa0);
  assert.deepEqual(decodeMessages("TOKEN", bytes(0x85, ...rows, short)), []);
});

test("columns that do not have the same length are left out", () => {
  const short = bytes(
    0x84,
    column("s", "u64", [1, 2]),
    column("t", "u32", [5]),
    column("l", "f64", [-1, -1]),
    column("p", "u32", [0, 0]),
  );
  assert.deepEqual(decodeMessages("TOKEN", short), []);
  assert.deepEqual(decodeMessages("TOKEN", bytes(0x81, column("t", "u32", [5]))), []);
  assert.deepEqual(decodeMessages("PONG", bytes(0xc1)), []);
});
