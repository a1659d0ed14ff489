/** The entry point for browsers, and whatever else has their WebSocket. */

import { BaseClient, type ClientOptions } from "./client.js";
import { oneOf, separate } from "./transport.js";
import { webSocket } from "./websocket.js";

export * from "./public.js";

/** The client; see `BaseClient` for its methods. */
export class Client extends BaseClient {
  /**
   * `address`: of the gateway, or of several, separated by commas, any of which will do. Default:
   * where the page came from.
   */
  constructor(address: string = origin(), options: ClientOptions = {}) {
    // A page cannot set headers; the gateway takes the key as a subprotocol instead.
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
