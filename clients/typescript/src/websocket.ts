/**
 * The protocol over a WebSocket of the gateway. A text message is `<TYPE> <JSON>`. A binary message is
 * the type, a space, and one or several bodies in MessagePack.
 */

import type { Outgoing } from "./calls.js";
import { RequestError } from "./errors.js";
import { type Link, type Listener, type Received, type Transport, decodeMessages } from "./transport.js";

/**
 * The part of a WebSocket that this package uses. The browser, Node and the package `ws` have such
 * WebSockets.
 */
export interface WebSocketLike {
  binaryType: string;
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  send(text: string): void;
  close(): void;
}

/** A transport over WebSockets to `address`. `connect` opens a WebSocket. */
export function webSocket(address: string, connect: (url: string) => WebSocketLike): Transport {
  return { address, open: (listener) => new Line(connect(address), listener) };
}

class Line implements Link {
  #reason = "";

  constructor(
    readonly socket: WebSocketLike,
    listener: Listener,
  ) {
    socket.binaryType = "arraybuffer";
    socket.onopen = () => listener.opened();
    socket.onmessage = ({ data }: { data: unknown }) => {
      const messages = received(data);
      if (messages.length > 0) listener.received(messages);
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
    // If a connection is closed before it opens, the package ws reports an error. The error is
    // ignored.
    socket.onerror = () => {};
    socket.close();
  }
}

/** Decodes the messages in received data. */
function received(data: unknown): Received[] {
  if (typeof data === "string") {
    const space = data.indexOf(" ");
    return decodeMessages(data.slice(0, space), data.slice(space + 1));
  }
  if (!(data instanceof ArrayBuffer)) return [];
  const bytes = new Uint8Array(data);
  const space = bytes.indexOf(0x20);
  const type = String.fromCharCode(...bytes.subarray(0, Math.min(Math.max(space, 0), 32)));
  return decodeMessages(type, bytes.subarray(space + 1));
}

/**
 * If the gateway has refused the connection with an HTTP status of 4xx: the error with which calls
 * end. A web page cannot read the status, so calls wait for `patienceS` there.
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

/**
 * Number of bytes that are encoded at once. It is a multiple of 3, so that the texts of the chunks
 * can be joined. It is below the maximum number of arguments of a function.
 */
const CHUNK = 3 * 4096;

function base64(data: Uint8Array): string {
  let text = "";
  for (let at = 0; at < data.length; at += CHUNK) {
    text += btoa(String.fromCharCode(...data.subarray(at, at + CHUNK)));
  }
  return text;
}
