/** The client. The entry points (`browser.ts`, `node.ts`) choose its transport. */

import type { Call } from "./calls.js";
import { Connection } from "./connection.js";
import {
  type Json,
  type ModelInfo,
  type Status,
  type StoredModule,
  type TokenizerFiles,
  readStoredModule,
} from "./messages.js";
import { CLIENT_OPTIONS, RUN_OPTIONS, checkOptions } from "./options.js";
import {
  type AskOptions,
  type GenerateOptions,
  type Prompt,
  type RunOptions,
  type ScoreOptions,
  type StatusOptions,
  type UploadOptions,
  bufferCall,
  generateCall,
  modelCall,
  scoreCall,
  statusCall,
  storeCall,
  uploadCall,
} from "./requests.js";
import { GeneratedSequence, type Scores } from "./results.js";
import { TokenStream } from "./stream.js";
import type { Transport } from "./transport.js";

/** Default of `patience_s`, in seconds. */
const PATIENCE_S = 30;

/** The options of a client. */
export interface ClientOptions {
  /** If the broker does not answer for this number of seconds, calls fail. Default: 30. */
  readonly patience_s?: number | undefined;
  /**
   * If the connection is lost, the broker continues this client's streams for at least this number
   * of seconds. If `patience_s` is not given, it is then at least `keep_s`. Default: 0.
   */
  readonly keep_s?: number | undefined;
  /** The API key, if the gateway needs one. Only for WebSockets. */
  readonly api_key?: string | undefined;
}

/**
 * A connection to Tokenbus for any number of streams. The first call opens the connection.
 *
 * Options and entries have the names of the protocol (`max_tokens`, `finish_reason`).
 */
export class BaseClient {
  readonly #connection: Connection;

  constructor(transport: Transport, options: ClientOptions) {
    checkOptions(options, CLIENT_OPTIONS);
    const keepS = options.keep_s ?? 0;
    const patienceS = options.patience_s ?? Math.max(PATIENCE_S, keepS);
    this.#connection = new Connection(transport, patienceS, keepS);
  }

  /** The address of the broker or the gateway, or several addresses, separated by commas. */
  get address(): string {
    return this.#connection.transport.address;
  }

  /**
   * Begins a stream of tokens that continue `prompt`, which is text or token ids.
   *
   * Throws TypeError if an option is unknown, and RequestError if the client itself detects that
   * the request is not valid. Errors of the broker and the workers are thrown when the stream is
   * read.
   */
  generate(prompt: Prompt, options: GenerateOptions = {}): TokenStream {
    return this.#stream(generateCall(prompt, options), options);
  }

  /**
   * Begins a stream under a controller with the argument `arg`. `controller` is the id or the tag of
   * a module, or the name of a built-in constraint (`regex`, `json_schema`, …).
   */
  run(controller: string, prompt: Prompt, options: RunOptions = {}): TokenStream {
    checkOptions(options, RUN_OPTIONS);
    const { arg, ...rest } = options;
    return this.generate(prompt, { ...rest, controller, controller_arg: arg });
  }

  /** The log-probability of each token of `scored`, given all tokens before it. */
  async score(prompt: Prompt, scored: Prompt, options: ScoreOptions = {}): Promise<Scores> {
    const stream = this.#stream(scoreCall(prompt, scored, options), options);
    const [scores] = await stream.wait();
    return scores ?? new GeneratedSequence(0, null);
  }

  /** The properties of a model. A model that is served on demand is loaded first. */
  async modelInfo(model = "", options: AskOptions = {}): Promise<ModelInfo> {
    const body = { stream_id: 0, model };
    const answer = await this.#ask(modelCall({ type: "MODEL_INFO", body }, options), options);
    return present(answer.model_info, "model_info");
  }

  /** The tokenizer of a model, in the format of the tokenizers library, and its chat template. */
  async tokenizer(model = "", options: AskOptions = {}): Promise<TokenizerFiles> {
    const body = { stream_id: 0, model };
    const answer = await this.#ask(modelCall({ type: "TOKENIZER", body }, options), options);
    return present(answer.tokenizer, "tokenizer");
  }

  /** Returns the broker's workers, sessions and queues. `streams` adds the live streams. */
  async status(options: StatusOptions = {}): Promise<Status> {
    return present((await this.#ask(statusCall(options), options)).status, "status");
  }

  /**
   * Stores a part of a prompt at the broker, under a name. The prompt of a request with `buffers:
   * [name]` begins with this part. If `content` is null, deletes the part.
   */
  async buffer(name: string, content: Prompt | null, options: AskOptions = {}): Promise<void> {
    await this.#ask(bufferCall(name, content, options), options);
  }

  /** Stores a Wasm module, for `run`. If the module is already stored, only adds the tag. */
  async upload(wasm: Uint8Array, options: UploadOptions = {}): Promise<StoredModule> {
    return storedModule((await this.#ask(uploadCall(wasm, options), options)).result);
  }

  /** Assigns tags to the module with this id or tag, and removes them from other modules. */
  async tag(
    module: string,
    tags: readonly string[],
    options: AskOptions = {},
  ): Promise<StoredModule> {
    const call = storeCall({ type: "TAG", body: { stream_id: 0, module, tags } }, options);
    return storedModule((await this.#ask(call, options)).result);
  }

  /** The uploaded controller modules, the latest first. */
  async modules(options: AskOptions = {}): Promise<StoredModule[]> {
    const call = storeCall({ type: "TAGS", body: { stream_id: 0 } }, options);
    const { result } = await this.#ask(call, options);
    return Array.isArray(result) ? result.map(storedModule) : [];
  }

  /** Deletes a tag, or a module and all its tags. `name` is the tag or the module id. */
  async delete(name: string, options: AskOptions = {}): Promise<StoredModule> {
    const call = storeCall({ type: "DELETE", body: { stream_id: 0, module: name } }, options);
    return storedModule((await this.#ask(call, options)).result);
  }

  /** Ends the session and all of its streams. Node does not exit before this method is called. */
  close(): void {
    this.#connection.close();
  }

  #stream(call: Call, options: GenerateOptions | ScoreOptions): TokenStream {
    return new TokenStream(this.#connection, call, options.signal, options.on_system);
  }

  #ask(call: Call, options: AskOptions) {
    return new TokenStream(this.#connection, call, options.signal).answer();
  }
}

function storedModule(result: Json | undefined): StoredModule {
  return readStoredModule(result as unknown as Parameters<typeof readStoredModule>[0]);
}

function present<T>(value: T | undefined, name: string): T {
  if (value === undefined) throw new TypeError(`the broker's answer has no ${name}`);
  return value;
}
