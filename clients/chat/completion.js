// Streams an answer from the gateway. A cut connection is resumed with the same idempotency key.

const KEY = "tokenbus-key";
const PAUSES_MS = [250, 500, 1000, 2000, 4000, 8000, 8000, 8000];
const LABELS = { max_tokens: "maximum tokens", temperature: "temperature", model: "model" };
const BUSY = new Set([429, 502, 503]);
/** Codes of errors inside a stream after which the same request can be sent again. */
const LOST = new Set(["connection_lost", "session_lost", "shutting_down", "worker_lost"]);

/**
 * The gateway refused a request. `param` is the faulty field, and `status` the HTTP status. For an
 * error inside a stream, `status` is 503 if the request can be sent again, otherwise 500.
 */
export class Refusal extends Error {
  constructor(status, { message, code = null, param = null }) {
    super(inPlainWords(status, code, withLabel(message, param)));
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** A request was not completed, because the gateway does not answer or the connection was cut. */
export class Unreachable extends Error {}

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const useApiKey = (key) => sessionStorage.setItem(KEY, key);

/** The URL of a path of this page's gateway. */
export const urlOf = (path) => new URL(path, document.baseURI);

/** Sends a request to the gateway; returns the response. Throws a Refusal or an Unreachable. */
export async function send(path, { headers = {}, ...options } = {}) {
  const key = apiKey();
  let response;
  try {
    const own = key ? { authorization: `Bearer ${key}` } : {};
    response = await fetch(urlOf(path), { ...options, headers: { ...own, ...headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The gateway does not answer.");
  }
  if (response.ok) return response;
  throw await refusalOf(response);
}

async function refusalOf(response) {
  const text = await response.text().catch(() => "");
  let error = null;
  try {
    ({ error } = JSON.parse(text));
  } catch {
    // A proxy may answer with a page instead of the gateway's JSON.
  }
  const message = error?.message ?? `the server answered with the status ${response.status}`;
  const refusal = new Refusal(response.status, { ...error, message });
  refusal.retryAfterMs = 1000 * Number(response.headers.get("retry-after") ?? 1);
  return refusal;
}

/** A message with the label of a setting instead of the field's name in requests. */
function withLabel(message, param) {
  const label = LABELS[param];
  return label && message.startsWith(param) ? label + message.slice(param.length) : message;
}

function inPlainWords(status, code, message) {
  const text = `${message.charAt(0).toUpperCase()}${message.slice(1)}`;
  if (status === 401) return "The gateway requires an API key.";
  if (code === "context_length_exceeded") {
    return `The conversation is too long for the model. ${text}`;
  }
  return text;
}

/**
 * Streams the answer to `body`.
 *
 * `place` has the idempotency `key` and the number `event` of the last event that was received; this
 * function updates `event` with each chunk. `take(chunk)` receives the chunks. `notice(text)`
 * receives the reason of an interruption, and an empty text when the gateway answers. Throws the
 * last error if the request is refused, or if too many attempts have failed.
 */
export async function stream(body, place, { take, notice, signal }) {
  let failures = 0;
  for (;;) {
    try {
      const before = place.event;
      const ended = await attempt(body, place, take, notice, signal);
      if (ended) return;
      if (place.event > before) failures = 0;
      throw new Unreachable("The connection was cut.");
    } catch (error) {
      const busy = error instanceof Refusal && BUSY.has(error.status);
      if (!busy && !(error instanceof Unreachable)) throw error;
      if (failures >= PAUSES_MS.length) throw error;
      notice(busy ? `${error.message} Trying again.` : "The connection was cut. Trying again.");
      await pause(Math.max(PAUSES_MS[failures++], error.retryAfterMs ?? 0), signal);
    }
  }
}

/** Sends the request once. Returns true when the stream has ended, and false if it was cut. */
async function attempt(body, place, take, notice, signal) {
  const headers = { "content-type": "application/json", "idempotency-key": place.key };
  if (place.event) headers["last-event-id"] = String(place.event);
  const options = { method: "POST", body: JSON.stringify(body), headers, signal };
  const response = await send("v1/chat/completions", options);
  notice("");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return false;
    }
    if (part.done) return false;
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (takeEvent(event, place, take)) return true;
  }
}

/** Reads one event; returns whether it ends the stream. */
function takeEvent(event, place, take) {
  let number = 0;
  let text = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("id: ")) number = Number(line.slice(4));
    else if (line.startsWith("data: ")) text = line.slice(6);
  }
  if (!text) return false;
  if (text === "[DONE]") return true;
  const chunk = JSON.parse(text);
  if (chunk.error) throw new Refusal(LOST.has(chunk.error.code) ? 503 : 500, chunk.error);
  take(chunk);
  if (number) place.event = number;
  return false;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}
