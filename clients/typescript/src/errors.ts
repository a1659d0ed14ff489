/** The errors that this package throws. Programs match on the class or on `code`. */

import { type Code, ERROR_KINDS, type ErrorKind, RETRYABLE } from "./messages.js";

/** The optional details of an error. */
export interface ErrorDetails {
  /** The faulty field, such as `$.max_tokens`. */
  readonly path?: string | null | undefined;
  /** Seconds to wait before the request is sent again. */
  readonly retry_after_s?: number | null | undefined;
}

/** The base class of all errors that Tokenbus reports. */
export class TokenbusError extends Error {
  /** A stable name for programs. A newer broker may send codes that `Code` does not contain. */
  readonly code: Code | (string & {});
  /** The faulty field. */
  readonly path: string | null;
  /** Seconds to wait before the request is sent again. */
  readonly retry_after_s: number | null;

  constructor(code: Code | (string & {}), message: string, details: ErrorDetails = {}) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.path = details.path ?? null;
    this.retry_after_s = details.retry_after_s ?? null;
  }

  /** Whether the same request may succeed if it is sent again. */
  get retryable(): boolean {
    return RETRYABLE.has(this.code);
  }
}

/** The request is not valid. It must be changed before it is sent again. */
export class RequestError extends TokenbusError {}

/** The controller of the stream failed, exceeded a limit, or is in a deadlock. */
export class ControllerError extends TokenbusError {}

/**
 * The service cannot process the request at the moment: its queue is full, it restarts, or a worker
 * was lost.
 */
export class UnavailableError extends TokenbusError {}

/** The broker does not answer, or the session has ended. */
export class ConnectionLostError extends UnavailableError {}

/** The `timeout_s` of the request has passed. */
export class RequestTimeoutError extends TokenbusError {}

/** The streams were ended, because the client did not read its tokens fast enough. */
export class SlowClientError extends TokenbusError {}

/** An internal error of the service. The service's log has the details. */
export class ServiceError extends TokenbusError {}

const CLASSES: Readonly<Record<ErrorKind, typeof TokenbusError>> = {
  ConnectionLostError,
  ControllerError,
  RequestError,
  RequestTimeoutError,
  ServiceError,
  SlowClientError,
  UnavailableError,
};

/** Creates an error with the class of its code. An unknown code becomes a RequestError. */
export function errorFor(code: string, message: string, details: ErrorDetails = {}): TokenbusError {
  const kinds: Readonly<Record<string, ErrorKind | undefined>> = ERROR_KINDS;
  return new CLASSES[kinds[code] ?? "RequestError"](code, message, details);
}
