/** What carries messages: a ZeroMQ socket or a WebSocket. */

import type { Outgoing } from "./calls.js";
import { RequestError, type TokenbusError } from "./errors.js";
import { type Row, type TokenColumns, readColumns } from "./columns.js";
import { type ServerMessage, type Token, readMessage } from "./messages.js";
import { unpackAll } from "./msgpack.js";

/** What arrives: a message to a client, a TOKEN with rows in place of entries where it can. */
export type Received =
  | Exclude<ServerMessage, { readonly type: "TOKEN" }>
  | { readonly type: "TOKEN"; readonly body: readonly (Row | Token)[] };

/** Opens connections to a broker or a gateway. */
export interface Transport {
  /** Where to, for error messages. */
  readonly address: string;
  /** Whether a connection may be to another broker than the one before. */
  readonly several?: boolean | undefined;
  /** Opens a connection. Its listener is called later, never from within this method. */
  open(listener: Listener): Link;
}

/** Learns what happens on a connection. Nothing is called after `closed`, or after `Link.close`. */
export interface Listener {
  /** Messages can be sent. */
  opened(): void;
  /** Messages have arrived, in this order. */
  received(messages: readonly Received[]): void;
  /**
   * The connection has failed or was closed by the other side. With `refused`, there is no use in
   * opening another one: every call ends with this error.
   */
  closed(reason: string, refused?: TokenbusError): void;
}

/** One connection. */
export interface Link {
  send(message: Outgoing): void;
  /** Closes it; what was sent before still goes out, for a short while. */
  close(): void;
}

/** The addresses of a list that is separated by commas. */
export function separate(addresses: string): string[] {
  const found = addresses.split(",").map((address) => address.trim());
  return found.length > 1 ? found.filter((address) => address !== "") : found;
}

/**
 * Connections to any of these: each is to the next of them. The first is drawn, so that clients
 * spread over the brokers.
 */
export function oneOf(transports: readonly Transport[]): Transport {
  let at = Math.floor(Math.random() * transports.length);
  return {
    address: transports.map(({ address }) => address).join(","),
    several: transports.length > 1,
    open: (listener) => {
      const transport = transports[at];
      if (transport === undefined) throw new RequestError("invalid_field", "there is no address");
      at = (at + 1) % transports.length;
      return transport.open(listener);
    },
  };
}

/**
 * The messages of this type: a text is the body of one in JSON, bytes have the bodies of one or
 * several in MessagePack. What is not valid, or of an unknown type, is left out.
 */
export function decodeMessages(type: string, bodies: string | Uint8Array): Received[] {
  const messages: Received[] = [];
  try {
    const found: unknown[] = typeof bodies === "string" ? [JSON.parse(bodies)] : unpackAll(bodies);
    for (const body of found) {
      const message =
        type === "TOKEN" && !Array.isArray(body)
          ? ({ type, body: readColumns(body as TokenColumns) } as const)
          : readMessage(type, body);
      if (message !== null) messages.push(message);
    }
  } catch {
    // Left out.
  }
  return messages;
}
