/** The entry point for Node: ZeroMQ (`tcp://`, `ipc://`) and WebSocket (`ws://`, `wss://`). */

import WebSocket from "ws";

import { BaseClient, type ClientOptions } from "./client.js";
import { oneOf, separate } from "./transport.js";
import { webSocket } from "./websocket.js";
import { zeroMq } from "./zeromq.js";

export * from "./public.js";

/** The default address of the broker of `tokenbus up`. */
const BROKER = "tcp://127.0.0.1:5555";

/** The client; see `BaseClient` for its methods. */
export class Client extends BaseClient {
  /**
   * `address`: the address of the broker, such as `tcp://127.0.0.1:5555` or
   * `ipc:///run/front.sock`, or of the gateway, such as `ws://127.0.0.1:8080/`. Default: the value
   * of the environment variable `TOKENBUS_FRONT` or, if it is not set, `tcp://127.0.0.1:5555`.
   * `address` may be several addresses, separated by commas. The client connects to one of them. If
   * this broker fails, streams continue at the next address.
   */
  constructor(
    address: string = process.env["TOKENBUS_FRONT"] || BROKER,
    options: ClientOptions = {},
  ) {
    const key = options.api_key;
    const headers = key === undefined ? {} : { authorization: `Bearer ${key}` };
    const addresses = separate(address);
    const transports = addresses.map((one) =>
      /^wss?:/.test(one)
        ? webSocket(one, (url) => new WebSocket(url, { headers, perMessageDeflate: false }))
        : zeroMq(one),
    );
    super(oneOf(transports), options);
  }
}
