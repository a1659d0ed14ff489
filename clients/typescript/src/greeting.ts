/**
 * Reads the security mechanism of a broker from the greeting of ZMTP (RFC 37), the protocol of
 * ZeroMQ connections. If a broker requires keys and a client has none, the broker usually closes
 * the connection before it has sent its mechanism. ZeroMQ then does not report the mechanism.
 */

import { connect } from "node:net";

/** Maximum time that `mechanismOf` waits for the greeting, in milliseconds. */
const GREETING_MS = 2_000;
const GREETING_BYTES = 64;
/** The first bytes of a greeting of ZMTP 3. The peer then sends the rest of its greeting. */
const SIGNATURE_AND_VERSION = Uint8Array.of(0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3);

/**
 * The mechanism of the broker at `address`, for example `CURVE`; null if no greeting of ZMTP 3 or
 * later arrives in time.
 */
export function mechanismOf(address: string): Promise<string | null> {
  const place = placeOf(address);
  if (place === null) return Promise.resolve(null);
  return new Promise((resolve) => {
    const socket = connect(place);
    let received = Buffer.alloc(0);
    const end = (mechanism: string | null): void => {
      clearTimeout(timer);
      socket.destroy();
      resolve(mechanism);
    };
    const timer = setTimeout(() => end(null), GREETING_MS);
    socket.on("error", () => end(null));
    socket.on("close", () => end(null));
    socket.on("data", (data) => {
      received = Buffer.concat([received, data]);
      if (received.length < GREETING_BYTES) return;
      const version = received[10] ?? 0;
      const mechanism = received.toString("latin1", 12, 32).replace(/\0+$/, "");
      end(received[0] === 0xff && version >= 3 ? mechanism : null);
    });
    socket.write(SIGNATURE_AND_VERSION);
  });
}

/** The host and port, or the path, of an address; null if its scheme is neither tcp nor ipc. */
function placeOf(address: string): { host: string; port: number } | { path: string } | null {
  const path = /^ipc:\/\/(.+)$/.exec(address)?.[1];
  // A path that begins with @ is in Linux's abstract namespace.
  if (path !== undefined) return { path: path.replace(/^@/, "\0") };
  const [, host, port] = /^tcp:\/\/(?:.*;)?\[?([^\]]+)\]?:(\d+)$/.exec(address) ?? [];
  return host === undefined ? null : { host, port: Number(port) };
}
