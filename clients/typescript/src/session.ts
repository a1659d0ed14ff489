/**
 * The client's side of the protocol. Like `clients/session.py`, it uses neither sockets nor a clock.
 *
 * A *call* is one request of this client (`calls.ts`). The caller passes messages and times (in
 * seconds). `outgoing` has the messages to send, and `ready` has the events of calls. A session
 * outlives its connection: on a new connection, it sends HELLO with its token, and ATTACH for each
 * stream. Lost requests are sent again, each entry is delivered once, and calls end when their time
 * limits have passed.
 */

import type { Call, Event, Outgoing, SentInput } from "./calls.js";
import { Row } from "./columns.js";
import {
  ConnectionLostError,
  RequestError,
  RequestTimeoutError,
  type TokenbusError,
  UnavailableError,
  errorFor,
} from "./errors.js";
import {
  type ErrorMessage,
  type InputAnswer,
  type Msg,
  PROTOCOL_VERSION,
  type Pong,
  type Token,
  type Welcome,
} from "./messages.js";
import type { Received } from "./transport.js";

/** If HELLO is not answered for this number of seconds, a new connection is opened. */
const HELLO_AGAIN_S = 5;
/**
 * The shortest and the longest pause before another attempt, in seconds. Each pause is twice the
 * previous one. If the broker's error contains a pause, this pause is used instead.
 */
const BACK_OFF_S = [0.1, 2] as const;
/** Interval between checks of the deadlines, in seconds. */
const LOOK_S = 0.25;
/** If calls wait and no broker answers for this number of seconds, a warning is printed. */
const HINT_S = 3;
/** The default address of a system. */
const DEFAULT_FRONT = "tcp://127.0.0.1:5555";
/** If an input is not answered for this number of seconds, it is sent again. */
const INPUT_AGAIN_S = 1;
/**
 * Normally, the broker ends a request at its timeout. If the broker has not done so this number of
 * seconds later, the client ends the request itself.
 */
const GRACE_S = 1;

export class Session {
  outgoing: Outgoing[] = [];
  ready: (readonly [Call, readonly Event[]])[] = [];
  readonly #calls = new Map<number, Call>();
  /** Calls that wait for WELCOME or for their `resendAt` before they are sent. */
  readonly #waiting = new Map<number, Call>();
  /**
   * Unanswered BUFFER calls. After each BUFFER, the session sends a PING, whose number is the key.
   */
  readonly #barriers = new Map<number, Call>();
  /** The buffers of the session. If the broker begins a new session, they are sent again. */
  readonly #buffers = new Map<string, Outgoing>();
  #ids = 0;
  #token: string | null = null;
  #welcomed = false;
  #offlineSince: number;
  /**
   * Whether the warning about a missing broker was printed. `#look` sets this flag, and a WELCOME
   * clears it.
   */
  #hinted = false;
  #helloAt: number;
  #heard: number;
  #pingS = 2;
  #silenceS = 6;
  #pingAt: number;
  #lookAt: number;
  /** The last `position` of a PONG on this connection, which the next PING acknowledges. */
  #position = 0;
  /** The reason why the last connection failed, for the errors of calls. */
  #failure = "";

  /**
   * `patienceS`: if the broker at `address` does not answer for this number of seconds, calls fail.
   * `several`: whether a new connection may be to another broker. `keepS`: if the connection is
   * lost, the broker keeps the session for at least this number of seconds.
   */
  constructor(
    readonly address: string,
    readonly patienceS: number,
    now: number,
    readonly several = false,
    readonly keepS = 0,
  ) {
    this.#offlineSince = this.#helloAt = this.#heard = this.#pingAt = this.#lookAt = now;
  }

  // --- the connection ----------------------------------------------------------------------------

  /** Called when the opening of a new connection begins. */
  connecting(now: number): void {
    this.#helloAt = now;
  }

  /** Handles a new connection: discards unsent messages of the old connection, and sends HELLO. */
  connected(now: number): void {
    if (this.#welcomed) this.#offlineSince = now;
    this.#hello(now);
  }

  /** Handles the loss of the connection. Calls wait at most `patienceS` for the next WELCOME. */
  disconnected(now: number, reason: string): void {
    this.#failure = reason;
    if (this.#welcomed) {
      this.#welcomed = false;
      this.#offlineSince = now;
    }
  }

  /** Whether a new connection is needed, because the broker has been silent for too long. */
  lost(now: number): boolean {
    if (!this.#welcomed) return now - this.#helloAt > HELLO_AGAIN_S;
    return now - this.#heard > this.#silenceS;
  }

  /** Seconds until the next deadline. */
  waitS(now: number): number {
    const idle = this.#welcomed && this.#calls.size === 0;
    const lookAt = idle ? Infinity : this.#lookAt;
    return Math.max(0, Math.min(this.#welcomed ? this.#pingAt : Infinity, lookAt) - now);
  }

  #hello(now: number): void {
    this.#welcomed = false;
    this.#position = 0;
    this.#helloAt = this.#heard = now;
    this.outgoing = [
      {
        type: "HELLO",
        body: {
          versions: [PROTOCOL_VERSION],
          encodings: ["msgpack", "json"],
          session: this.#token ?? undefined,
          elsewhere: (this.several && this.#token !== null) || undefined,
          keep_s: this.keepS || undefined,
          client: "tokenbus-typescript",
          capabilities: ["ping", "ack", "bodies", "columns", "text_columns", "recover"],
        },
      },
    ];
  }

  // --- calls -------------------------------------------------------------------------------------

  /** Begins a call. Its events are added to `ready`; the last event is an `ended`. */
  submit(call: Call, now: number): void {
    call.began = call.heard = now;
    this.#queue(call);
    if (this.#welcomed) this.#sendCall(call, now);
  }

  /** Ends a call whose events are not needed any more. */
  cancel(call: Call): void {
    if (call.over) return;
    call.over = true;
    this.#forget(call, "cancelled");
    this.#failInputs(call);
  }

  /**
   * Sends an input to the program of a stream, after the earlier inputs. `report` is called with
   * null when the input is stored, or with an error.
   */
  sendInput(call: Call, text: string, report: SentInput["report"], now: number): void {
    if (call.over) {
      report?.(streamEnded());
      return;
    }
    call.inputs.push({ number: call.inputs.length + 1, text, stored: false, report });
    this.#nextInput(call, now);
  }

  /**
   * Sends the first input that is not stored, if the broker can receive it now. If the input was
   * already sent, it is not sent again before `inputAt`.
   */
  #nextInput(call: Call, now: number): void {
    const waiting = call.inputs.find((sent) => !sent.stored);
    if (waiting === undefined) {
      call.inputAt = null;
    } else if (
      this.#welcomed &&
      call.sent &&
      !call.attaching &&
      (call.inputAt === null || now >= call.inputAt)
    ) {
      call.inputAt = now + INPUT_AGAIN_S;
      const { number, text } = waiting;
      this.outgoing.push({ type: "INPUT", body: { stream_id: call.number, number, text } });
    }
  }

  #onInputAnswer(call: Call, answer: InputAnswer, now: number): void {
    const sent = call.inputs.find((one) => !one.stored);
    if (sent === undefined || sent.number !== answer.number) return;
    if (answer.code === null) {
      sent.stored = true;
      sent.report?.(null);
      sent.report = null;
      call.inputAt = null;
      this.#nextInput(call, now);
    } else if (
      sent.report === null ||
      answer.code === "no_worker" ||
      answer.code === "unknown_stream"
    ) {
      // If the broker does not know the stream, the answer to the stream's request ends the call.
      call.inputAt = now + (answer.retry_after_s ?? INPUT_AGAIN_S);
    } else {
      const { retry_after_s } = answer;
      this.#dropInput(call, sent, errorFor(answer.code, answer.message, { retry_after_s }), now);
    }
  }

  /** Removes a refused input, and renumbers the later inputs, which were not sent yet. */
  #dropInput(call: Call, sent: SentInput, error: TokenbusError, now: number): void {
    call.inputs.splice(call.inputs.indexOf(sent), 1);
    call.inputs.forEach((later, place) => (later.number = place + 1));
    sent.report?.(error);
    call.inputAt = null;
    this.#nextInput(call, now);
  }

  /** Reports the end of a stream to the senders of its inputs. */
  #failInputs(call: Call): void {
    for (const sent of call.inputs.splice(0)) sent.report?.(streamEnded());
  }

  /** Ends every call with an error. */
  endAll(error: TokenbusError): void {
    for (const call of [...this.#calls.values()]) this.#end(call, error);
  }

  /** Ends all calls, the session and its streams. */
  bye(): void {
    this.endAll(new ConnectionLostError("connection_lost", "this client was closed"));
    if (this.#welcomed) this.outgoing.push({ type: "BYE", body: {} });
  }

  /**
   * Assigns a new number to the next attempt, so that entries of earlier attempts can be recognized
   * and dropped.
   */
  #queue(call: Call): void {
    call.beginTry(++this.#ids);
    if (call.request.type !== "BUFFER") {
      const { type, body, data } = call.request;
      call.request = { type, body: { ...body, stream_id: call.number }, data } as Call["request"];
    }
    this.#calls.set(call.number, call);
    this.#waiting.set(call.number, call);
  }

  #sendCall(call: Call, now: number): void {
    const { request } = call;
    this.outgoing.push(request);
    if (request.type === "BUFFER") {
      if (request.body.tokens == null && request.body.text == null) {
        this.#buffers.delete(request.body.name);
      } else {
        this.#buffers.set(request.body.name, request);
      }
      this.#barriers.set(call.number, call);
      this.outgoing.push({ type: "PING", body: { n: call.number, ack: this.#position } });
    }
    this.#waiting.delete(call.number);
    call.sent = true;
    call.heard = now;
    call.tries += 1;
    call.inputAt = null;
    this.#nextInput(call, now);
  }

  /**
   * Removes a call from all tables. If `reason` is given and the request was sent, sends CANCEL for
   * the call's stream.
   */
  #forget(call: Call, reason: "cancelled" | "timeout" | null): void {
    this.#calls.delete(call.number);
    this.#waiting.delete(call.number);
    this.#barriers.delete(call.number);
    if (reason !== null && call.sent && call.request.type !== "BUFFER") {
      this.outgoing.push({ type: "CANCEL", body: { stream_id: call.number, reason } });
    }
  }

  #end(call: Call, error: TokenbusError | null, ...events: readonly Event[]): void {
    if (call.over) return;
    call.over = true;
    this.#forget(call, null);
    this.#failInputs(call);
    this.ready.push([call, [...events, { kind: "ended", error }]]);
  }

  /** Handles a failed attempt: schedules another attempt, or ends the call. */
  #failed(call: Call, error: TokenbusError, now: number, tellBroker: boolean): void {
    call.failedAt ??= now;
    if (!error.retryable || now - call.failedAt >= call.retryS) {
      if (tellBroker) this.#forget(call, "cancelled");
      this.#end(call, error);
      return;
    }
    this.#forget(call, tellBroker ? "cancelled" : null);
    const [first, longest] = BACK_OFF_S;
    const pause = error.retry_after_s || Math.min(longest, first * 2 ** Math.min(call.tries, 10));
    this.ready.push([call, [{ kind: "notice", notice: retrying(error.message) }]]);
    this.#queue(call);
    call.resendAt = now + pause;
    this.#lookAt = Math.min(this.#lookAt, call.resendAt);
  }

  // --- messages ----------------------------------------------------------------------------------

  /** Handles a message from the broker. */
  onMessage(message: Received, now: number): void {
    this.#heard = now;
    switch (message.type) {
      case "TOKEN":
        this.#onTokens(message.body, now);
        break;
      case "WELCOME":
        this.#onWelcome(message.body, now);
        break;
      case "PONG":
        this.#onPong(message.body, now);
        break;
      case "ERROR":
        this.#onError(message.body, now);
        break;
      case "MSG":
        this.#onMsg(message.body, now);
        break;
      case "SYSTEM": {
        const call = this.#calls.get(message.body.stream_id ?? -1);
        if (call === undefined) break;
        call.heard = now;
        call.moves = Math.max(call.moves, message.body.moves);
        this.ready.push([call, [{ kind: "notice", notice: message.body }]]);
      }
    }
  }

  #onTokens(entries: readonly (Row | Token)[], now: number): void {
    const perCall = new Map<Call, Event[]>();
    for (const entry of entries) {
      const call = this.#calls.get(entry.stream_id);
      if (call === undefined) continue;
      const row = entry instanceof Row;
      const ended = !row && entry.finish_reason !== null && entry.live === 0;
      if (call.attaching) continue;
      call.heard = now;
      if (call.repeats > 0) {
        call.repeats -= 1;
        continue;
      }
      call.failedAt = null;
      let events = perCall.get(call);
      if (events === undefined) perCall.set(call, (events = []));
      const isNew = call.isNew(entry);
      const shown = row || entry.finish_reason === null ? entry : call.ended(entry, isNew);
      if (isNew) events.push(shown instanceof Row ? shown : { kind: "entry", entry: shown });
      if (ended) {
        call.over = true;
        events.push({ kind: "ended", error: null });
        this.#forget(call, null);
        this.#failInputs(call);
      }
    }
    this.ready.push(...perCall);
  }

  #onWelcome(welcome: Welcome, now: number): void {
    this.#welcomed = true;
    this.#hinted = false;
    this.#token = welcome.session;
    this.#pingS = welcome.ping_s;
    this.#silenceS = Math.max(2 * welcome.ping_s, 0.6 * welcome.expiry_s);
    this.#pingAt = now + welcome.ping_s;
    const sent = [...this.#calls.values()].filter((call) => call.sent);
    if (!welcome.resumed) this.outgoing.push(...this.#buffers.values());
    const live = new Set(welcome.resumed || welcome.recovering ? welcome.streams : []);
    // The CANCELs of these streams were lost with the connection.
    const cancelled = [...live].filter((number) => !this.#calls.has(number));
    const lost = new ConnectionLostError(
      "connection_lost",
      "the connection to the broker was lost",
    );
    for (const call of sent) {
      if (live.has(call.number) || (welcome.recovering && call.mayBeLive)) {
        call.attaching = true;
        const { received, moves } = call;
        const body = { stream_id: call.number, received, moves };
        this.outgoing.push({ type: "ATTACH", body });
      } else {
        this.#failed(call, lost, now, true);
      }
    }
    for (const stream_id of cancelled) this.outgoing.push({ type: "CANCEL", body: { stream_id } });
    for (const call of [...this.#waiting.values()]) {
      if (call.resendAt === null) this.#sendCall(call, now);
    }
  }

  #onPong(pong: Pong, now: number): void {
    const barrier = this.#barriers.get(pong.n);
    if (this.#welcomed && pong.position > 0) this.#position = pong.position;
    if (!pong.session && this.#welcomed) {
      this.#offlineSince = now;
      this.#hello(now);
    } else if (barrier !== undefined) {
      this.#end(barrier, null);
    }
  }

  #onError(body: ErrorMessage, now: number): void {
    let error = errorFor(body.code, body.message, {
      path: body.path,
      retry_after_s: body.retry_after_s,
    });
    const call = body.stream_id === null ? undefined : this.#calls.get(body.stream_id);
    if (call !== undefined) {
      const sent = call.inputs.find((one) => !one.stored);
      if (body.type === "INPUT" && sent !== undefined) {
        this.#dropInput(call, sent, error, now);
        return;
      }
      if (call.attaching && body.code === "unknown_stream") {
        if (call.resendsUnknown) {
          call.attaching = false;
          this.#sendCall(call, now);
          return;
        }
        error = endedOffline();
      }
      this.#failed(call, error, now, false);
      return;
    }
    const [barrier] = this.#barriers.values();
    if (body.type === "BUFFER" && barrier !== undefined) {
      if (barrier.request.type === "BUFFER") this.#buffers.delete(barrier.request.body.name);
      this.#end(barrier, error);
    } else if (body.type === "HELLO") {
      this.endAll(error);
    } else if (body.stream_id === null && body.type !== null) {
      // The broker could not read the stream id, so the error belongs to the first call of the type.
      for (const sent of this.#calls.values()) {
        if (sent.sent && sent.received === 0 && sent.request.type === body.type) {
          this.#end(sent, error);
          break;
        }
      }
    }
  }

  #onMsg(msg: Msg, now: number): void {
    const call = this.#calls.get(msg.stream_id);
    if (call === undefined) return;
    call.heard = now;
    if (msg.attached !== undefined) {
      // The entries from number `attached` on follow. The client may already have received some of
      // them after an earlier ATTACH. If `attached` is 0, all entries follow. They may then come
      // from another copy of the stream, in another order.
      if (msg.attached > 0) call.repeats = Math.max(0, call.received - msg.attached);
      else call.beginCopy();
      call.attaching = false;
      call.moves = msg.moves;
      call.inputAt = null;
      this.#nextInput(call, now);
    } else if (msg.input !== undefined) {
      this.#onInputAnswer(call, msg.input, now);
    } else {
      this.#end(call, null, { kind: "answer", answer: msg });
    }
  }

  // --- time --------------------------------------------------------------------------------------

  /** Sends due messages, and ends calls whose time limit has passed. */
  onTime(now: number): void {
    if (this.#welcomed && now >= this.#pingAt) {
      this.#pingAt = now + this.#pingS;
      this.outgoing.push({ type: "PING", body: { ack: this.#position } });
    }
    if (now < this.#lookAt) return;
    this.#lookAt = now + LOOK_S;
    for (const call of [...this.#calls.values()]) this.#look(call, now);
  }

  #look(call: Call, now: number): void {
    if (call.inputAt !== null) this.#nextInput(call, now);
    if (!this.#welcomed) {
      const waited = now - Math.max(this.#offlineSince, call.began);
      if (waited > this.patienceS || now - call.began > call.timeoutS) {
        this.#end(call, new ConnectionLostError("connection_lost", this.#noBroker()));
      } else if (waited > HINT_S && !this.#hinted) {
        this.#hinted = true;
        console.warn(`tokenbus: ${this.#noBroker()} (waiting for ${this.patienceS} s)`);
      }
    } else if (now - call.began > call.timeoutS + GRACE_S) {
      this.#forget(call, "timeout");
      const what = `the timeout of the request, ${call.timeoutS} s, has expired`;
      this.#end(call, new RequestTimeoutError("timeout", what));
    } else if (call.resendAt !== null) {
      if (now >= call.resendAt) {
        call.resendAt = null;
        this.#sendCall(call, now);
      } else {
        this.#lookAt = Math.min(this.#lookAt, call.resendAt);
      }
    } else if (call.sent && now - call.heard > call.stallS) {
      const what = `no message arrived for ${call.stallS} s`;
      this.#failed(call, new UnavailableError("worker_lost", what), now, true);
    }
  }

  /** The message of the error if no broker answers, with the remedy. */
  #noBroker(): string {
    const reason = this.#failure && ` (${this.#failure})`;
    const gateway = /^ws:\/\/([^/]+)/.exec(this.address);
    const flag = gateway ? `--http ${gateway[1]}` : `--front ${this.address}`;
    const remedy =
      this.address === DEFAULT_FRONT
        ? "start a system with: tokenbus up"
        : `is that the address of a running system? Start one with: tokenbus up ${flag}`;
    return `no broker answers at ${this.address}${reason}; ${remedy}`;
  }
}

function streamEnded(): RequestError {
  const what = "the stream has ended, so it takes no more inputs";
  return new RequestError("unknown_stream", what);
}

function endedOffline(): ConnectionLostError {
  const what = "the stream ended while the connection was lost";
  return new ConnectionLostError("connection_lost", what);
}

function retrying(message: string) {
  const nothing = { model: "", place: null, progress: null, left: "", worker: "", pause_s: null };
  return { event: "retrying" as const, message, stream_id: null, ...nothing, moves: 0 };
}
