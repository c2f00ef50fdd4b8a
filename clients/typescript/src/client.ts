/** The client: a thin layer over the generated code, which adds deadlines, limits, retries and typed errors. */

import { create, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";
import { Connection, only } from "./connection.js";
import { Health, HealthCheckResponse_ServingStatus as Serving } from "./generated/grpc/health/v1/health_pb.js";
import type { Finished, Started } from "./generated/mlxstream/v1/event_pb.js";
import { type AbortResponse, GenerateRequestSchema, GenerationService } from "./generated/mlxstream/v1/generation_pb.js";
import { type ModelInfo, ModelService } from "./generated/mlxstream/v1/model_pb.js";
import type { GeneratedToken, GenerateStats } from "./generated/mlxstream/v1/result_pb.js";
import { type CallSettings, type GenerateSettings, type GenerationName, priorityMetadata, type Prompt, requestFields } from "./requests.js";
import { type Method, READINESS_SERVICE, Servers, type Tls } from "./servers.js";
import { type FinishReason, finishReasonOf, TextStream } from "./stream.js";

/** How to reach a server. */
export interface ConnectSettings {
  /** TLS settings; `{}` trusts the system's authorities. Default: plain text. */
  readonly tls?: Tls;
  /** Bearer token, sent with every call. */
  readonly token?: string;
  /** Deadline of every call that names none, in seconds. Default 600. Infinity: none. */
  readonly timeoutSeconds?: number;
  /** Sent with every call. */
  readonly metadata?: Readonly<Record<string, string>>;
}

/** A finished generation. `started`, `tokens` and `stats` are the schema's own messages. */
export interface Generation {
  readonly text: string;
  readonly tokens: readonly GeneratedToken[];
  readonly finishReason: FinishReason;
  readonly matchedStop: string;
  readonly stats: GenerateStats;
  readonly started: Started;
}

/**
 * Describe a connection; the network is touched by the first call.
 *
 * @param target "HOST:PORT" or "unix:PATH"; several are asked in turn, each while its health says that it serves.
 */
export function connect(target: string | readonly string[] = "127.0.0.1:50051", settings: ConnectSettings = {}): Client {
  return new Client(typeof target === "string" ? [target] : target, settings);
}

/** Talks to one server, or to several in turn. Calls may run side by side. `close` it at the end. */
export class Client implements AsyncDisposable {
  readonly #connection: Connection;

  /** @internal */
  constructor(targets: readonly string[], { tls, token, timeoutSeconds = 600, metadata = {} }: ConnectSettings) {
    const all = token === undefined ? metadata : { ...metadata, authorization: `Bearer ${token}` };
    this.#connection = new Connection(new Servers(targets, tls, all), timeoutSeconds);
  }

  /** Generate, and give the text as it comes: `for await (const text of client.stream("Once")) …`. */
  stream(prompt: Prompt, settings: GenerateSettings = {}): TextStream {
    return new TextStream(this.#connection, settings, create(GenerateRequestSchema, requestFields(prompt, settings)));
  }

  /** Go on with a durable generation after the event with this sequence number (0n: from its beginning). */
  resume(generationId: string, afterSequence: bigint, settings: CallSettings = {}): TextStream {
    return new TextStream(this.#connection, settings, undefined, { generationId, afterSequence });
  }

  /** Generate, and give all of it at the end. */
  async generate(prompt: Prompt, settings: GenerateSettings = {}): Promise<Generation> {
    const request = requestFields(prompt, settings);
    const response = await only(this.#messages(GenerationService.method.complete, request, settings, priorityMetadata(settings)));
    const { text, tokens, finished, started } = response;
    const { matchedStop, stats } = finished as Finished;
    const finishReason = finishReasonOf(finished as Finished);
    return { text, tokens, finishReason, matchedStop, stats: stats as GenerateStats, started: started as Started };
  }

  /** End a generation by one of its names. One that does not run (any more) is not an error. */
  async abort(name: GenerationName, settings: CallSettings = {}): Promise<AbortResponse> {
    const bounds = this.#connection.begin(settings);
    try {
      return await this.#connection.abort(name, bounds);
    } finally {
      bounds.end();
    }
  }

  /** What is known about a model; "" means the served one. */
  async model(name = "", settings: CallSettings = {}): Promise<ModelInfo> {
    return (await this.call(ModelService.method.getModel, { model: name }, settings)).model as ModelInfo;
  }

  /** Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness. */
  async health(service: string = READINESS_SERVICE, settings: CallSettings = {}): Promise<string> {
    return Serving[(await this.call(Health.method.check, { service }, settings)).status] ?? "UNKNOWN";
  }

  /** The health of a service now, and whenever it changes. It has no deadline, unless the settings name one. */
  async *watchHealth(service: string = READINESS_SERVICE, settings: CallSettings = {}): AsyncGenerator<string, void, undefined> {
    const endless = { ...settings, timeoutSeconds: settings.timeoutSeconds ?? Infinity };
    for await (const { status } of this.callStream(Health.method.watch, { service }, endless)) yield Serving[status] ?? "UNKNOWN";
  }

  /** Make any call of the schema that answers with one message: `client.call(ModelService.method.tokenize, { text })`. */
  call<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "unary" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
  ): Promise<MessageShape<Output>> {
    return only(this.#messages(method, request, settings));
  }

  /** Make any call of the schema that answers with many messages. Leaving the loop ends it. */
  callStream<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "server_streaming" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
  ): AsyncGenerator<MessageShape<Output>, void, undefined> {
    return this.#messages(method, request, settings);
  }

  /** End everything that still runs, and close the connection once the servers know, within two seconds. */
  close(): Promise<void> {
    return this.#connection.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async *#messages<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output>,
    request: MessageInitShape<Input>,
    settings: CallSettings,
    metadata?: Readonly<Record<string, string>>,
  ): AsyncGenerator<MessageShape<Output>, void, undefined> {
    const bounds = this.#connection.begin(settings);
    try {
      yield* this.#connection.messages(method, create(method.input, request), bounds, { metadata });
    } finally {
      bounds.end();
    }
  }
}
