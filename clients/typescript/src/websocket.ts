/** The protocol over a WebSocket of the gateway: one line for each message, `<TYPE> <JSON>`. */

import type { Outgoing } from "./calls.js";
import { RequestError } from "./errors.js";
import { type Link, type Listener, type Transport, decodeMessage } from "./transport.js";

/** What is used of a WebSocket: a browser's, Node's own, or that of the package `ws`. */
export interface WebSocketLike {
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  send(text: string): void;
  close(): void;
}

/** A transport over the WebSockets that `connect` opens at `address`. */
export function webSocket(address: string, connect: (url: string) => WebSocketLike): Transport {
  return { address, open: (listener) => new Line(connect(address), listener) };
}

class Line implements Link {
  #reason = "";

  constructor(
    readonly socket: WebSocketLike,
    listener: Listener,
  ) {
    socket.onopen = () => listener.opened();
    socket.onmessage = ({ data }: { data: unknown }) => {
      if (typeof data !== "string") return;
      const space = data.indexOf(" ");
      const message = decodeMessage(data.slice(0, space), data.slice(space + 1));
      if (message !== null) listener.received([message]);
    };
    socket.onerror = ({ message }: { message?: unknown }) => {
      if (typeof message === "string") this.#reason = message;
    };
    socket.onclose = ({ code, reason }: { code: number; reason: string }) => {
      const why = this.#reason || reason || `the WebSocket was closed with code ${code}`;
      listener.closed(why, refusal(why));
    };
  }

  send({ type, body, data }: Outgoing): void {
    const whole = data === undefined ? body : { ...body, data: base64(data) };
    this.socket.send(`${type} ${JSON.stringify(whole)}`);
  }

  close(): void {
    const { socket } = this;
    socket.onopen = socket.onmessage = socket.onclose = null;
    // The package ws reports the end of a connection that was still being opened as an error.
    socket.onerror = () => {};
    socket.close();
  }
}

/**
 * The error where the gateway has refused the connection for good, by an HTTP status of 4xx. A page
 * cannot see the status; its calls give up when their patience ends.
 */
function refusal(reason: string): RequestError | undefined {
  const [, status] = /Unexpected server response: (4\d\d)/.exec(reason) ?? [];
  if (status === undefined) return undefined;
  const hint = status === "401" ? "; give the client a valid api_key" : "";
  return new RequestError(
    "not_allowed",
    `the gateway refused the WebSocket with HTTP status ${status}${hint}`,
  );
}

/** How many bytes become text at once: as many as a function may have arguments, and a multiple of 3. */
const CHUNK = 3 * 4096;

function base64(data: Uint8Array): string {
  let text = "";
  for (let at = 0; at < data.length; at += CHUNK) {
    text += btoa(String.fromCharCode(...data.subarray(at, at + CHUNK)));
  }
  return text;
}
