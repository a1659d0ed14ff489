/** Transports of messages: a ZeroMQ socket or a WebSocket. */

import type { Outgoing } from "./calls.js";
import { RequestError, type TokenbusError } from "./errors.js";
import { type Row, type TokenColumns, readColumns } from "./columns.js";
import { type ServerMessage, type Token, readMessage } from "./messages.js";
import { unpackAll } from "./msgpack.js";

/** A received message. If entries of a TOKEN fit into columns, they are rows. */
export type Received =
  | Exclude<ServerMessage, { readonly type: "TOKEN" }>
  | { readonly type: "TOKEN"; readonly body: readonly (Row | Token)[] };

/** Opens connections to a broker or a gateway. */
export interface Transport {
  /** The address, for error messages. */
  readonly address: string;
  /** Whether a new connection may be to another broker. */
  readonly several?: boolean | undefined;
  /** Opens a connection. The listener is called only after this method has returned. */
  open(listener: Listener): Link;
}

/** Receives the events of a connection. No method is called after `closed` or `Link.close`. */
export interface Listener {
  /** Called when messages can be sent. */
  opened(): void;
  /** Called with received messages, in order of arrival. */
  received(messages: readonly Received[]): void;
  /**
   * Called when the connection has failed, or when the other side has closed it. If `refused` is
   * given, every call ends with this error, because a new connection would be refused too.
   */
  closed(reason: string, refused?: TokenbusError): void;
}

/** One connection. */
export interface Link {
  send(message: Outgoing): void;
  /** Closes the connection. Sent messages are still transmitted for a short time. */
  close(): void;
}

/**
 * Splits a list of addresses at its commas. If there are several addresses, empty ones are left
 * out.
 */
export function separate(addresses: string): string[] {
  const found = addresses.split(",").map((address) => address.trim());
  return found.length > 1 ? found.filter((address) => address !== "") : found;
}

/**
 * A transport to several brokers. Each new connection is to the next broker of the list. The first
 * broker is chosen at random, so that clients are distributed over the brokers.
 */
export function oneOf(transports: readonly Transport[]): Transport {
  let at = Math.floor(Math.random() * transports.length);
  return {
    address: transports.map(({ address }) => address).join(","),
    several: transports.length > 1,
    open: (listener) => {
      const transport = transports[at];
      if (transport === undefined) throw new RequestError("invalid_field", "the address is missing");
      at = (at + 1) % transports.length;
      return transport.open(listener);
    },
  };
}

/**
 * Decodes messages of one type. If `bodies` is a text, it is one body in JSON. If it is bytes, they
 * are one or several bodies in MessagePack. Messages of unknown types are left out. If the bytes are
 * not valid MessagePack, all bodies are left out. If a body is invalid for another reason, this body
 * and all later bodies are left out.
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
    // Messages that cannot be decoded are left out.
  }
  return messages;
}
