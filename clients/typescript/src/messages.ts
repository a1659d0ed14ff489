// `python -m tokenbus.clients.typescript.generate` writes this file from protocol/messages.py and
// protocol/errors.py. Change these files and run the command again.

/** Any value that JSON can express. */
export type Json =
  | null
  | boolean
  | number
  | string
  | readonly Json[]
  | { readonly [name: string]: Json };

/** `T` as it is sent. The fields `D` have defaults and may be absent. */
type Sent<T, D extends keyof T> = Omit<T, D> & Partial<T>;

/** `T` with writable fields. */
type Made<T> = { -readonly [F in keyof T]: T[F] };

export const PROTOCOL_VERSION = 1;

export const MAX_MODULE_BYTES = 16777216;

/** The reason why Tokenbus refuses or ends a request. */
export type Code =
  | "bad_message"
  | "unknown_type"
  | "unsupported_version"
  | "invalid_field"
  | "too_large"
  | "token_out_of_range"
  | "empty_prompt"
  | "prompt_too_long"
  | "duplicate_stream"
  | "unknown_stream"
  | "unknown_buffer"
  | "unknown_model"
  | "unknown_controller"
  | "conflict"
  | "model_load_failed"
  | "not_allowed"
  | "unsupported"
  | "controller_failed"
  | "controller_timeout"
  | "deadlock"
  | "tool_failed"
  | "quarantined"
  | "queue_full"
  | "client_limit"
  | "store_failed"
  | "no_worker"
  | "worker_lost"
  | "shutting_down"
  | "slow_client"
  | "session_taken"
  | "session_lost"
  | "connection_lost"
  | "timeout"
  | "internal";

/** The class of an error. */
export type ErrorKind =
  | "ConnectionLostError"
  | "ControllerError"
  | "RequestError"
  | "RequestTimeoutError"
  | "ServiceError"
  | "SlowClientError"
  | "UnavailableError";

/** The class of the error with this code. */
export const ERROR_KINDS: Readonly<Record<Code, ErrorKind>> = {
  bad_message: "RequestError",
  unknown_type: "RequestError",
  unsupported_version: "RequestError",
  invalid_field: "RequestError",
  too_large: "RequestError",
  token_out_of_range: "RequestError",
  empty_prompt: "RequestError",
  prompt_too_long: "RequestError",
  duplicate_stream: "RequestError",
  unknown_stream: "RequestError",
  unknown_buffer: "RequestError",
  unknown_model: "RequestError",
  unknown_controller: "RequestError",
  conflict: "RequestError",
  model_load_failed: "RequestError",
  not_allowed: "RequestError",
  unsupported: "RequestError",
  controller_failed: "ControllerError",
  controller_timeout: "ControllerError",
  deadlock: "ControllerError",
  tool_failed: "ControllerError",
  quarantined: "RequestError",
  queue_full: "UnavailableError",
  client_limit: "UnavailableError",
  store_failed: "UnavailableError",
  no_worker: "UnavailableError",
  worker_lost: "UnavailableError",
  shutting_down: "UnavailableError",
  slow_client: "SlowClientError",
  session_taken: "ConnectionLostError",
  session_lost: "ConnectionLostError",
  connection_lost: "ConnectionLostError",
  timeout: "RequestTimeoutError",
  internal: "ServiceError",
};

/** Codes after which the same request may succeed if it is sent again. */
export const RETRYABLE: ReadonlySet<string> = new Set<Code>([
  "client_limit",
  "connection_lost",
  "no_worker",
  "queue_full",
  "session_lost",
  "shutting_down",
  "store_failed",
  "worker_lost",
]);

/**
 * `HELLO`: opens a session, or takes one over on a new connection.
 *
 * A client that does not send HELLO has an anonymous session, whose encoding is JSON. The session
 * ends with the client's connection.
 */
export interface Hello {
  /** Default: [1]. */
  readonly versions?: readonly number[] | undefined;
  /**
   * The encodings that the client accepts, in order of preference. The broker uses the first one
   * that it supports. Default: ["json"].
   */
  readonly encodings?: readonly string[] | undefined;
  /**
   * The token from an earlier `WELCOME`. The client takes over the session of this token. It must
   * connect with the same key as the client that began the session. At most 256 in length.
   */
  readonly session?: string | null | undefined;
  /**
   * Begin a new session whose token is `session`. The client has chosen this token: a secret of 32
   * hexadecimal digits. Has no effect if a session with this token exists already, even if it
   * belongs to another key. Default: false.
   */
  readonly begin?: boolean | undefined;
  /**
   * Whether the session may have used another broker since its last connection to this broker. The
   * broker then asks the workers for the session's live streams, and the client sends its buffers
   * again. Default: false.
   */
  readonly elsewhere?: boolean | undefined;
  /**
   * If the client's connection is lost, the session and its streams continue for at least this
   * number of seconds. For example, a program can wait for the next input of a user who has left.
   * The broker's settings `session_grace_s` and `max_keep_s` are the lower and the upper bound of
   * this time. Over a gateway, the field has no effect unless the client's API key has its own
   * tenant. At least 0. Default: 0.
   */
  readonly keep_s?: number | undefined;
  /** Name and version of the program, for the operator. At most 256 in length. */
  readonly client?: string | undefined;
  /**
   * Optional features of the client.
   *
   * - `ping`: the client sends PING, and its session may expire
   * - `ack`: the client's PINGs have `ack`
   * - `bodies`: the client accepts several bodies in one TOKEN
   * - `columns`: the client accepts TOKEN in columns, which are only sent in msgpack
   * - `text_columns`: with `columns`, the client accepts rows with text
   * - `recover`: the client handles `Welcome.recovering`
   * - `gateway`: the client carries messages of other users, so it never has the operator's rights
   *   At most 64 in length.
   */
  readonly capabilities?: readonly string[] | undefined;
}

/** `GENERATE`: begin a stream of tokens. */
export interface Generate {
  /**
   * 0 takes the most likely token (greedy); 1 samples from the model's own distribution. At least
   * 0. Default: 0.
   */
  readonly temperature?: number | undefined;
  /**
   * Maximum number of tokens to generate. The context length of the model is a bound too. Both
   * bounds end the sequence with the finish reason `length`. At least 1. Default: 64.
   */
  readonly max_tokens?: number | undefined;
  /**
   * Minimum number of tokens to generate, at most `max_tokens`. Before this number is reached, end-
   * of-sequence tokens and token ids of `stop` are not sampled, and strings of `stop` do not end
   * the sequence. A controller can still end the sequence: if its mask allows only tokens that end
   * the sequence, one of them is sampled. At least 0. Default: 0.
   */
  readonly min_tokens?: number | undefined;
  /**
   * Added to the logits of these tokens, by id. In practice, -100 forbids a token and 100 forces
   * it.
   */
  readonly logit_bias?: Readonly<Record<string, number>> | undefined;
  /**
   * Number of the most likely tokens to report, in addition to the sampled token. At least 0, at
   * most 256. Default: 0.
   */
  readonly top_logprobs?: number | undefined;
  /** Keep the k most likely tokens; 0 keeps all. At least 0. Default: 0. */
  readonly top_k?: number | undefined;
  /**
   * Keep the smallest set of tokens whose total probability reaches this value (nucleus sampling).
   * More than 0, at most 1. Default: 1.
   */
  readonly top_p?: number | undefined;
  /**
   * Keep the tokens whose probability is at least this fraction of the most likely token's
   * probability. At least 0, at most 1. Default: 0.
   */
  readonly min_p?: number | undefined;
  /**
   * Divides the positive logits, and multiplies the negative logits, of tokens in the prompt or the
   * output (CTRL). More than 0. Default: 1.
   */
  readonly repetition_penalty?: number | undefined;
  /** Subtracted once from the logits of tokens that were already generated. Default: 0. */
  readonly presence_penalty?: number | undefined;
  /**
   * Subtracted for each occurrence from the logits of tokens that were already generated. Default:
   * 0.
   */
  readonly frequency_penalty?: number | undefined;
  /**
   * Determines the random numbers, which do not depend on the batch. Two equal requests with the
   * same seed get the same tokens if their logits have the same bits (`Span.exact`). If null, the
   * seed is derived from the id that the broker assigns to the request. At least 0, at most
   * 9223372036854775807.
   */
  readonly seed?: number | null | undefined;
  /**
   * Strings and token ids that end the sequence, in addition to the end-of-sequence tokens of the
   * model. Strings are found across token boundaries. At most 64 in length.
   */
  readonly stop?: readonly (string | number)[] | undefined;
  /**
   * Whether entries have `processed`: the log-probability under the distribution that the token was
   * drawn from. Default: false.
   */
  readonly processed_logprobs?: boolean | undefined;
  /** Whether entries have `kept`: the candidates that the token was drawn from. Default: false. */
  readonly kept?: boolean | undefined;
  /** Do not end at the model's end-of-sequence token. Default: false. */
  readonly ignore_eos?: boolean | undefined;
  /**
   * Number of sequences to sample from this prompt. Their `seq` are 0 to n - 1. At least 1, at most
   * 128. Default: 1.
   */
  readonly n?: number | undefined;
  /**
   * Chosen by the client, unique among the live streams of its session. At least 0, at most
   * 9223372036854775807.
   */
  readonly stream_id: number;
  /**
   * The name of the model; if empty, the default model. Each GPU worker has a default. If all of
   * them have the same default, this is the default model. If their defaults differ, the default
   * model is the embedded model, provided that at least one worker has it as its default. At most
   * 1024 in length.
   */
  readonly model?: string | undefined;
  /**
   * Token ids, or text that the worker tokenizes. If null, attachment 0 has the ids, u32 each.
   * Without an attachment, the prompt consists of the buffers.
   */
  readonly prompt?: readonly number[] | string | null | undefined;
  /** Buffers that precede the prompt, in order. */
  readonly buffers?: readonly string[] | undefined;
  /**
   * When the stream ends, store the prompt and the tokens of sequence 0 in a buffer of this name.
   * At least 1, at most 256 in length.
   */
  readonly save?: string | null | undefined;
  /**
   * Text mode: each entry with a token also has a text. The text has the characters that the token
   * completes. Default: false.
   */
  readonly text?: boolean | undefined;
  /**
   * The controller: the tag or the id of a module, or the name of a built-in constraint, or the
   * name of a Python controller that the operator serves. The first characters of an id (at least
   * 8) are sufficient. At most 256 in length.
   */
  readonly controller?: string | null | undefined;
  /** The argument of the controller. A text is passed unchanged, any other value as JSON. */
  readonly controller_arg?: string | Readonly<Record<string, Json>> | readonly Json[] | null | undefined;
  /**
   * Remove the last token of the prompt, and force the first sampled token to begin with the text
   * of the removed token. The text of the stream does not repeat this text. Only possible without a
   * controller or with a built-in constraint. Default: false.
   */
  readonly heal_prompt?: boolean | undefined;
  /** Higher priorities are served first. At least -100, at most 100. Default: 0. */
  readonly priority?: number | undefined;
  /**
   * End the stream, with the finish reason `timeout`, this many seconds after the request arrived.
   * More than 0, at most 86400.
   */
  readonly timeout_s?: number | null | undefined;
  /**
   * The user who sent the request. Only given if one session serves several users. In the queue,
   * the requests of the users take turns. At most 256 in length.
   */
  readonly by?: string | undefined;
  /**
   * A secret that several sessions of one client have in common, such as the sessions of a gateway.
   * In the queue, their requests take turns as if they belonged to one session. At most 64 in
   * length.
   */
  readonly group?: string | undefined;
  /**
   * Whether TOKEN entries also have the fields `allowed`, `cut`, `bias` and `round_us`. They
   * describe the controller's masks, biases and rounds. Default: false.
   */
  readonly inspect?: boolean | undefined;
  /**
   * The `traceparent` of the request (W3C Trace Context); workers pass it on unchanged. At most 256
   * in length.
   */
  readonly trace?: string | undefined;
  /**
   * The id of the request in the log lines of all processes; default: the trace id in `trace`, if
   * the request has a trace. At most 128 in length.
   */
  readonly request_id?: string | undefined;
}

/** `SCORE`: the log-probability of each token of `scored`, given all tokens before it. */
export interface Score {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** At most 1024 in length. */
  readonly model?: string | undefined;
  /** At least -100, at most 100. Default: 0. */
  readonly priority?: number | undefined;
  /** More than 0, at most 86400. */
  readonly timeout_s?: number | null | undefined;
  /** At most 256 in length. */
  readonly by?: string | undefined;
  /** At most 64 in length. */
  readonly group?: string | undefined;
  /** At most 256 in length. */
  readonly trace?: string | undefined;
  /** At most 128 in length. */
  readonly request_id?: string | undefined;
  readonly scored: readonly number[] | string;
  readonly prompt?: readonly number[] | string | null | undefined;
  readonly buffers?: readonly string[] | undefined;
  /** Whether each entry also has the text of its token. Default: false. */
  readonly text?: boolean | undefined;
  /**
   * Number of the most likely tokens to report at each position, in addition to the scored token.
   * At least 0, at most 256. Default: 0.
   */
  readonly top_logprobs?: number | undefined;
}

/** `CANCEL`: end a stream, with `reason` as the finish reason of its last TOKEN entry. */
export interface Cancel {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** Default: "cancelled". */
  readonly reason?: "cancelled" | "timeout" | undefined;
}

/**
 * `ATTACH`: resume a stream of this session.
 *
 * The answer is an `ERROR` or `MSG {"attached": …}`. After this `MSG`, the broker sends the entries
 * of the stream from number `attached` on. The client discards entries that arrive before the
 * answer.
 */
export interface Attach {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** Number of TOKEN entries of the stream that the client has received. At least 0. */
  readonly received: number;
  /**
   * The last `moves` that the client has received for the stream (in SYSTEM or MSG); 0 if it has
   * not received any. At least 0. Default: 0.
   */
  readonly moves?: number | undefined;
}

/**
 * `INPUT`: a text for the program of a running stream of this session. The program receives it with
 * the call `receive`.
 *
 * The answer is `MSG {"input": …}` with the number of the input. If no answer arrives, the client
 * sends the input again with the same number. The program receives the input only once. If the
 * input is refused, the stream continues.
 */
export interface Input {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** The number of the input in its stream, from 1. At least 1, at most 2147483647. */
  readonly number: number;
  readonly text: string;
}

/**
 * `BUFFER`: store a text or token ids in the session under a name. If a request lists this name in
 * `buffers`, its prompt contains the buffer.
 *
 * The message has at most one of `tokens`, `text` and attachment 0 (u32 ids). Without any of these,
 * the buffer is deleted.
 */
export interface BufferMessage {
  /** At least 1, at most 256 in length. */
  readonly name: string;
  readonly tokens?: readonly number[] | null | undefined;
  readonly text?: string | null | undefined;
}

/** `MODEL_INFO`: the properties of a model; answered by `MSG {"model_info": …}`. */
export interface ModelInfoRequest {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** At most 1024 in length. */
  readonly model?: string | undefined;
}

/**
 * `TOKENIZER`: the tokenizer of a model; answered by `MSG {"tokenizer": …}`.
 *
 * If the model does not have a tokenizer in the form of the tokenizers library, the answer is the
 * error `unsupported`.
 */
export interface ModelTokenizerRequest {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** At most 1024 in length. */
  readonly model?: string | undefined;
}

/**
 * `EMBED`: one vector for each input, computed from the hidden states after the model's last layer.
 * Answered by `MSG {"embedded": …}`.
 */
export interface Embed {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** At most 1024 in length. */
  readonly model?: string | undefined;
  /** At least -100, at most 100. Default: 0. */
  readonly priority?: number | undefined;
  /** More than 0, at most 86400. */
  readonly timeout_s?: number | null | undefined;
  /** At most 256 in length. */
  readonly by?: string | undefined;
  /** At most 64 in length. */
  readonly group?: string | undefined;
  /** At most 256 in length. */
  readonly trace?: string | undefined;
  /** At most 128 in length. */
  readonly request_id?: string | undefined;
  /** The token ids of each input. At least 1, at most 256 in length. */
  readonly inputs: readonly (readonly number[])[];
  /**
   * If null, the checkpoint determines the pooling (`1_Pooling/config.json`). If the checkpoint
   * does not name a pooling, it is `mean` for an encoder, and `last` for a causal model.
   */
  readonly pooling?: "first" | "last" | "mean" | null | undefined;
}

/** `STATUS`: workers, sessions and queues; answered by `MSG {"status": …}`. */
export interface StatusRequest {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /**
   * List the live streams too. The operator receives all streams. A user of a gateway receives the
   * streams of its own session. Any other client receives the streams of all clients with its key.
   * Default: false.
   */
  readonly streams?: boolean | undefined;
  /** List only the streams of this session, for every kind of client. Default: false. */
  readonly own?: boolean | undefined;
  /** Include the counters and histograms of the broker and of each worker. Default: false. */
  readonly metrics?: boolean | undefined;
  /**
   * Names of tools to describe. If the list has a tool that the sender's programs may not call, the
   * answer is the error `not_allowed`. If it has a tool that no worker serves, the answer is the
   * error `no_worker`. At most 128 in length.
   */
  readonly tools?: readonly string[] | undefined;
}

/**
 * `UPLOAD`: store a controller module or a script, given as `data` or as attachment 0.
 *
 * The answer is `MSG` with a `StoredModule` as its result.
 */
export interface Upload {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** Base64. */
  readonly data?: string | null | undefined;
  /** At least 1, at most 256 in length. */
  readonly tag?: string | null | undefined;
  /**
   * The person or program that uploads the module, for display only. A program that serves several
   * users names the user here. At most 256 in length.
   */
  readonly by?: string | undefined;
}

/**
 * `TAG`: assign tags to a module, and remove them from all other modules.
 *
 * Answered by `MSG` with a `StoredModule` as its result.
 */
export interface Tag {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /**
   * The id of the module, the first characters of the id (at least 8), or another tag of the
   * module. At least 1, at most 256 in length.
   */
  readonly module: string;
  readonly tags: readonly string[];
  /** The person or program that assigns the tags, for display. At most 256 in length. */
  readonly by?: string | undefined;
}

/**
 * `TAGS`: list the modules of this tenant and their tags.
 *
 * Answered by `MSG` with a list of `StoredModule` as its result.
 */
export interface Tags {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
}

/**
 * `DELETE`: delete a tag, or a module with all its tags.
 *
 * The answer is `MSG`. Its result is a `StoredModule` that describes the deleted tag or module.
 */
export interface Delete {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /**
   * A tag, the id of a module, or the first characters of the id (at least 8). At least 1, at most
   * 256 in length.
   */
  readonly module: string;
}

/**
 * `DRAIN`: make a worker leave. The worker is not assigned any further requests, and hands over its
 * streams if other workers can take them.
 *
 * When the worker has left, the answer is a `MSG` whose result is `{"worker": name, "requests":
 * number}`. `requests` is the number of requests that the worker had when DRAIN arrived. Only the
 * operator may send DRAIN. The operator is a client with the operator's key. If the broker has no
 * keys, it is any client on the broker's machine except a gateway.
 */
export interface DrainWorker {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** The worker's name, as in `STATUS`. At least 1, at most 256 in length. */
  readonly worker: string;
}

/**
 * `PAUSE`: the workers of a model stop the model's steps. Later requests wait for RESUME.
 *
 * Only the operator may send PAUSE, RESUME and UPDATE_WEIGHTS. When all workers of the model have
 * followed the order, the answer is sent: a `MSG` with a `Rollout` as its result.
 */
export interface PauseModel {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** The name of the model; if empty, the default model. At most 1024 in length. */
  readonly model?: string | undefined;
  /**
   * `keep`: live streams stop between two steps, and continue after RESUME. `wait`: the workers
   * complete the live streams before the pause begins. `abort`: live streams end as `cancelled`.
   * Default: "keep".
   */
  readonly mode?: "abort" | "keep" | "wait" | undefined;
}

/** `RESUME`: ends the pause of a model. */
export interface ResumeModel {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /** The name of the model; if empty, the default model. At most 1024 in length. */
  readonly model?: string | undefined;
}

/**
 * `UPDATE_WEIGHTS`: the workers of a model replace the model's weights while streams run.
 *
 * The weights are in `folder`, or in one safetensors file with `size` and `sha256`. If `shared` is
 * given, the file is in this shared memory of the workers' machine. If neither `folder` nor
 * `shared` is given, the client sends the file in WEIGHTS messages after this message.
 *
 * Each worker first reads and checks the new weights. If the checks of all workers succeed, each
 * worker replaces its weights between two steps. If a check fails, the answer is an `ERROR`, and no
 * worker changes its weights.
 */
export interface UpdateWeights {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /**
   * The absolute path of the folder of the safetensors files on the workers' machines. The workers'
   * setting `allow` must admit the path. At most 4096 in length.
   */
  readonly folder?: string | undefined;
  /**
   * The name of the shared memory object, as for `shm_open`. The object begins with the file. At
   * most 255 in length.
   */
  readonly shared?: string | undefined;
  /** Number of bytes of the file. At least 0. Default: 0. */
  readonly size?: number | undefined;
  /**
   * SHA-256 of the file, hexadecimal. Weights with another hash are not used. At most 64 in length.
   */
  readonly sha256?: string | undefined;
  /** The name of the model; if empty, the default model. At most 1024 in length. */
  readonly model?: string | undefined;
  /**
   * The number of the new version, above the number of the current version; 0 stands for the next
   * number. At least 0, at most 9223372036854775807. Default: 0.
   */
  readonly version?: number | undefined;
  /**
   * `recompute`: the KV cache of live streams is computed again. `keep`: live streams keep their KV
   * cache, and their spans have `kept_cache`. Default: "recompute".
   */
  readonly mode?: "keep" | "recompute" | undefined;
  /**
   * The broker gives up the update if a worker has not read the weights after this number of
   * seconds. More than 0, at most 86400. Default: 600.
   */
  readonly timeout_s?: number | undefined;
}

/**
 * `WEIGHTS`: the next part of the file of an UPDATE_WEIGHTS. The bytes are attachment 0.
 *
 * When the broker has passed the part to all workers that read the weights, the answer is a `MSG`
 * with the result `{"sent": number}`. `sent` is the number of bytes that were passed so far. Only
 * the operator may send WEIGHTS.
 */
export interface SendWeights {
  /** At least 0, at most 9223372036854775807. */
  readonly stream_id: number;
  /**
   * `sha256` of the UPDATE_WEIGHTS to which the part belongs. The same session must have sent this
   * UPDATE_WEIGHTS. At most 64 in length.
   */
  readonly sha256: string;
  /** Number of bytes of all earlier parts. At least 0. Default: 0. */
  readonly offset?: number | undefined;
}

/** `PING`: answered by `PONG` with the same number. PINGs keep the session from expiring. */
export interface Ping {
  /** At least 0. Default: 0. */
  readonly n?: number | undefined;
  /**
   * The last `Pong.position` that the client has received on this connection. By this, the client
   * confirms that it has received all messages before that PONG. At least 0. Default: 0.
   */
  readonly ack?: number | undefined;
}

/** `BYE`: ends the session and its streams. */
export interface Bye {
  /**
   * Whether only the connection ends, as if it had been lost. A session that began with `HELLO` can
   * then be taken over, but an anonymous session ends. Programs that pass on the connections of
   * other clients, such as gateways, set this flag. Default: false.
   */
  readonly keep?: boolean | undefined;
}

/** The fields of `Generate`. */
export const GENERATE_FIELDS: readonly (keyof Generate)[] = [
  "temperature",
  "max_tokens",
  "min_tokens",
  "logit_bias",
  "top_logprobs",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "stop",
  "processed_logprobs",
  "kept",
  "ignore_eos",
  "n",
  "stream_id",
  "model",
  "prompt",
  "buffers",
  "save",
  "text",
  "controller",
  "controller_arg",
  "heal_prompt",
  "priority",
  "timeout_s",
  "by",
  "group",
  "inspect",
  "trace",
  "request_id",
];

/** The fields of `Score`. */
export const SCORE_FIELDS: readonly (keyof Score)[] = [
  "stream_id",
  "model",
  "priority",
  "timeout_s",
  "by",
  "group",
  "trace",
  "request_id",
  "scored",
  "prompt",
  "buffers",
  "text",
  "top_logprobs",
];

/** `WELCOME`: the answer to `HELLO`. */
export interface Welcome {
  readonly version: number;
  readonly encoding: string;
  /** The token of the session. A client that has the token can take the session over. */
  readonly session: string;
  /**
   * Whether `HELLO` took over a session of this broker, with its buffers. The session's streams
   * then wait for `ATTACH`.
   */
  readonly resumed: boolean;
  /**
   * The streams of a session that was taken over: the live streams, and the streams whose end the
   * client has not acknowledged. If `recovering` is true, workers may report more streams later.
   */
  readonly streams: readonly number[];
  /**
   * Whether the session comes from an earlier run of the broker, or from another broker. Workers
   * may then still report its streams. When a worker reports a stream, the broker answers the
   * stream's `ATTACH`. If no worker has reported the stream when the time for reports is over, the
   * answer is `unknown_stream`. Buffers are lost.
   */
  readonly recovering: boolean;
  readonly server: string;
  readonly capabilities: readonly string[];
  /** Interval at which the client sends PING, in seconds. */
  readonly ping_s: number;
  /**
   * If a client with the capability `ping` does not send a message for this number of seconds, the
   * broker treats the connection as lost. The session and its streams end some time later, unless
   * the client resumes the session.
   */
  readonly expiry_s: number;
  readonly max_body_bytes: number;
}

/** Adds the defaults of absent fields to a received `Welcome`. */
export function readWelcome(
  sent: Sent<
    Welcome,
      | "resumed"
      | "streams"
      | "recovering"
      | "server"
      | "capabilities"
      | "ping_s"
      | "expiry_s"
      | "max_body_bytes"
  >,
): Welcome {
  return {
    version: sent.version,
    encoding: sent.encoding,
    session: sent.session,
    resumed: sent.resumed ?? false,
    streams: sent.streams ?? [],
    recovering: sent.recovering ?? false,
    server: sent.server ?? "",
    capabilities: sent.capabilities ?? [],
    ping_s: sent.ping_s ?? 2.0,
    expiry_s: sent.expiry_s ?? 10.0,
    max_body_bytes: sent.max_body_bytes ?? 16777216,
  };
}

/** How the tokens of a sequence are computed, until its next span begins. */
export interface Span {
  /**
   * The hash of the weights: the first half of the SHA-256 of the loaded weights, in hexadecimal.
   * If the hashes are equal, the weights are equal. With a LoRA adapter, `+NAME@HASH` follows: the
   * name and the hash of the adapter.
   */
  readonly weights: string;
  /**
   * The arithmetic of the forwards, such as `AVX512`. Empty if the bits of logits and log-
   * probabilities depend on the batch. If this field is not empty, and two spans have equal fields,
   * equal sequences have equal bits in both spans.
   */
  readonly exact: string;
  /**
   * The version number that the last UPDATE_WEIGHTS gave to the weights; 0 if there was no
   * UPDATE_WEIGHTS.
   */
  readonly version: number;
  /**
   * Whether the sequence kept keys and values of an earlier version of the weights (the mode `keep`
   * of UPDATE_WEIGHTS). `exact` is then empty.
   */
  readonly kept_cache: boolean;
}

/** Adds the defaults of absent fields to a received `Span`. */
export function readSpan(sent: Sent<Span, "exact" | "version" | "kept_cache">): Span {
  return {
    weights: sent.weights,
    exact: sent.exact ?? "",
    version: sent.version ?? 0,
    kept_cache: sent.kept_cache ?? false,
  };
}

/**
 * The distribution that a token was sampled from: the answer to a controller's `Query`.
 *
 * All numbers are of the model's own distribution, before biases, penalties, mask and temperature.
 * Log-probabilities are natural; minus infinity is sent as the lowest float32.
 */
export interface Distribution {
  /**
   * Log-probability of the sampled token; 0 if the controller only read the distribution (the
   * action `look`).
   */
  readonly logprob: number;
  /**
   * Rank of the sampled token: 1 plus the number of more likely tokens; 0 if the controller only
   * read the distribution.
   */
  readonly rank: number;
  /** Entropy of the distribution in nats. */
  readonly entropy: number;
  /** Log-probabilities of the most likely tokens by id, the most likely first. */
  readonly top: Readonly<Record<string, number>>;
  /** Log-probabilities of the tokens that `Query.tokens` names, by id. */
  readonly scores: Readonly<Record<string, number>>;
}

/** Adds the defaults of absent fields to a received `Distribution`. */
export function readDistribution(sent: Sent<Distribution, "top" | "scores">): Distribution {
  return {
    logprob: sent.logprob,
    rank: sent.rank,
    entropy: sent.entropy,
    top: sent.top ?? {},
    scores: sent.scores ?? {},
  };
}

/**
 * An entry of `TOKEN`, whose body is a list of entries, or columns (`columns.py`).
 *
 * The first four fields, and `top_logprobs` of a GENERATE, are LMTP's. They are always present.
 */
export interface Token {
  /** The id of the token; null if the entry does not have a token, but only other information. */
  readonly token: number | null;
  readonly stream_id: number;
  /** Natural log-probability under the model's own distribution, before bias and temperature. */
  readonly logprob: number | null;
  readonly finish_reason: "cancelled" | "controller" | "error" | "length" | "stop" | "timeout" | null;
  /**
   * Log-probabilities of the most likely tokens and of this token, by id. Entries of a SCORE have
   * them only if the SCORE requests them.
   */
  readonly top_logprobs?: Readonly<Record<string, number>>;
  /**
   * With `processed_logprobs`: the natural log-probability under the distribution that the token
   * was drawn from, after bias, penalties, mask, temperature, `top_k`, `top_p` and `min_p`. 0 for a
   * greedy token.
   */
  readonly processed?: number;
  /**
   * With `Sampling.kept`: the ids of the candidates that the token was drawn from, in ascending
   * order. If all tokens of the vocabulary, or more than `MAX_KEPT` tokens, were candidates, this
   * is their number.
   */
  readonly kept?: number | readonly number[];
  /** Position of the token in its sequence, counted from the first generated or scored token. */
  readonly pos: number;
  /** The number of the entry's sequence in the stream, from 0. */
  readonly seq: number;
  /** In the first entry of a fork: the sequence from which it was forked. */
  readonly parent: number | null;
  /** Text mode: the text that this token completes. */
  readonly text?: string;
  /** Number of tokens to remove from the end of the sequence before `token` is appended. */
  readonly backtrack: number;
  /**
   * The prompt with which the sequence begins anew. It replaces the sequence's former prompt.
   * `backtrack` is then the number of all tokens after the former prompt.
   */
  readonly prompt: readonly number[];
  readonly logs: string;
  readonly storage: readonly Json[];
  /** The texts that the program of the stream has sent to its client, in order. */
  readonly messages: readonly string[];
  /**
   * The number of the `INPUT` that the program of the sequence waits for; 0 if the program does not
   * wait. The next entry of the sequence ends the wait.
   */
  readonly waiting: number;
  readonly error: string | null;
  /** The code that belongs to `error`. */
  readonly code: string | null;
  /**
   * In an entry with a finish_reason: the number of sequences of the stream that still run. If it
   * is 0, the stream has ended.
   */
  readonly live: number;
  /**
   * In an entry with a finish_reason: the element of the request's `stop` that ended the sequence;
   * null if the sequence ended for another reason, such as an end-of-sequence token.
   */
  readonly stop: string | number | null;
  /**
   * How the tokens of the sequence are computed from this entry on. Present in the first entry of a
   * sequence, in its first entry from another worker, and in its first entry after an update of the
   * weights.
   */
  readonly span: Span | null;
  /**
   * In the last entry of a sequence: whether all steps of the stream so far were exact, with the
   * same arithmetic (`Span.exact`). Steps at earlier workers count too. If true, the bits of the
   * sequence's logits and log-probabilities do not depend on batches, chunks, drafts, forks and
   * moves.
   */
  readonly exact: boolean | null;
  /** In the first entry of a stream: the number of tokens of its prompt, including its buffers. */
  readonly prompt_tokens: number;
  /** In the first entry of a stream: the number of prompt tokens that were in the cache already. */
  readonly cached_tokens: number;
  /** In the last entry of a sequence under a built-in constraint: how its text ended. */
  readonly constraint: "closed" | "complete" | "cut" | null;
  /**
   * `inspect`: how many tokens the mask and the controller's bias allowed at this position; absent
   * if the controller gave neither.
   */
  readonly allowed?: number;
  /** `inspect`: the most likely tokens that the mask and the bias forbade, the likeliest first. */
  readonly cut: readonly number[];
  /** `inspect`: the time of the controller's round before this token, in microseconds. */
  readonly round_us: number;
  /**
   * `inspect`: the controller's bias of the most likely tokens, and of this token. Tokens with a
   * bias of 0, and forbidden tokens, are left out.
   */
  readonly bias: Readonly<Record<string, number>>;
  /**
   * The answer to the controller's `Query` about this token. It is in the stream for replays of the
   * controller. In an entry without a token, it answers the action `look`.
   */
  readonly distribution: Distribution | null;
  /**
   * How often the sequence was woken from suspension since its last sampled token. Replays of the
   * controller need this number.
   */
  readonly wakes: number;
  /**
   * The program of the stream has scored texts as continuations of the sequence. These are their
   * scores. They are in the stream for replays of the controller.
   */
  readonly scores: readonly (readonly number[])[];
}

/** Adds the defaults of absent fields to a received `Token`. */
export function readToken(
  sent: Sent<
    Token,
      | "pos"
      | "seq"
      | "parent"
      | "backtrack"
      | "prompt"
      | "logs"
      | "storage"
      | "messages"
      | "waiting"
      | "error"
      | "code"
      | "live"
      | "stop"
      | "span"
      | "exact"
      | "prompt_tokens"
      | "cached_tokens"
      | "constraint"
      | "cut"
      | "round_us"
      | "bias"
      | "distribution"
      | "wakes"
      | "scores"
  >,
): Token {
  const read: Made<Token> = {
    token: sent.token,
    stream_id: sent.stream_id,
    logprob: sent.logprob,
    finish_reason: sent.finish_reason,
    pos: sent.pos ?? 0,
    seq: sent.seq ?? 0,
    parent: sent.parent ?? null,
    backtrack: sent.backtrack ?? 0,
    prompt: sent.prompt ?? [],
    logs: sent.logs ?? "",
    storage: sent.storage ?? [],
    messages: sent.messages ?? [],
    waiting: sent.waiting ?? 0,
    error: sent.error ?? null,
    code: sent.code ?? null,
    live: sent.live ?? 0,
    stop: sent.stop ?? null,
    span: sent.span == null ? null : readSpan(sent.span),
    exact: sent.exact ?? null,
    prompt_tokens: sent.prompt_tokens ?? 0,
    cached_tokens: sent.cached_tokens ?? 0,
    constraint: sent.constraint ?? null,
    cut: sent.cut ?? [],
    round_us: sent.round_us ?? 0,
    bias: sent.bias ?? {},
    distribution: sent.distribution == null ? null : readDistribution(sent.distribution),
    wakes: sent.wakes ?? 0,
    scores: sent.scores ?? [],
  };
  if (sent.top_logprobs !== undefined) read.top_logprobs = sent.top_logprobs;
  if (sent.processed !== undefined) read.processed = sent.processed;
  if (sent.kept !== undefined) read.kept = sent.kept;
  if (sent.text !== undefined) read.text = sent.text;
  if (sent.allowed !== undefined) read.allowed = sent.allowed;
  return read;
}

/**
 * How a GPU worker has quantized the weights of a model, and the loss of the quantization. The
 * worker measured the loss on a fixed text when it loaded the model.
 */
export interface Quantized {
  /** `int8` or `int4`. */
  readonly kind: string;
  /** The memory that the weights no longer take, in bytes. */
  readonly saved_bytes: number;
  /**
   * The mean Kullback-Leibler divergence between the distributions of the next token before and
   * after the quantization, in nats.
   */
  readonly divergence: number;
  /** The perplexity of the text. */
  readonly perplexity: number;
  /** The perplexity of the text before the quantization. */
  readonly perplexity_before: number;
}

/** Adds the defaults of absent fields to a received `Quantized`. */
export function readQuantized(sent: Sent<Quantized, never>): Quantized {
  return {
    kind: sent.kind,
    saved_bytes: sent.saved_bytes,
    divergence: sent.divergence,
    perplexity: sent.perplexity,
    perplexity_before: sent.perplexity_before,
  };
}

/** How a GPU worker computes the steps of a model. */
export interface ForwardPath {
  /**
   * The kind of attention, for example `FlashAttention over blocks`, `native code over blocks` or
   * `SDPA over gathered blocks`.
   */
  readonly attention: string;
  /** Number of batch sizes that have a CUDA graph. */
  readonly graphs: number;
  /**
   * The fast paths that the device supports but the worker does not use, each with the reason;
   * empty on a CPU.
   */
  readonly fallbacks: readonly string[];
  /** Whether the logits and log-probabilities of a sequence have the same bits in every batch. */
  readonly exact: boolean;
  /** The reason if `exact` is false. */
  readonly why_not_exact: string;
  /** `Span.exact` of the streams of this model. */
  readonly arithmetic: string;
  /** `Span.weights` of the streams of this model. */
  readonly weights: string;
  /** `Span.version` of the streams of this model. */
  readonly version: number;
  /** null unless the worker has quantized the weights (setting `quantize`). */
  readonly quantized: Quantized | null;
}

/** Adds the defaults of absent fields to a received `ForwardPath`. */
export function readForwardPath(
  sent: Sent<
    ForwardPath,
      | "attention"
      | "graphs"
      | "fallbacks"
      | "exact"
      | "why_not_exact"
      | "arithmetic"
      | "weights"
      | "version"
      | "quantized"
  >,
): ForwardPath {
  return {
    attention: sent.attention ?? "",
    graphs: sent.graphs ?? 0,
    fallbacks: sent.fallbacks ?? [],
    exact: sent.exact ?? false,
    why_not_exact: sent.why_not_exact ?? "",
    arithmetic: sent.arithmetic ?? "",
    weights: sent.weights ?? "",
    version: sent.version ?? 0,
    quantized: sent.quantized == null ? null : readQuantized(sent.quantized),
  };
}

/** The properties of a model. */
export interface ModelInfo {
  readonly name: string;
  readonly vocab_size: number;
  readonly context_length: number;
  readonly eos_token_ids: readonly number[];
  /**
   * SHA-256 of the tokenizer's canonical JSON. Models with equal fingerprints tokenize a text in
   * the same way.
   */
  readonly fingerprint: string;
  readonly architecture: string;
  readonly parameters: number;
  readonly dtype: string;
  readonly device: string;
  /**
   * The version of the sampling algorithm. Workers with different versions may draw different
   * tokens from equal seeds.
   */
  readonly sampling: number;
  readonly path: ForwardPath;
  /** For a LoRA adapter: the name of the model that it adapts. Otherwise empty. */
  readonly parent: string;
  /** For a LoRA adapter: its hash. Otherwise empty. */
  readonly adapter: string;
}

/** Adds the defaults of absent fields to a received `ModelInfo`. */
export function readModelInfo(
  sent: Sent<
    ModelInfo,
      | "architecture"
      | "parameters"
      | "dtype"
      | "device"
      | "sampling"
      | "path"
      | "parent"
      | "adapter"
  >,
): ModelInfo {
  return {
    name: sent.name,
    vocab_size: sent.vocab_size,
    context_length: sent.context_length,
    eos_token_ids: sent.eos_token_ids,
    fingerprint: sent.fingerprint,
    architecture: sent.architecture ?? "",
    parameters: sent.parameters ?? 0,
    dtype: sent.dtype ?? "",
    device: sent.device ?? "",
    sampling: sent.sampling ?? 1,
    path: sent.path == null ? readForwardPath({}) : readForwardPath(sent.path),
    parent: sent.parent ?? "",
    adapter: sent.adapter ?? "",
  };
}

/**
 * Numbers of observed values by size. `counts[i]` is the number of values above `bounds[i - 1]` and
 * up to `bounds[i]`. The last count is the number of values above all bounds.
 */
export interface Histogram {
  readonly bounds: readonly number[];
  readonly counts: readonly number[];
  /** The sum of all observations. */
  readonly total: number;
}

/** Adds the defaults of absent fields to a received `Histogram`. */
export function readHistogram(sent: Sent<Histogram, "total">): Histogram {
  return {
    bounds: sent.bounds,
    counts: sent.counts,
    total: sent.total ?? 0.0,
  };
}

/**
 * A number or a histogram, with a name and labels. `value` has no meaning if the series has a
 * histogram.
 */
export interface Series {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
  readonly histogram: Histogram | null;
}

/** Adds the defaults of absent fields to a received `Series`. */
export function readSeries(sent: Sent<Series, "value" | "histogram">): Series {
  return {
    name: sent.name,
    labels: sent.labels,
    value: sent.value ?? 0.0,
    histogram: sent.histogram == null ? null : readHistogram(sent.histogram),
  };
}

/** A worker, as `STATUS` shows it. */
export interface WorkerStatus {
  readonly name: string;
  readonly role: string;
  readonly pid: number;
  readonly host: string;
  readonly state: string;
  /** The models that are loaded. */
  readonly models: readonly string[];
  /** The controllers that a controller worker serves by name; uploaded modules are not listed. */
  readonly controllers: readonly string[];
  /** The names of the functions that a tool worker serves. */
  readonly tools: readonly string[];
  /** Layers of isolation that the guests of a controller worker lack, with the reasons. */
  readonly missing_layers: readonly string[];
  readonly requests: number;
  readonly capacity: number;
  readonly heartbeat_age_s: number;
  readonly step_age_s: number | null;
  readonly load: Readonly<Record<string, number>>;
  /** How a GPU worker computes the steps of each model, by model. */
  readonly paths: Readonly<Record<string, ForwardPath>>;
  /** With `metrics`: the metrics of the worker as of its last heartbeat. */
  readonly metrics: readonly Series[];
}

/** Adds the defaults of absent fields to a received `WorkerStatus`. */
export function readWorkerStatus(
  sent: Sent<
    WorkerStatus,
      | "controllers"
      | "tools"
      | "missing_layers"
      | "step_age_s"
      | "load"
      | "paths"
      | "metrics"
  >,
): WorkerStatus {
  return {
    name: sent.name,
    role: sent.role,
    pid: sent.pid,
    host: sent.host,
    state: sent.state,
    models: sent.models,
    controllers: sent.controllers ?? [],
    tools: sent.tools ?? [],
    missing_layers: sent.missing_layers ?? [],
    requests: sent.requests,
    capacity: sent.capacity,
    heartbeat_age_s: sent.heartbeat_age_s,
    step_age_s: sent.step_age_s ?? null,
    load: sent.load ?? {},
    paths: sent.paths ?? {},
    metrics: sent.metrics == null ? [] : sent.metrics.map(readSeries),
  };
}

/** A live stream, as `STATUS` with `streams` shows it. */
export interface StreamStatus {
  /** The id that the broker has assigned to the request. */
  readonly request: number;
  /** `GENERATE`, `SCORE`, or another message that a worker answers. */
  readonly type: string;
  /** Whether the stream waits for a worker, or runs at a worker. */
  readonly state: "running" | "waiting";
  /** Seconds since the request arrived. */
  readonly age_s: number;
  /** The name of the client's program (`Hello.client`). */
  readonly client: string;
  readonly model: string;
  readonly worker: string;
  readonly controller: string;
  readonly controller_worker: string;
  readonly priority: number;
}

/** Adds the defaults of absent fields to a received `StreamStatus`. */
export function readStreamStatus(
  sent: Sent<
    StreamStatus,
      | "client"
      | "model"
      | "worker"
      | "controller"
      | "controller_worker"
      | "priority"
  >,
): StreamStatus {
  return {
    request: sent.request,
    type: sent.type,
    state: sent.state,
    age_s: sent.age_s,
    client: sent.client ?? "",
    model: sent.model ?? "",
    worker: sent.worker ?? "",
    controller: sent.controller ?? "",
    controller_worker: sent.controller_worker ?? "",
    priority: sent.priority ?? 0,
  };
}

/** A function that a tool worker serves. */
export interface Tool {
  readonly name: string;
  readonly description: string;
  /** The JSON schema of the function's arguments. The arguments are an object. */
  readonly parameters: Readonly<Record<string, Json>>;
  /** Maximum time from the arrival of a call to its answer, in seconds. */
  readonly timeout_s: number;
}

/** Adds the defaults of absent fields to a received `Tool`. */
export function readTool(sent: Sent<Tool, "description" | "parameters" | "timeout_s">): Tool {
  return {
    name: sent.name,
    description: sent.description ?? "",
    parameters: sent.parameters ?? {},
    timeout_s: sent.timeout_s ?? 30.0,
  };
}

/** The answer to `STATUS`. */
export interface Status {
  readonly version: string;
  readonly uptime_s: number;
  readonly sessions: number;
  readonly streams: number;
  readonly queued: number;
  readonly workers: readonly WorkerStatus[];
  readonly counters: Readonly<Record<string, number>>;
  /** The paused models, and the mode of their pauses. */
  readonly paused: Readonly<Record<string, "abort" | "keep" | "wait">>;
  /**
   * With `streams`: the live streams that the sender may see (`StatusRequest.streams`), in the
   * order of their arrival.
   */
  readonly live: readonly StreamStatus[];
  /** With `metrics`: the metrics of the broker itself. */
  readonly metrics: readonly Series[];
  /** The tools that `StatusRequest.tools` names, in the same order. */
  readonly tools: readonly Tool[];
}

/** Adds the defaults of absent fields to a received `Status`. */
export function readStatus(
  sent: Sent<
    Status,
      | "counters"
      | "paused"
      | "live"
      | "metrics"
      | "tools"
  >,
): Status {
  return {
    version: sent.version,
    uptime_s: sent.uptime_s,
    sessions: sent.sessions,
    streams: sent.streams,
    queued: sent.queued,
    workers: sent.workers.map(readWorkerStatus),
    counters: sent.counters ?? {},
    paused: sent.paused ?? {},
    live: sent.live == null ? [] : sent.live.map(readStreamStatus),
    metrics: sent.metrics == null ? [] : sent.metrics.map(readSeries),
    tools: sent.tools == null ? [] : sent.tools.map(readTool),
  };
}

/** The tokenizer of a model, for programs that tokenize and detokenize themselves. */
export interface TokenizerFiles {
  /** SHA-256 of the tokenizer's canonical JSON, as in `ModelInfo`. */
  readonly fingerprint: string;
  /**
   * The content of the file that the tokenizers library reads (`tokenizer.json`). The file has up
   * to about 20 MB.
   */
  readonly json: string;
  /** The chat template in Jinja, as in transformers; empty if the model has no chat template. */
  readonly chat_template: string;
  /** The special tokens by their names in transformers: `bos_token`, `eos_token`, `pad_token`, … */
  readonly special_tokens: Readonly<Record<string, string>>;
}

/** Adds the defaults of absent fields to a received `TokenizerFiles`. */
export function readTokenizerFiles(
  sent: Sent<
    TokenizerFiles,
      | "chat_template"
      | "special_tokens"
  >,
): TokenizerFiles {
  return {
    fingerprint: sent.fingerprint,
    json: sent.json,
    chat_template: sent.chat_template ?? "",
    special_tokens: sent.special_tokens ?? {},
  };
}

/** The vectors of the inputs of an `EMBED`. */
export interface Embedded {
  /** Number of elements of each vector. */
  readonly dimensions: number;
  /**
   * The vectors, one after another, as little-endian float32. Each vector has the L2 norm 1. In
   * JSON, the bytes are encoded as base64.
   */
  readonly vectors: string;
  readonly pooling: "first" | "last" | "mean";
}

/** Adds the defaults of absent fields to a received `Embedded`. */
export function readEmbedded(sent: Sent<Embedded, never>): Embedded {
  return {
    dimensions: sent.dimensions,
    vectors: sent.vectors,
    pooling: sent.pooling,
  };
}

/**
 * The answer to an `INPUT`. Without a `code`, the input was stored; with a `code`, it was refused.
 */
export interface InputAnswer {
  /** The number of the input. */
  readonly number: number;
  readonly code: string | null;
  readonly message: string;
  /**
   * Seconds to wait before the client sends the refused input again. null if the input would be
   * refused again.
   */
  readonly retry_after_s: number | null;
}

/** Adds the defaults of absent fields to a received `InputAnswer`. */
export function readInputAnswer(
  sent: Sent<
    InputAnswer,
      | "code"
      | "message"
      | "retry_after_s"
  >,
): InputAnswer {
  return {
    number: sent.number,
    code: sent.code ?? null,
    message: sent.message ?? "",
    retry_after_s: sent.retry_after_s ?? null,
  };
}

/** `MSG`: the answer to a request that is not a stream. */
export interface Msg {
  readonly stream_id: number;
  readonly model_info?: ModelInfo;
  readonly status?: Status;
  /**
   * Answers an `ATTACH`: the number of the first entry that follows. This is usually
   * `Attach.received`. It is 0 if two workers had copies of the stream, and the client has received
   * entries of the wrong copy. The copies may order the entries of different sequences differently.
   * So the client discards the first entries of each sequence, as many as it has already received.
   */
  readonly attached?: number;
  /** With `attached`: how often the stream has moved (`Attach.moves`). */
  readonly moves: number;
  readonly tokenizer?: TokenizerFiles;
  readonly embedded?: Embedded;
  /** The answer to an `INPUT`; the stream continues. */
  readonly input?: InputAnswer;
  readonly result?: Json;
}

/** Adds the defaults of absent fields to a received `Msg`. */
export function readMsg(sent: Sent<Msg, "moves">): Msg {
  const read: Made<Msg> = {
    stream_id: sent.stream_id,
    moves: sent.moves ?? 0,
  };
  if (sent.model_info !== undefined) read.model_info = readModelInfo(sent.model_info);
  if (sent.status !== undefined) read.status = readStatus(sent.status);
  if (sent.attached !== undefined) read.attached = sent.attached;
  if (sent.tokenizer !== undefined) read.tokenizer = readTokenizerFiles(sent.tokenizer);
  if (sent.embedded !== undefined) read.embedded = readEmbedded(sent.embedded);
  if (sent.input !== undefined) read.input = readInputAnswer(sent.input);
  if (sent.result !== undefined) read.result = sent.result;
  return read;
}

/**
 * `SYSTEM`: an event of a stream, for display. For example, the stream waits or has moved. The
 * stream's entries do not contain such events.
 */
export interface System {
  readonly event: "draining" | "loaded" | "loading" | "moved" | "not_movable" | "queued" | "retrying" | "throttled";
  readonly message: string;
  readonly stream_id: number | null;
  readonly model: string;
  /**
   * `queued`: the position in the queue, from 1. null if the request has a worker, and only its
   * controller waits.
   */
  readonly place: number | null;
  /** `loading`: the fraction that is loaded, 0 to 1. */
  readonly progress: number | null;
  /** `moved`: the worker that had the stream, or that ran its controller. */
  readonly left: string;
  /** `moved`: the worker that has the stream now. */
  readonly worker: string;
  /** `moved`: the seconds from the loss of the former worker to the first new token. */
  readonly pause_s: number | null;
  /** `moved`: how often the stream has moved to another worker, for `ATTACH`. */
  readonly moves: number;
}

/** Adds the defaults of absent fields to a received `System`. */
export function readSystem(
  sent: Sent<
    System,
      | "stream_id"
      | "model"
      | "place"
      | "progress"
      | "left"
      | "worker"
      | "pause_s"
      | "moves"
  >,
): System {
  return {
    event: sent.event,
    message: sent.message,
    stream_id: sent.stream_id ?? null,
    model: sent.model ?? "",
    place: sent.place ?? null,
    progress: sent.progress ?? null,
    left: sent.left ?? "",
    worker: sent.worker ?? "",
    pause_s: sent.pause_s ?? null,
    moves: sent.moves ?? 0,
  };
}

/** `ERROR`: a request was refused, or a stream failed. */
export interface ErrorMessage {
  readonly code: string;
  readonly message: string;
  /**
   * The stream that this error ends. null if the error does not concern a stream, or if the
   * message's `stream_id` could not be read. With `duplicate_stream`, only the new request ends,
   * and the earlier stream with this id continues.
   */
  readonly stream_id: number | null;
  /** The path of the invalid field, such as `$.max_tokens`. */
  readonly path: string | null;
  /** Seconds to wait before the request is sent again. */
  readonly retry_after_s: number | null;
  /** The type of the refused message, if the error does not concern a stream. */
  readonly type: string | null;
}

/** Adds the defaults of absent fields to a received `ErrorMessage`. */
export function readErrorMessage(
  sent: Sent<
    ErrorMessage,
      | "stream_id"
      | "path"
      | "retry_after_s"
      | "type"
  >,
): ErrorMessage {
  return {
    code: sent.code,
    message: sent.message,
    stream_id: sent.stream_id ?? null,
    path: sent.path ?? null,
    retry_after_s: sent.retry_after_s ?? null,
    type: sent.type ?? null,
  };
}

/** `PONG`: the answer to `PING`. */
export interface Pong {
  readonly n: number;
  /**
   * Whether this connection has a session that began with `HELLO`. If false, the client sends
   * `HELLO` again. For example, the broker was restarted, or the session has expired.
   */
  readonly session: boolean;
  /**
   * For a client with the capability `ack`: the number of ends of requests that were sent on this
   * connection so far.
   */
  readonly position: number;
}

/** Adds the defaults of absent fields to a received `Pong`. */
export function readPong(sent: Sent<Pong, "n" | "session" | "position">): Pong {
  return {
    n: sent.n ?? 0,
    session: sent.session ?? true,
    position: sent.position ?? 0,
  };
}

/** The origin of a module's tag. */
export interface Tagged {
  /** When the tag was last assigned, in seconds since 1970. */
  readonly at: number;
  /**
   * The name of the user who assigned the tag (`by` of the request), or else the name of the
   * tenant; empty if neither has a name.
   */
  readonly by: string;
}

/** Adds the defaults of absent fields to a received `Tagged`. */
export function readTagged(sent: Sent<Tagged, "at" | "by">): Tagged {
  return {
    at: sent.at ?? 0.0,
    by: sent.by ?? "",
  };
}

/** A controller module or a script in the store of a tenant. */
export interface StoredModule {
  /** The id of the module: SHA-256 of the uploaded bytes, hexadecimal. */
  readonly module: string;
  readonly tags: readonly string[];
  /** Size of the upload in bytes. */
  readonly size: number;
  /** When the module was uploaded, in seconds since 1970. */
  readonly uploaded: number;
  /** The interface that the module implements: `native` or `aici`. For a script: its language. */
  readonly abi: string;
  /** Whether the sequences that the module steers may fork. */
  readonly forks: boolean;
  /** If `forks` is false: the part of the module's state that cannot be copied to a fork. */
  readonly why_no_fork: string;
  /** Size of the module's compiled form in bytes. */
  readonly compiled_size: number;
  /**
   * The time to compile the upload, in milliseconds; almost 0 if the module was compiled before.
   */
  readonly compile_ms: number;
  /** The origin of each of `tags`. */
  readonly tagged: Readonly<Record<string, Tagged>>;
}

/** Adds the defaults of absent fields to a received `StoredModule`. */
export function readStoredModule(
  sent: Sent<
    StoredModule,
      | "tags"
      | "size"
      | "uploaded"
      | "abi"
      | "forks"
      | "why_no_fork"
      | "compiled_size"
      | "compile_ms"
      | "tagged"
  >,
): StoredModule {
  return {
    module: sent.module,
    tags: sent.tags ?? [],
    size: sent.size ?? 0,
    uploaded: sent.uploaded ?? 0.0,
    abi: sent.abi ?? "",
    forks: sent.forks ?? true,
    why_no_fork: sent.why_no_fork ?? "",
    compiled_size: sent.compiled_size ?? 0,
    compile_ms: sent.compile_ms ?? 0.0,
    tagged: sent.tagged ?? {},
  };
}

/** The body of each message type of a client. */
export interface ClientMessages {
  readonly HELLO: Hello;
  readonly GENERATE: Generate;
  readonly SCORE: Score;
  readonly CANCEL: Cancel;
  readonly ATTACH: Attach;
  readonly INPUT: Input;
  readonly BUFFER: BufferMessage;
  readonly MODEL_INFO: ModelInfoRequest;
  readonly TOKENIZER: ModelTokenizerRequest;
  readonly EMBED: Embed;
  readonly STATUS: StatusRequest;
  readonly UPLOAD: Upload;
  readonly TAG: Tag;
  readonly TAGS: Tags;
  readonly DELETE: Delete;
  readonly DRAIN: DrainWorker;
  readonly PAUSE: PauseModel;
  readonly RESUME: ResumeModel;
  readonly UPDATE_WEIGHTS: UpdateWeights;
  readonly WEIGHTS: SendWeights;
  readonly PING: Ping;
  readonly BYE: Bye;
}

/** The body of each message type of the broker. */
export interface ServerMessages {
  readonly WELCOME: Welcome;
  readonly TOKEN: readonly Token[];
  readonly MSG: Msg;
  readonly SYSTEM: System;
  readonly ERROR: ErrorMessage;
  readonly PONG: Pong;
}

/** A message to a client. */
export type ServerMessage = {
  [T in keyof ServerMessages]: { readonly type: T; readonly body: ServerMessages[T] };
}[keyof ServerMessages];

/** The message with this type and decoded body; null if the type is unknown. */
export function readMessage(type: string, body: unknown): ServerMessage | null {
  switch (type) {
    case "WELCOME":
      return { type, body: readWelcome(body as Parameters<typeof readWelcome>[0]) };
    case "TOKEN":
      return { type, body: (body as Parameters<typeof readToken>[0][]).map(readToken) };
    case "MSG":
      return { type, body: readMsg(body as Parameters<typeof readMsg>[0]) };
    case "SYSTEM":
      return { type, body: readSystem(body as Parameters<typeof readSystem>[0]) };
    case "ERROR":
      return { type, body: readErrorMessage(body as Parameters<typeof readErrorMessage>[0]) };
    case "PONG":
      return { type, body: readPong(body as Parameters<typeof readPong>[0]) };
    default:
      return null;
  }
}
