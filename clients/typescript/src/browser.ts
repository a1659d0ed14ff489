/** The entry point for browsers and other environments with the browser's WebSocket. */

import { BaseClient, type ClientOptions } from "./client.js";
import { oneOf, separate } from "./transport.js";
import { webSocket } from "./websocket.js";

export * from "./public.js";

/** The client; see `BaseClient` for its methods. */
export class Client extends BaseClient {
  /**
   * `address`: the address of a gateway, or the addresses of several gateways, separated by commas.
   * Default: the host of the page.
   */
  constructor(address: string = origin(), options: ClientOptions = {}) {
    // A page cannot set headers, so the key is sent as a subprotocol.
    const protocols = options.api_key === undefined ? [] : ["tokenbus", `key.${options.api_key}`];
    const transports = separate(address).map((one) =>
      webSocket(one, (url) => new WebSocket(url, protocols)),
    );
    super(oneOf(transports), options);
  }
}

function origin(): string {
  const { protocol, host } = globalThis.location;
  return `${protocol === "https:" ? "wss:" : "ws:"}//${host}/`;
}
