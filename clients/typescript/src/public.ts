/** The common exports of both entry points, except `Client`. */

export type { ClientOptions } from "./client.js";
export {
  ConnectionLostError,
  ControllerError,
  RequestError,
  RequestTimeoutError,
  ServiceError,
  SlowClientError,
  TokenbusError,
  UnavailableError,
} from "./errors.js";
export type {
  Code,
  Json,
  ModelInfo,
  Status,
  StoredModule,
  StreamStatus,
  System,
  Token,
  TokenizerFiles,
  WorkerStatus,
} from "./messages.js";
export type {
  AskOptions,
  GenerateOptions,
  Prompt,
  RunOptions,
  ScoreOptions,
  StatusOptions,
  StreamOptions,
  UploadOptions,
} from "./requests.js";
export type { GeneratedSequence, Scores } from "./results.js";
export type { TokenStream } from "./stream.js";
