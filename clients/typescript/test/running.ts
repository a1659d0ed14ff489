/** The system that the tests use. `tests/clients/test_typescript.py` starts it. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { type AddressInfo, type Socket, connect, createServer } from "node:net";
import { type TestContext, describe, test } from "node:test";

import WebSocket from "ws";

import { BaseClient } from "../src/client.js";
import { Client, type Status } from "../src/node.js";
import { webSocket } from "../src/websocket.js";
import { zeroMq } from "../src/zeromq.js";

/** The address for each transport. Without an address, the transport's tests are skipped. */
const ADDRESSES = {
  ZeroMQ: process.env["TOKENBUS_TEST_FRONT"],
  WebSocket: process.env["TOKENBUS_TEST_WS"],
};

/** Time limit of a test, in milliseconds. Only a test that hangs reaches it. */
const LIMIT_MS = 120_000;

export const PROMPT = "def add(a, b):\n";

/** Defines the tests of `define` once for each transport. */
export function overEachTransport(define: (run: typeof test, address: string) => void): void {
  for (const [name, address] of Object.entries(ADDRESSES)) {
    const skip = address === undefined && "no system with this transport is running";
    describe(`over ${name}`, { skip, timeout: LIMIT_MS, concurrency: false }, () => {
      if (address !== undefined) define(test, address);
    });
  }
}

/** A client that is closed at the end of the test. */
export function clientOf(t: TestContext, address: string, patience_s = 100): Client {
  const client = new Client(address, { patience_s });
  t.after(() => client.close());
  return client;
}

/** A client without columns, which receives each entry in JSON. It is closed at the test's end. */
export function jsonClientOf(t: TestContext, address: string): BaseClient {
  const transport = address.startsWith("ws")
    ? webSocket(address, (url) => new WebSocket(url, { perMessageDeflate: false }))
    : zeroMq(address);
  const json = { encodings: ["json"], capabilities: ["ping", "recover"] };
  const client = new BaseClient(
    {
      address,
      open: (listener) => {
        const link = transport.open(listener);
        return {
          send: (message) =>
            link.send(
              message.type === "HELLO"
                ? { ...message, body: { ...message.body, ...json } }
                : message,
            ),
          close: () => link.close(),
        };
      },
    },
    { patience_s: 100 },
  );
  t.after(() => client.close());
  return client;
}

/** A controller module that the Python test has compiled. */
export async function guest(name: "logs" | "fails" | "forks" | "splices"): Promise<Uint8Array> {
  const folder = process.env["TOKENBUS_TEST_WASM"];
  assert(folder, "TOKENBUS_TEST_WASM is not set; it must be the folder of the modules");
  return readFile(`${folder}/${name}.wasm`);
}

/** Waits until the broker's status meets a condition. */
export async function until(client: Client, holds: (status: Status) => boolean): Promise<void> {
  while (!holds(await client.status())) await new Promise((go) => setTimeout(go, 20));
}

/** A TCP proxy whose connections can be cut. */
export interface Proxy {
  readonly address: string;
  /** Ends all connections; returns their number. New connections are accepted. */
  cut(): number;
}

/** A proxy to `address`. */
export async function proxyTo(t: TestContext, address: string): Promise<Proxy> {
  const target = new URL(address);
  const sockets = new Set<Socket>();
  const server = createServer((near) => {
    const far = connect(Number(target.port), target.hostname);
    for (const [from, to] of [
      [near, far],
      [far, near],
    ] as const) {
      sockets.add(from);
      from.on("error", () => {});
      from.on("close", () => {
        sockets.delete(from);
        to.destroy();
      });
      from.pipe(to);
    }
  });
  const cut = () => {
    const count = sockets.size / 2;
    for (const socket of sockets) socket.destroy();
    return count;
  };
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  t.after(() => {
    server.close();
    cut();
  });
  const near = new URL(address);
  near.port = String((server.address() as AddressInfo).port);
  return { address: near.href, cut };
}
