/** Tests the client with a real broker and real workers, over each transport. */

import assert from "node:assert/strict";

import {
  Client,
  ConnectionLostError,
  ControllerError,
  RequestError,
  RequestTimeoutError,
  TokenbusError,
  type Token,
  type TokenStream,
} from "../src/node.js";
import { PROMPT, clientOf, guest, jsonClientOf, overEachTransport, proxyTo, until } from "./running.js";

const LONG = { max_tokens: 150, ignore_eos: true };
/** Options of a stream that lasts longer than the broker's interval between deadline checks. */
const ENDLESS = { max_tokens: 3000, ignore_eos: true };

/** The entries of a sequence, without the parts that differ between runs. */
interface Came {
  readonly entries: object[];
  /** Log-probabilities, whose last bits depend on the batch. */
  readonly logprobs: number[];
}

/** All entries of a stream, by sequence. */
async function entriesOf(
  stream: TokenStream,
  seen: (entry: Token) => void = () => {},
): Promise<Map<number, Came>> {
  const came = new Map<number, Came>();
  for await (const entry of stream) {
    seen(entry);
    const { entries, logprobs } = came.get(entry.seq) ?? { entries: [], logprobs: [] };
    const { logprob, top_logprobs = {} } = entry;
    const unlike = { stream_id: 0, cached_tokens: 0, round_us: 0, live: 0 };
    const numbers = { logprob: logprob === null, top_logprobs: Object.keys(top_logprobs) };
    entries.push({ ...entry, ...unlike, ...numbers });
    logprobs.push(logprob ?? NaN, ...Object.values(top_logprobs));
    came.set(entry.seq, { entries, logprobs });
  }
  return came;
}

function assertSame(came: Map<number, Came>, expected: Map<number, Came>): void {
  assert.deepEqual([...came.keys()].sort(), [...expected.keys()].sort());
  for (const [seq, { entries, logprobs }] of came) {
    const other = expected.get(seq);
    assert.deepEqual(entries, other?.entries);
    logprobs.forEach((logprob, index) => {
      const far = Math.abs(logprob - (other?.logprobs[index] ?? NaN)) > 1e-3;
      assert.ok(!far, `${logprob} at ${index} of ${seq}`);
    });
  }
}

overEachTransport((test, address) => {
  test("tokens stream, and their texts make the text", async (t) => {
    const stream = clientOf(t, address).generate(PROMPT, { max_tokens: 20, ignore_eos: true });
    const entries = [];
    for await (const entry of stream) entries.push(entry);
    assert.deepEqual(
      entries.map((entry) => entry.pos),
      [...Array(20).keys()],
    );
    assert.equal(entries.at(-1)?.finish_reason, "length");
    const [sequence] = stream.sequences;
    assert.equal(entries.map((entry) => entry.text).join(""), sequence?.text);
    assert.deepEqual(
      entries.map((entry) => entry.token),
      sequence?.tokens,
    );
    assert.ok((sequence?.cumulative_logprob ?? 0) < 0);
  });

  test("a client refuses an unknown option", () => {
    const options: object = { apikey: "tb-key" };
    assert.throws(() => new Client(address, options), {
      name: "TypeError",
      message: "unknown option apikey; did you mean api_key?",
    });
  });

  test("run refuses an unknown option before anything is sent", (t) => {
    const client = clientOf(t, address);
    const options: object = { args: "[0-9]{3}" };
    assert.throws(() => client.run("regex", PROMPT, options), {
      name: "TypeError",
      message: "unknown option args; did you mean arg?",
    });
  });

  test("a prompt of token ids gives tokens without text", async (t) => {
    const client = clientOf(t, address);
    const stream = client.generate(Uint32Array.of(5, 6, 7), { max_tokens: 4, top_logprobs: 3 });
    for await (const { token, logprob, top_logprobs = {} } of stream) {
      assert.equal(top_logprobs[String(token)], logprob);
      assert.ok(Object.keys(top_logprobs).length >= 3);
    }
    assert.deepEqual(
      await client.generate([5, 6, 7], { max_tokens: 4 }).tokens(),
      stream.sequences[0]?.tokens,
    );
    await assert.rejects(client.generate([5], { max_tokens: 1 }).text(), /use text: true/);
  });

  test("the options of a request have their effect", async (t) => {
    const client = clientOf(t, address);
    const sampled = { max_tokens: 12, temperature: 1.5, seed: 7, n: 2, ignore_eos: true } as const;
    const [first, again] = await Promise.all([
      client.generate(PROMPT, sampled).wait(),
      client.generate(PROMPT, { ...sampled, priority: -3, timeout_s: 100, stall_s: 90 }).wait(),
    ]);
    assert.deepEqual(
      first.map((one) => one.tokens),
      again.map((one) => one.tokens),
    );
    assert.deepEqual(
      first.map((one) => one.seq),
      [0, 1],
    );
    assert.notDeepEqual(first[0]?.tokens, first[1]?.tokens);
    const whole = client.generate(PROMPT, { max_tokens: 30 });
    const stop = (await whole.text()).slice(5, 8);
    const stopped = client.generate(PROMPT, { max_tokens: 30, stop: [stop] });
    assert.equal(await stopped.text(), (await whole.text()).split(stop)[0]);
    assert.equal(stopped.sequences[0]?.finish_reason, "stop");
    const [token] = await client.generate(PROMPT, { max_tokens: 1 }).tokens();
    const [biased] = await client
      .generate(PROMPT, { max_tokens: 1, logit_bias: { [String(token)]: -100 } })
      .tokens();
    assert.notEqual(biased, token);
  });

  test("generated tokens have the same log-probabilities when they are scored", async (t) => {
    const client = clientOf(t, address);
    const [sequence] = await client.generate(PROMPT, { max_tokens: 5 }).wait();
    const scores = await client.score(PROMPT, sequence?.tokens ?? []);
    assert.deepEqual(scores.tokens, sequence?.tokens);
    scores.logprobs.forEach((logprob, index) => {
      assert.ok(Math.abs(logprob - (sequence?.logprobs[index] ?? NaN)) < 1e-3);
    });
    const text = await client.score("import ", "os");
    assert.equal(text.texts.join(""), "os");
    assert.ok(text.cumulative_logprob < 0);
  });

  test("many streams share a connection", async (t) => {
    const client = clientOf(t, address);
    const alone = await client.generate(PROMPT, { max_tokens: 8 }).text();
    const streams = Array.from({ length: 20 }, () => client.generate(PROMPT, { max_tokens: 8 }));
    for (const stream of streams) assert.equal(await stream.text(), alone);
  });

  test("a stream is cancelled by leaving its loop, by cancel and by a signal", async (t) => {
    const client = clientOf(t, address);
    const left = client.generate(PROMPT, LONG);
    for await (const entry of left) if (entry.pos === 2) break;
    assert.equal(left.sequences[0]?.tokens.length, 3);

    const cancelled = client.generate(PROMPT, { ...LONG, n: 64 });
    await cancelled.next();
    const rest = cancelled.wait();
    cancelled.cancel();
    await assert.rejects(rest, /cancelled before its end/);
    assert.deepEqual(await cancelled.next(), { done: true, value: undefined });

    const controller = new AbortController();
    const aborted = client.generate(PROMPT, { ...LONG, n: 64, signal: controller.signal });
    await aborted.next();
    controller.abort(new Error("enough"));
    await assert.rejects(aborted.text(), /enough/);
    assert.throws(() => client.generate("x", { signal: controller.signal }), /enough/);
    await until(client, (status) => status.streams === 0);
  });

  test("buffers precede a prompt, and store generated text", async (t) => {
    const client = clientOf(t, address);
    const whole = await client.generate(PROMPT, { max_tokens: 6 }).text();
    await client.buffer("start", PROMPT.slice(0, 8));
    const options = { max_tokens: 6, buffers: ["start"], save: "all" };
    assert.equal(await client.generate(PROMPT.slice(8), options).text(), whole);
    const more = await client.generate("\n", { max_tokens: 3, buffers: ["all"] }).wait();
    assert.ok(more[0]?.text);
    await client.buffer("start", null);
    await assert.rejects(client.generate("x", { buffers: ["start"] }).wait(), {
      code: "unknown_buffer",
    });
  });

  test("built-in constraints steer", async (t) => {
    const client = clientOf(t, address);
    const options = { arg: "[0-9]{3}-[a-f]{2}", max_tokens: 30 };
    assert.match(await client.run("regex", PROMPT, options).text(), /^[0-9]{3}-[a-f]{2}$/);
    const schema = { type: "object", properties: { a: { type: "boolean" } }, required: ["a"] };
    const json = await client.run("json_schema", PROMPT, { arg: schema, max_tokens: 60 }).text();
    assert.equal(typeof JSON.parse(json).a, "boolean");
  });

  test("modules are uploaded, tagged, run, listed and deleted", async (t) => {
    const client = clientOf(t, address);
    const wasm = await guest("logs");
    const stored = await client.upload(wasm, { tag: "ts-logs" });
    assert.equal(stored.size, wasm.byteLength);
    assert.ok((await client.tag("ts-logs", ["ts-other"])).tags.includes("ts-other"));
    const [sequence] = await client.run("ts-other", PROMPT, { max_tokens: 3 }).wait();
    assert.equal(sequence?.logs, "round\n".repeat(3));
    assert.equal(sequence?.storage.length, 3);
    assert.ok((await client.modules()).some((one) => one.module === stored.module));
    assert.equal((await client.delete("ts-other")).module, stored.module);
    await client.delete("ts-logs");
  });

  test("forks have the tokens of their parent, and splices take tokens back", async (t) => {
    const client = clientOf(t, address);
    const forks = await client.upload(await guest("forks"));
    const options = { max_tokens: 8, ignore_eos: true };
    const [parent, child] = await client.run(forks.module, PROMPT, options).wait();
    assert.equal(child?.parent, parent?.seq);
    // The fork dropped two of three tokens and appended A and B.
    assert.equal(child?.tokens[0], parent?.tokens[0]);
    assert.deepEqual(child?.tokens.slice(1, 3), [0x41, 0x42]);
    assert.ok(Number.isNaN(child?.logprobs[1]));
    const splices = await client.upload(await guest("splices"));
    const stream = client.run(splices.module, PROMPT, options);
    let taken = 0;
    for await (const entry of stream) taken += entry.backtrack;
    assert.equal(taken, 3);
    assert.deepEqual(stream.sequences[0]?.tokens.slice(0, 2), [0x41, 0x42]);
  });

  test("the model, the status and the tokenizer can be requested", async (t) => {
    const client = clientOf(t, address);
    const info = await client.modelInfo();
    assert.equal(info.name, "embedded");
    assert.ok(info.vocab_size > 100 && info.context_length > 100);
    const status = await client.status();
    assert.deepEqual(new Set(status.workers.map((worker) => worker.role)).size, 3);
    assert.equal(typeof status.workers[0]?.load, "object");
    const files = await client.tokenizer();
    assert.equal(files.fingerprint, info.fingerprint);
    assert.equal(typeof JSON.parse(files.json).model, "object");
  });

  test("errors have types, codes and the path of the field", async (t) => {
    const client = clientOf(t, address);
    const failure = async (made: Promise<unknown>): Promise<TokenbusError> => {
      const error = await made.then(() => null, (reason: unknown) => reason);
      assert.ok(error instanceof TokenbusError, String(error));
      return error;
    };
    const field = await failure(client.generate("x", { max_tokens: 0 }).wait());
    assert.ok(field instanceof RequestError);
    assert.deepEqual([field.code, field.path], ["invalid_field", "$.max_tokens"]);
    assert.equal(field.retryable, false);
    const model = await failure(client.modelInfo("no-such-model"));
    assert.deepEqual([model.name, model.code], ["RequestError", "unknown_model"]);
    const name = await failure(client.run("no-such-controller", "x").wait());
    assert.equal(name.code, "unknown_controller");
    const regex = await failure(client.run("regex", "x", { arg: "(" }).wait());
    assert.ok(regex instanceof ControllerError || regex instanceof RequestError);
    const late = await failure(client.generate(PROMPT, { ...ENDLESS, timeout_s: 0.001 }).wait());
    assert.ok(late instanceof RequestTimeoutError);
    const wasm = await failure(client.upload(new TextEncoder().encode("#!/bin/sh")));
    assert.match(wasm.message, /not Wasm/);
    const fails = await client.upload(await guest("fails"));
    const failed = await failure(client.run(fails.module, PROMPT).wait());
    assert.deepEqual([failed.name, failed.code], ["ControllerError", "controller_failed"]);
    assert.throws(() => client.generate("\ud800"), { path: "$.prompt" });
    assert.throws(() => client.generate([1, -2]), { path: "$.prompt[1]" });
    assert.throws(() => client.generate("x", { controller_arg: "y" }), { code: "invalid_field" });
  });

  test("in columns a stream has the same entries as in JSON", async (t) => {
    const client = clientOf(t, address);
    const json = jsonClientOf(t, address);
    const { module } = await client.upload(await guest("forks"));
    const ids = [5, 6, 7];
    const sampled = { temperature: 1.2, seed: 11, n: 3 } as const;
    const requests = [
      [ids, {}],
      [ids, sampled],
      [ids, { ...sampled, top_logprobs: 2 }],
      [PROMPT, sampled],
      [PROMPT, { controller: "regex", controller_arg: "[a-z]{20}", inspect: true }],
      [PROMPT, { controller: module, text: false }],
    ] as const;
    // All streams run at the same time, so that a step has tokens in columns and as entries.
    const read = (one: Pick<typeof client, "generate">) =>
      Promise.all(
        requests.map(([prompt, options]) =>
          entriesOf(one.generate(prompt, { max_tokens: 24, ignore_eos: true, ...options })),
        ),
      );
    const [columns, entries] = [await read(client), await read(json)];
    columns.forEach((one, index) => assertSame(one, entries[index] ?? new Map()));
    assert.ok(columns.every((one) => (one.get(0)?.entries.length ?? 0) >= 3));
  });

  test("streams continue without a gap after their connection was cut", async (t) => {
    const json = jsonClientOf(t, address);
    const whole = await entriesOf(json.generate(PROMPT, LONG));
    const wholeOfIds = await entriesOf(json.generate([5, 6, 7], LONG));
    const proxy = await proxyTo(t, address);
    const client = clientOf(t, proxy.address);
    await client.buffer("kept", "import ");
    const inColumns = entriesOf(client.generate([5, 6, 7], LONG));
    const entries = await entriesOf(client.generate(PROMPT, LONG), ({ pos }) => {
      if (pos === 5) assert.equal(proxy.cut(), 1);
    });
    assertSame(entries, whole);
    assertSame(await inColumns, wholeOfIds);
    assert.ok(await client.generate("os", { buffers: ["kept"], max_tokens: 2 }).text());
  });

  test("streams continue at the next of several addresses if one does not answer", async (t) => {
    const whole = await entriesOf(jsonClientOf(t, address).generate(PROMPT, LONG));
    const proxies = [await proxyTo(t, address), await proxyTo(t, address)];
    const away = new URL(address);
    away.port = "1";
    const addresses = [...proxies.map((proxy) => proxy.address), away.href];
    const client = clientOf(t, addresses.join(","));
    await client.buffer("kept", "import ");
    const cuts: number[] = [];
    const entries = await entriesOf(client.generate(PROMPT, LONG), ({ pos }) => {
      if (pos === 5 || pos === 60) cuts.push(proxies.reduce((sum, proxy) => sum + proxy.cut(), 0));
    });
    assert.deepEqual(cuts, [1, 1]);
    assertSame(entries, whole);
    assert.ok(await client.generate("os", { buffers: ["kept"], max_tokens: 2 }).text());
  });

  test("a closed client ends its streams and refuses calls", async (t) => {
    const client = clientOf(t, address);
    const stream = client.generate(PROMPT, { ...LONG, n: 64 });
    await stream.next();
    client.close();
    await assert.rejects(stream.wait(), ConnectionLostError);
    assert.throws(() => client.generate("x"), /was closed/);
    await until(clientOf(t, address), (status) => status.streams === 0);
  });
});

overEachTransport((test, address) => {
  test("calls fail if no broker answers", async (t) => {
    const away = new URL(address);
    away.port = "1";
    const client = clientOf(t, away.href, 0.3);
    await assert.rejects(client.generate("x").wait(), (error) => {
      assert.ok(error instanceof ConnectionLostError);
      assert.match(error.message, /no broker answers at .*; is that the address of a running/);
      const flag = address.startsWith("ws:") ? "--http 127.0.0.1:1" : `--front ${away.href}`;
      assert.ok(error.message.includes(`tokenbus up ${flag}`), error.message);
      return true;
    });
  });
});

overEachTransport((test, address) => {
  test("a program talks to its client", async (t) => {
    const client = clientOf(t, address);
    const script = `
      async function main(ctx) {
        ctx.send("name?");
        const name = await ctx.receive();
        await ctx.fixed(name);
        ctx.send("bye " + (await ctx.receive()));
      }`;
    const data = new TextEncoder().encode("#!tokenbus javascript\n" + script);
    const { module } = await client.upload(data);
    const stream = client.generate("Hello ", { controller: module });
    for await (const { messages, waiting } of stream) {
      if (messages[0] !== "name?") continue;
      assert.equal(waiting, 1);
      assert.ok(stream.waiting);
      await Promise.all([stream.send("Ann"), stream.send("now")]);
      assert.ok(!stream.waiting);
    }
    const [only] = stream.sequences;
    assert.deepEqual(only?.messages, ["name?", "bye now"]);
    assert.match(only.text, /^Ann/);
    await assert.rejects(stream.send("x"), RequestError);
  });
});
