/** The client: a thin layer over the generated code, which adds deadlines, limits, retries and typed errors. */

import { create, type DescMessage, type DescMethod, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";
import { setTimeout as sleep } from "node:timers/promises";
import { READINESS_SERVICE, type Responses, type Server, Servers, type Tls } from "./connection.js";
import { clientClosed, errorOf } from "./errors.js";
import { Health, HealthCheckResponse_ServingStatus as Serving } from "./generated/grpc/health/v1/health_pb.js";
import type { Finished, Started } from "./generated/mlxstream/v1/event_pb.js";
import { type AbortResponse, AbortRequestSchema, GenerateRequestSchema, type GenerateResponseSchema, GenerationService } from "./generated/mlxstream/v1/generation_pb.js";
import { type ModelInfo, ModelService } from "./generated/mlxstream/v1/model_pb.js";
import type { GeneratedToken, GenerateStats } from "./generated/mlxstream/v1/result_pb.js";
import { type CallSettings, type Chat, chatFields, type ChatMessage, type GenerateSettings, type Prompt, requestFields } from "./requests.js";
import { type FinishReason, finishReasonOf, type Opening, retryPause, TextStream } from "./stream.js";

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

type Begin = (server: Server, deadline: number) => Responses<typeof GenerateResponseSchema>;
type Method<Input extends DescMessage, Output extends DescMessage> = DescMethod & { input: Input; output: Output };

/**
 * Describe a connection; the network is touched by the first call.
 *
 * @param target "HOST:PORT" or "unix:PATH"; several are asked in turn, each while its health says that it serves.
 */
export function connect(target: string | readonly string[] = "127.0.0.1:50051", settings: ConnectSettings = {}): Client {
  return new Client(typeof target === "string" ? [target] : target, settings);
}

/** Talks to one server, or to several in turn. Calls may run side by side. `close` it at the end. */
export class Client implements Disposable {
  readonly #servers: Servers;
  readonly #timeoutSeconds: number;
  readonly #streams = new Set<TextStream>();
  readonly #aborting = new Set<Promise<unknown>>();
  readonly #closing = new AbortController();

  /** @internal */
  constructor(targets: readonly string[], { tls, token, timeoutSeconds = 600, metadata = {} }: ConnectSettings) {
    this.#timeoutSeconds = checkedTimeout(timeoutSeconds);
    this.#servers = new Servers(targets, tls, token === undefined ? metadata : { ...metadata, authorization: `Bearer ${token}` });
  }

  /** Generate, and give the text as it comes: `for await (const text of client.stream("Once")) …`. */
  stream(prompt: Prompt, settings: GenerateSettings = {}): TextStream {
    const request = create(GenerateRequestSchema, requestFields(prompt, settings));
    return this.#stream(settings, request.delivery?.durable ?? false, (server, deadline) =>
      server.stream(GenerationService.method.generate, request, deadline, priorityMetadata(settings)));
  }

  /** Go on with a durable generation after the event with this sequence number (0n: from its beginning). */
  resume(generationId: string, afterSequence: bigint, settings: CallSettings = {}): TextStream {
    const request = create(GenerationService.method.resume.input, { generationId, afterSequence });
    const left = [...this.#aborting]; // what is still being ended would end what is resumed
    return this.#stream(settings, true, (server, deadline) => server.stream(GenerationService.method.resume, request, deadline), left);
  }

  /** Generate, and give all of it at the end. */
  async generate(prompt: Prompt, settings: GenerateSettings = {}): Promise<Generation> {
    const metadata = priorityMetadata(settings);
    const response = await this.call(GenerationService.method.complete, requestFields(prompt, settings), settings, metadata);
    const { text, tokens, finished, started } = response;
    const { matchedStop, stats } = finished as Finished;
    const finishReason = finishReasonOf(finished as Finished);
    return { text, tokens, finishReason, matchedStop, stats: stats as GenerateStats, started: started as Started };
  }

  /** End a generation by one of its names. One that does not run (any more) is not an error. */
  abort(target: { requestId: string } | { generationId: string }, settings: CallSettings = {}): Promise<AbortResponse> {
    const arm = "requestId" in target
      ? ({ case: "requestId", value: target.requestId } as const)
      : ({ case: "generationId", value: target.generationId } as const);
    return this.call(GenerationService.method.abort, create(AbortRequestSchema, { target: arm }), settings);
  }

  /** What is known about a model; "" means the served one. */
  async model(name = "", settings: CallSettings = {}): Promise<ModelInfo> {
    return (await this.call(ModelService.method.getModel, { model: name }, settings)).model as ModelInfo;
  }

  /** Token ids of a text. */
  async tokenize(text: string, settings: CallSettings & { model?: string; addSpecialTokens?: boolean } = {}): Promise<number[]> {
    const { model, addSpecialTokens } = settings;
    return (await this.call(ModelService.method.tokenize, { text, model, addSpecialTokens }, settings)).ids;
  }

  /** Text of token ids. */
  async detokenize(ids: readonly number[], settings: CallSettings & { model?: string; skipSpecialTokens?: boolean } = {}): Promise<string> {
    const { model, skipSpecialTokens } = settings;
    return (await this.call(ModelService.method.detokenize, { ids: [...ids], model, skipSpecialTokens }, settings)).text;
  }

  /** The text and the token ids that `stream` would run for a conversation. */
  renderChat(chat: readonly ChatMessage[] | Chat, settings: CallSettings & { model?: string } = {}) {
    const conversation = chatFields("messages" in chat ? chat : { messages: chat });
    return this.call(ModelService.method.renderChat, { chat: conversation, model: settings.model }, settings);
  }

  /** Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness. */
  async health(service: string = READINESS_SERVICE, settings: CallSettings = {}): Promise<string> {
    return Serving[(await this.call(Health.method.check, { service }, settings)).status] ?? "UNKNOWN";
  }

  /** The health of a service now, and whenever it changes. */
  async *watchHealth(service: string = READINESS_SERVICE, settings: CallSettings = {}): AsyncGenerator<string, void, undefined> {
    for await (const { status } of this.callStream(Health.method.watch, { service }, settings)) yield Serving[status] ?? "UNKNOWN";
  }

  /** Make any call of the schema that answers with one message: `client.call(AdminService.method.drain, {})`. */
  async call<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "unary" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
    metadata: Readonly<Record<string, string>> = {},
  ): Promise<MessageShape<Output>> {
    const timeoutSeconds = checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds);
    const deadline = Date.now() + timeoutSeconds * 1000;
    const signal = this.#ending(settings.signal);
    for (let failures = 0; ; failures += 1) {
      const server = await this.#servers.next(deadline);
      try {
        return await server.unary(method, create(method.input, request), deadline, signal, metadata);
      } catch (thrown) {
        const error = errorOf(thrown, { target: server.target, timeoutSeconds });
        const pause = retryPause(error, failures);
        if (pause === undefined || Date.now() + pause * 1000 >= deadline) throw error;
        await sleep(pause * 1000, undefined, { signal }).catch(() => {});
      }
    }
  }

  /** Make any call of the schema that answers with many messages. Leaving the loop ends it. */
  async *callStream<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "server_streaming" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
  ): AsyncGenerator<MessageShape<Output>, void, undefined> {
    const timeoutSeconds = checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds);
    const deadline = Date.now() + timeoutSeconds * 1000;
    const signal = this.#ending(settings.signal);
    const server = await this.#servers.next(deadline);
    signal.throwIfAborted();
    const call = server.stream(method, create(method.input, request), deadline);
    const cancel = () => call.cancel();
    signal.addEventListener("abort", cancel);
    try {
      for await (const response of call) yield response;
    } catch (thrown) {
      throw signal.aborted ? signal.reason : errorOf(thrown, { target: server.target, timeoutSeconds });
    } finally {
      signal.removeEventListener("abort", cancel);
      cancel();
    }
  }

  /** Close the connection and end everything that still runs on it. */
  close(): void {
    for (const stream of this.#streams) stream.close();
    this.#closing.abort(clientClosed());
    this.#servers.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #stream({ timeoutSeconds = this.#timeoutSeconds, signal }: CallSettings, isDurable: boolean, begin: Begin, first: Promise<unknown>[] = []): TextStream {
    const resume = GenerationService.method.resume;
    const opening: Opening = {
      target: this.#servers.targets.join(", "),
      timeoutSeconds: checkedTimeout(timeoutSeconds),
      isDurable,
      signal,
      open: async (deadline, after) => {
        if (this.#closing.signal.aborted) throw this.#closing.signal.reason;
        this.#streams.add(stream);
        await Promise.allSettled(first);
        const server = await this.#servers.next(deadline);
        return after ? server.stream(resume, create(resume.input, after), deadline) : begin(server, deadline);
      },
      abort: (generationId) => {
        const aborting = this.abort({ generationId }, { timeoutSeconds: 5 }).finally(() => this.#aborting.delete(aborting));
        this.#aborting.add(aborting);
        return aborting;
      },
      ended: () => this.#streams.delete(stream),
    };
    const stream = new TextStream(opening);
    return stream;
  }

  #ending(signal: AbortSignal | undefined): AbortSignal {
    return signal ? AbortSignal.any([signal, this.#closing.signal]) : this.#closing.signal;
  }
}

function checkedTimeout(timeoutSeconds: number): number {
  if (timeoutSeconds > 0) return timeoutSeconds;
  throw new RangeError(`timeoutSeconds must be above 0 (Infinity: no deadline), not ${timeoutSeconds}`);
}

function priorityMetadata({ priority }: GenerateSettings): Readonly<Record<string, string>> {
  return priority === undefined ? {} : { "mlx-stream-priority": `${priority}` };
}
