/** Tests the session without a connection. The test passes messages and times. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Call, type Event, type Outgoing } from "../src/calls.js";
import { Row } from "../src/columns.js";
import { type ServerMessages, readMessage, readToken } from "../src/messages.js";
import { bufferCall, generateCall, scoreCall, statusCall, uploadCall } from "../src/requests.js";
import { Session } from "../src/session.js";

const UNKNOWN: readonly [call: (options: object) => unknown, option: string, message: RegExp][] = [
  [(options) => generateCall("x", options), "max_token", /^unknown option max_token; .*max_tokens\?$/],
  [(options) => generateCall("x", options), "maxTokens", /did you mean max_tokens\?$/],
  [(options) => generateCall("x", options), "streaming", /^unknown option streaming; the options are /],
  [(options) => generateCall("x", options), "stream_id", /^unknown option stream_id; /],
  [(options) => scoreCall("x", "y", options), "timeout", /did you mean timeout_s\?$/],
  [(options) => bufferCall("x", "y", options), "timeout", /did you mean timeout_s\?$/],
  [(options) => uploadCall(new Uint8Array(), options), "tags", /did you mean tag\?$/],
  [(options) => statusCall(options), "stream", /did you mean streams\?$/],
];

const WRONG_TIMES: readonly [options: object, message: string][] = [
  [{ stall_s: NaN }, "stall_s is NaN; it must be a number of seconds above 0"],
  [{ stall_s: 0 }, "stall_s is 0; it must be a number of seconds above 0"],
  [{ retry_s: "a" }, 'retry_s is "a"; it must be a number of seconds of at least 0'],
  [{ retry_s: -1 }, "retry_s is -1; it must be a number of seconds of at least 0"],
];

for (const [options, message] of WRONG_TIMES) {
  test(`the options ${JSON.stringify(options)} are refused`, () => {
    assert.throws(() => generateCall("x", options), { code: "invalid_field", message });
  });
}

for (const [call, option, message] of UNKNOWN) {
  test(`the unknown option ${option} is refused`, () => {
    assert.throws(() => call({ [option]: 1 }), { name: "TypeError", message });
  });
}

/** A session whose time the test sets, and the events of its calls. */
class Bench {
  now = 0;
  readonly session = new Session("tcp://x", 5, 0);
  readonly #events = new Map<Call, Event[]>();

  constructor() {
    this.session.connected(0);
    this.hear("WELCOME", { version: 1, encoding: "json", session: "T" });
    this.sent();
  }

  hear(type: keyof ServerMessages, body: unknown): void {
    const message = readMessage(type, body);
    assert(message);
    this.session.onMessage(message, this.now);
  }

  /** Passes an entry of the stream of `call` to the session. */
  token(call: Call, token: number, more: object = {}): void {
    const entry = { token, stream_id: call.number, logprob: -1, finish_reason: null, ...more };
    this.hear("TOKEN", [entry]);
  }

  pass(seconds: number): void {
    this.now += seconds;
    this.session.onTime(this.now);
  }

  /** The messages since the last call, without PINGs that only the clock causes. */
  sent(): Outgoing[] {
    const { outgoing } = this.session;
    this.session.outgoing = [];
    return outgoing.filter(({ type, body }) => type !== "PING" || body.n !== undefined);
  }

  begin(call = generateCall("x", { temperature: 1 })): Call {
    this.session.submit(call, this.now);
    return call;
  }

  /** The events of a call, without notices. */
  events(call: Call): (number | null | string)[] {
    for (const [of, events] of this.session.ready) {
      this.#events.set(of, [...(this.#events.get(of) ?? []), ...events]);
    }
    this.session.ready = [];
    return (this.#events.get(call) ?? []).flatMap((event): (number | null | string)[] => {
      if (event instanceof Row) return [event.token];
      if (event.kind === "entry") return [event.entry.token];
      return event.kind === "ended" ? [event.error?.code ?? "ended"] : [];
    });
  }
}

test("entries have the defaults of the fields that are absent", () => {
  const sent = { token: 5, stream_id: 1, logprob: -0.5, finish_reason: null };
  const { pos, seq, parent, logs, storage, text } = readToken(sent);
  assert.deepEqual([pos, seq, parent, logs, storage, text], [0, 0, null, "", [], undefined]);
  assert.equal(readMessage("NEW", {}), null);
});

test("calls wait for the WELCOME, and then go out in their order", () => {
  const session = new Session("tcp://x", 5, 0);
  const call = generateCall("x", {});
  session.submit(call, 0);
  session.connected(0);
  assert.deepEqual(
    session.outgoing.map(({ type }) => type),
    ["HELLO"],
  );
  const welcome = readMessage("WELCOME", { version: 1, encoding: "json", session: "T" });
  assert(welcome);
  session.onMessage(welcome, 0);
  assert.deepEqual(
    session.outgoing.map(({ type }) => type),
    ["HELLO", "GENERATE"],
  );
});

test("live counts the sequences whose end the reader has not seen", () => {
  const bench = new Bench();
  const call = bench.begin(generateCall("x", { temperature: 1, n: 3 }));
  const end = (seq: number, live: number) =>
    bench.token(call, seq, { seq, live, finish_reason: "stop" });
  end(0, 2);
  bench.hear("ERROR", { code: "worker_lost", message: "gone", stream_id: call.number });
  bench.pass(1);
  // In the second attempt the sequences end in another order.
  end(2, 2);
  end(1, 1);
  end(0, 0);
  const shown = bench.session.ready
    .flatMap(([, events]) => events)
    .flatMap((event) =>
      !(event instanceof Row) && event.kind === "entry" ? [event.entry] : [],
    )
    .map(({ seq, live }) => [seq, live]);
  assert.deepEqual(shown, [
    [0, 2],
    [2, 1],
    [1, 0],
  ]);
});

test("with several brokers, a second HELLO says that the session may come from another broker", () => {
  for (const several of [false, true]) {
    const session = new Session("tcp://x,tcp://y", 5, 0, several);
    session.connected(0);
    const [first] = session.outgoing;
    const welcome = readMessage("WELCOME", { version: 1, encoding: "json", session: "T" });
    assert(first?.type === "HELLO" && welcome);
    assert.equal(first.body.elsewhere, undefined);
    session.onMessage(welcome, 0);
    session.connected(1);
    const [second] = session.outgoing;
    assert(second?.type === "HELLO");
    assert.equal(second.body.elsewhere, several || undefined);
  }
});

test("a lost request is sent again with the same seed, and no entry is delivered twice", () => {
  const bench = new Bench();
  const call = bench.begin();
  const [first] = bench.sent();
  bench.token(call, 7);
  bench.token(call, 8);
  bench.hear("ERROR", { code: "worker_lost", message: "gone", stream_id: call.number });
  bench.pass(1);
  const [second] = bench.sent();
  assert(first?.type === "GENERATE" && second?.type === "GENERATE");
  assert.equal(second.body.seed, first.body.seed);
  assert.notEqual(second.body.stream_id, first.body.stream_id);
  for (const token of [7, 8]) bench.token(call, token);
  bench.token(call, 9, { finish_reason: "stop" });
  assert.deepEqual(bench.events(call), [7, 8, 9, "ended"]);
});

test("a request is sent again for at most retry_s, and never if the request is not valid", () => {
  const bench = new Bench();
  const patient = bench.begin(generateCall("x", { retry_s: 3 }));
  const wrong = bench.begin();
  bench.hear("ERROR", { code: "invalid_field", message: "no", stream_id: wrong.number });
  assert.deepEqual(bench.events(wrong), ["invalid_field"]);
  for (let tries = 0; bench.events(patient).length === 0; tries += 1) {
    assert.ok(tries < 20);
    bench.hear("ERROR", { code: "queue_full", message: "full", stream_id: patient.number });
    bench.pass(0.5);
  }
  assert.deepEqual(bench.events(patient), ["queue_full"]);
  assert.ok(bench.now >= 3);
});

test("a resumed session attaches its streams after the last received entry", () => {
  const bench = new Bench();
  const call = bench.begin();
  const left = bench.begin();
  bench.token(call, 7);
  bench.session.disconnected(bench.now, "cut");
  bench.session.cancel(left);
  bench.session.connected(bench.now);
  const [hello] = bench.sent();
  assert(hello?.type === "HELLO");
  assert.equal(hello.body.session, "T");
  const streams = [call.number, left.number];
  const welcome = { version: 1, encoding: "json", session: "T", resumed: true, streams };
  bench.hear("WELCOME", welcome);
  assert.deepEqual(
    bench.sent().map(({ type, body }) => [type, body]),
    [
      ["ATTACH", { stream_id: call.number, received: 1, moves: 0 }],
      ["CANCEL", { stream_id: left.number }],
    ],
  );
  bench.token(call, 99); // This entry arrives before the answer, and is sent again after it.
  bench.hear("MSG", { stream_id: call.number, attached: 1 });
  bench.token(call, 8, { finish_reason: "stop" });
  assert.deepEqual(bench.events(call), [7, 8, "ended"]);
});

test("another copy of a stream may have its sequences in another order", () => {
  const bench = new Bench();
  const call = bench.begin(generateCall("x", { temperature: 1, n: 2 }));
  bench.token(call, 5);
  bench.token(call, 15, { seq: 1 });
  bench.token(call, 6);
  bench.session.disconnected(bench.now, "cut");
  bench.session.connected(bench.now);
  const streams = [call.number];
  bench.hear("WELCOME", { version: 1, encoding: "json", session: "T", resumed: true, streams });
  bench.hear("MSG", { stream_id: call.number, attached: 0 });
  for (const token of [15, 16, 17]) bench.token(call, token, { seq: 1 });
  for (const token of [5, 6, 7]) bench.token(call, token);
  assert.deepEqual(bench.events(call), [5, 15, 6, 16, 17, 7]);
});

test("a request that a restarted broker does not know is sent again unless it has begun", () => {
  const bench = new Bench();
  const begun = bench.begin(generateCall("x", { retry_s: 0 }));
  const fresh = bench.begin(generateCall("x", { retry_s: 0 }));
  bench.token(begun, 7);
  bench.session.disconnected(bench.now, "cut");
  bench.session.connected(bench.now);
  const welcome = { version: 1, encoding: "json", session: "T", recovering: true, streams: [] };
  bench.hear("WELCOME", welcome);
  bench.sent();
  for (const { number } of [begun, fresh]) {
    bench.hear("ERROR", { code: "unknown_stream", message: "none", stream_id: number });
  }
  const again = bench.sent().map(({ type, body }) => [type, (body as { stream_id?: number }).stream_id]);
  assert.deepEqual(again, [["GENERATE", fresh.number]]);
  assert.deepEqual(bench.events(begun), [7, "connection_lost"]);
});

test("an answer to ATTACH can have rows of several streams, some of them received before", () => {
  const bench = new Bench();
  const calls = [bench.begin(), bench.begin()];
  for (const call of calls) bench.token(call, 7);
  bench.session.connected(bench.now);
  const streams = calls.map((call) => call.number);
  const welcome = { version: 1, encoding: "json", session: "T", resumed: true, streams };
  bench.hear("WELCOME", welcome);
  const rows = (tokens: number[], counts = [tokens.length, tokens.length]): void => {
    const body = streams.flatMap((stream, i) =>
      tokens.slice(tokens.length - (counts[i] ?? 0)).map((t) => new Row(stream, t, -1, 0, 0)),
    );
    bench.session.onMessage({ type: "TOKEN", body }, bench.now);
  };
  rows([99]); // These rows arrive before the answers, and are sent again after them.
  for (const [i, stream_id] of streams.entries()) bench.hear("MSG", { stream_id, attached: i });
  rows([7, 8, 9], [3, 2]);
  rows([10]);
  for (const call of calls) assert.deepEqual(bench.events(call), [7, 8, 9, 10]);
});

test("a restarted broker receives an ATTACH for each stream that has begun", () => {
  const bench = new Bench();
  const call = bench.begin();
  const fresh = bench.begin();
  bench.token(call, 7);
  bench.sent();
  bench.session.connected(bench.now);
  const [hello] = bench.sent();
  assert(hello?.type === "HELLO");
  assert.ok(hello.body.capabilities?.includes("recover"));
  bench.hear("WELCOME", { version: 1, encoding: "json", session: "T", recovering: true });
  const answer = bench.sent().map(({ type, body }) => [type, body]);
  assert.deepEqual(answer[0], ["ATTACH", { stream_id: call.number, received: 1, moves: 0 }]);
  assert.equal(answer.length, 2);
  assert.equal(answer[1]?.[0], "CANCEL");
  bench.pass(1);
  assert.deepEqual(
    bench.sent().map(({ type }) => type),
    ["GENERATE"],
  );
  bench.token(call, 9, { finish_reason: "stop" }); // This entry arrives before the answer.
  bench.hear("MSG", { stream_id: call.number, attached: 1 });
  bench.token(call, 8);
  bench.token(call, 9, { finish_reason: "stop" });
  assert.deepEqual(bench.events(call), [7, 8, 9, "ended"]);
  assert.deepEqual(bench.events(fresh), []);
});

test("a session that the broker does not know begins anew, with its buffers", () => {
  const bench = new Bench();
  const buffer = bench.begin(bufferCall("b", "text", {}));
  const [, ping] = bench.sent();
  assert(ping?.type === "PING");
  bench.hear("PONG", { n: ping.body.n });
  assert.deepEqual(bench.events(buffer), ["ended"]);
  const call = bench.begin();
  bench.sent();
  bench.hear("PONG", { session: false });
  assert.deepEqual(
    bench.sent().map(({ type }) => type),
    ["HELLO"],
  );
  bench.hear("WELCOME", { version: 1, encoding: "json", session: "U" });
  bench.pass(1);
  assert.deepEqual(
    bench.sent().map(({ type }) => type),
    ["BUFFER", "CANCEL", "GENERATE"],
  );
  assert.deepEqual(bench.events(call), []);
});

test("a refused buffer is not sent to the next session", () => {
  const bench = new Bench();
  const buffer = bench.begin(bufferCall("b", "text", {}));
  bench.hear("ERROR", { code: "too_large", message: "no", type: "BUFFER" });
  assert.deepEqual(bench.events(buffer), ["too_large"]);
  bench.sent();
  bench.session.connected(bench.now);
  bench.hear("WELCOME", { version: 1, encoding: "json", session: "U" });
  assert.deepEqual(
    bench.sent().map(({ type }) => type),
    ["HELLO"],
  );
});

test("no call waits without a limit", () => {
  const bench = new Bench();
  const timed = bench.begin(generateCall("x", { timeout_s: 2 }));
  const stalled = bench.begin(generateCall("x", { stall_s: 2, retry_s: 0 }));
  const offline = bench.begin();
  bench.sent();
  bench.pass(2.5);
  assert.deepEqual(bench.events(stalled), ["worker_lost"]);
  bench.pass(1);
  assert.deepEqual(bench.events(timed), ["timeout"]);
  bench.session.disconnected(bench.now, "cut");
  bench.pass(4);
  assert.deepEqual(bench.events(offline), []);
  bench.pass(2);
  assert.deepEqual(bench.events(offline), ["connection_lost"]);
});

test("calls without a broker print the remedy once and then fail with it", (t) => {
  const warn = t.mock.method(console, "warn", () => {});
  const warnings = () => warn.mock.calls.map(({ arguments: [line] }) => line);
  const session = new Session("tcp://127.0.0.1:5555", 5, 0);
  const errors: (string | undefined)[] = [];
  session.submit(generateCall("x", {}), 0);
  session.submit(generateCall("y", {}), 0);
  session.disconnected(0, "refused");
  session.onTime(2.9);
  assert.deepEqual(warnings(), []);
  session.onTime(3.5);
  session.onTime(4);
  const what =
    "no broker answers at tcp://127.0.0.1:5555 (refused); start a system with: tokenbus up";
  assert.deepEqual(warnings(), [`tokenbus: ${what} (waiting for 5 s)`]);
  session.onTime(5.5);
  for (const [, events] of session.ready) {
    for (const event of events) {
      if ("kind" in event && event.kind === "ended") errors.push(event.error?.message);
    }
  }
  assert.deepEqual(errors, [what, what]);
});

test("a silent broker is lost, and the session is kept alive by pings", () => {
  const bench = new Bench();
  assert.equal(bench.session.lost(1), false);
  assert.equal(bench.session.waitS(0), 2);
  bench.session.onTime(2);
  assert.deepEqual(bench.session.outgoing, [{ type: "PING", body: { ack: 0 } }]);
  assert.equal(bench.session.lost(7), true);
});
