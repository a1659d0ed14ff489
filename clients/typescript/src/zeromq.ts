/**
 * The protocol over a ZeroMQ DEALER socket, with the frames `[TYPE][body][attachment]`. Bodies are sent
 * as JSON. A received message has one or several bodies in JSON or MessagePack.
 */

import { Dealer } from "zeromq";

import type { Outgoing } from "./calls.js";
import { RequestError } from "./errors.js";
import { mechanismOf } from "./greeting.js";
import { type Link, type Listener, type Transport, decodeMessages } from "./transport.js";

/** Time during which a closed socket sends its remaining messages, in milliseconds. */
const LINGER_MS = 500;
/**
 * Time in milliseconds after which ZeroMQ would reconnect a socket. ZeroMQ must never reconnect a
 * socket, because the queued messages would then reach a broker that has not received the session's
 * HELLO. So the time is long: a socket without a connection is closed much earlier.
 */
const NEVER_MS = 600_000;

/** A transport to the broker's front socket, such as `tcp://127.0.0.1:5555`. */
export function zeroMq(address: string): Transport {
  return { address, open: (listener) => new Socket(address, listener) };
}

class Socket implements Link {
  readonly #dealer: Dealer;
  #closed = false;
  /** Whether the handshake has failed. ZeroMQ then also reports that the connection is lost. */
  #refused = false;

  constructor(
    readonly address: string,
    readonly listener: Listener,
  ) {
    // The queue has no bound, so that a send does not wait. After a long silence, the session opens
    // a new socket.
    this.#dealer = new Dealer({
      sendHighWaterMark: 0,
      receiveHighWaterMark: 0,
      reconnectInterval: NEVER_MS,
      linger: LINGER_MS,
    });
    try {
      this.#dealer.connect(address);
    } catch (error) {
      this.#dealer.close();
      throw new RequestError(
        "invalid_field",
        `"${address}" is not a valid address of a broker (${String(error)}); valid ones are ` +
          "tcp://127.0.0.1:5555 and, for a gateway, ws://127.0.0.1:8080/",
      );
    }
    void this.#receive();
    this.#watch().catch((error: unknown) => this.#fail(error));
  }

  send(message: Outgoing): void {
    const frames: (string | Uint8Array)[] = [message.type, JSON.stringify(message.body)];
    if (message.data !== undefined) frames.push(message.data);
    this.#dealer.send(frames).catch((error: unknown) => this.#fail(error));
  }

  close(): void {
    this.#closed = true;
    this.#dealer.close();
  }

  async #receive(): Promise<void> {
    await Promise.resolve();
    if (this.#closed) return;
    this.listener.opened();
    try {
      for await (const [type, ...bodies] of this.#dealer) {
        if (this.#closed) return;
        const messages = bodies.flatMap((body) =>
          decodeMessages(String(type), (body[0] ?? 0) < 0x80 ? String(body) : body),
        );
        if (messages.length > 0) this.listener.received(messages);
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  /**
   * Closes the socket when its connection fails or ends. The events must be read until the socket
   * is closed. If they were not read, ZeroMQ's thread would wait forever for the reader, and block
   * all sockets.
   */
  async #watch(): Promise<void> {
    for await (const event of this.#dealer.events) {
      if (this.#refused) continue;
      if (event.type.startsWith("handshake:error:")) {
        this.#refused = true;
        this.#askForMechanism().catch((error: unknown) => this.#fail(error));
      }
      if (event.type === "disconnect") this.#fail("the broker closed the connection");
      if (event.type === "connect:retry") this.#fail("the connection failed");
    }
  }

  /**
   * Reports a failed handshake. If the broker accepts only connections with a key, the connection
   * counts as refused.
   */
  async #askForMechanism(): Promise<void> {
    const mechanism = await mechanismOf(this.address);
    const refusal = new RequestError(
      "not_allowed",
      `the broker at ${this.address} accepts only connections with a key, which this client cannot ` +
        "have; connect to a gateway, such as ws://127.0.0.1:8080/",
    );
    this.#fail("the handshake failed", mechanism === "CURVE" ? refusal : undefined);
  }

  #fail(reason: unknown, refused?: RequestError): void {
    if (this.#closed) return;
    this.close();
    this.listener.closed(String(reason), refused);
  }
}
