// A process with one TypeScript client. For each order, the process reads 64 streams, and answers
// with the seconds of CPU time, the elapsed seconds and the number of tokens. The order is a key of
// WAYS, and determines how the streams are read.
//
//     node _typescript_client.mjs BUILT_PACKAGE ADDRESS columns|json

import { createInterface } from "node:readline";

const [, , built, address, form] = process.argv;
const { Client } = await import(`${built}/dist/src/node.js`);
const { jsonClientOf } = await import(`${built}/dist/test/running.js`);

const STREAMS = 64;
const WAYS = {
  whole: async (stream) => (await stream.tokens()).length,
  each: async (stream) => {
    let count = 0;
    for await (const entry of stream) count += entry.token === null ? 0 : 1;
    return count;
  },
};

const client =
  form === "json" ? jsonClientOf({ after() {} }, address) : new Client(address, { patience_s: 100 });
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const answer = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

for (;;) {
  const order = await lines.next();
  if (order.done) break;
  const way = WAYS[JSON.parse(order.value)];
  const readers = Array.from({ length: STREAMS }, () =>
    way(client.generate([1], { model: "m", seed: 1 })),
  );
  const began = await lines.next();
  const cpu = process.cpuUsage();
  const real = performance.now();
  answer(JSON.parse(began.value));
  const counts = await Promise.all(readers);
  const { user, system } = process.cpuUsage(cpu);
  const total = counts.reduce((sum, one) => sum + one, 0);
  answer([(user + system) / 1e6, (performance.now() - real) / 1e3, total]);
}
process.exit(0);
