/** What carries messages: a ZeroMQ socket or a WebSocket. */

import type { Outgoing } from "./calls.js";
import type { TokenbusError } from "./errors.js";
import { type ServerMessage, readMessage } from "./messages.js";

/** Opens connections to one broker or gateway. */
export interface Transport {
  /** Where to, for error messages. */
  readonly address: string;
  /** Opens a connection. Its listener is called later, never from within this method. */
  open(listener: Listener): Link;
}

/** Learns what happens on a connection. Nothing is called after `closed`, or after `Link.close`. */
export interface Listener {
  /** Messages can be sent. */
  opened(): void;
  /** Messages have arrived, in this order. */
  received(messages: readonly ServerMessage[]): void;
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

/** The message of this type and with this body in JSON; null if it is not valid or not known. */
export function decodeMessage(type: string, body: string): ServerMessage | null {
  try {
    return readMessage(type, JSON.parse(body));
  } catch {
    return null;
  }
}
