/** The client: a thin layer over the generated code, which adds deadlines, limits, retries and typed errors. */

import { create, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";
import { setTimeout as sleep } from "node:timers/promises";
import { type Call, type Method, READINESS_SERVICE, type Server, Servers, type Tls } from "./connection.js";
import { clientClosed, errorOf, streamCut } from "./errors.js";
import { Health, HealthCheckResponse_ServingStatus as Serving } from "./generated/grpc/health/v1/health_pb.js";
import type { Finished, Started } from "./generated/mlxstream/v1/event_pb.js";
import { type AbortResponse, AbortRequestSchema, GenerateRequestSchema, type GenerateResponseSchema, GenerationService } from "./generated/mlxstream/v1/generation_pb.js";
import { type ModelInfo, ModelService } from "./generated/mlxstream/v1/model_pb.js";
import type { GeneratedToken, GenerateStats } from "./generated/mlxstream/v1/result_pb.js";
import { EventReader, type Point, retryPause } from "./reader.js";
import { type CallSettings, type Chat, chatFields, type ChatMessage, type GenerateSettings, type Prompt, requestFields } from "./requests.js";
import { type FinishReason, finishReasonOf, TextStream } from "./stream.js";

// How long telling the server of a durable stream that was left may take.
const FAREWELL_SECONDS = 2;
// What may be tried again; an operator's calls change things.
const RETRIED_SERVICES: ReadonlySet<string> = new Set([GenerationService.typeName, ModelService.typeName]);

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

/** A way to name a generation. */
export type GenerationName = { readonly requestId: string } | { readonly generationId: string };

/** What a stream begins with: a request, or a point in a generation that was begun. */
interface Beginning {
  readonly isDurable: boolean;
  readonly name: GenerationName;
  readonly first?: Point;
  begin?(server: Server, deadline: number, signal: AbortSignal): Call<typeof GenerateResponseSchema>;
}

/** What bounds a call: a deadline, and a signal that ends it. */
interface Bounds {
  readonly timeoutSeconds: number;
  readonly deadline: number;
  readonly signal: AbortSignal;
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
  readonly #servers: Servers;
  readonly #timeoutSeconds: number;
  readonly #readers = new Set<EventReader>();
  readonly #farewells = new Map<string, Promise<unknown>>();
  readonly #closing = new AbortController();

  /** @internal */
  constructor(targets: readonly string[], { tls, token, timeoutSeconds = 600, metadata = {} }: ConnectSettings) {
    this.#timeoutSeconds = checkedTimeout(timeoutSeconds);
    this.#servers = new Servers(targets, tls, token === undefined ? metadata : { ...metadata, authorization: `Bearer ${token}` });
  }

  /** Generate, and give the text as it comes: `for await (const text of client.stream("Once")) …`. */
  stream(prompt: Prompt, settings: GenerateSettings = {}): TextStream {
    const request = create(GenerateRequestSchema, requestFields(prompt, settings));
    return this.#stream(settings, {
      isDurable: request.delivery?.durable ?? false,
      name: { requestId: request.requestId },
      begin: (server, deadline, signal) =>
        server.call(GenerationService.method.generate, request, deadline, signal, priorityMetadata(settings)),
    });
  }

  /** Go on with a durable generation after the event with this sequence number (0n: from its beginning). */
  resume(generationId: string, afterSequence: bigint, settings: CallSettings = {}): TextStream {
    return this.#stream(settings, { isDurable: true, name: { generationId }, first: { generationId, afterSequence } });
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
  abort(name: GenerationName, settings: CallSettings = {}): Promise<AbortResponse> {
    return this.call(GenerationService.method.abort, abortFields(name), settings);
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

  /** The health of a service now, and whenever it changes. It has no deadline, unless the settings name one. */
  async *watchHealth(service: string = READINESS_SERVICE, settings: CallSettings = {}): AsyncGenerator<string, void, undefined> {
    const endless = { ...settings, timeoutSeconds: settings.timeoutSeconds ?? Infinity };
    for await (const { status } of this.callStream(Health.method.watch, { service }, endless)) yield Serving[status] ?? "UNKNOWN";
  }

  /** Make any call of the schema that answers with one message: `client.call(AdminService.method.drain, {})`. */
  async call<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "unary" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
    metadata: Readonly<Record<string, string>> = {},
  ): Promise<MessageShape<Output>> {
    const bounds = this.#bounds(settings);
    return this.#answer(method, create(method.input, request), bounds, metadata, () => this.#servers.next(bounds.deadline));
  }

  /** Make any call of the schema that answers with many messages. Leaving the loop ends it. */
  async *callStream<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output> & { methodKind: "server_streaming" },
    request: MessageInitShape<Input>,
    settings: CallSettings = {},
  ): AsyncGenerator<MessageShape<Output>, void, undefined> {
    const { timeoutSeconds, deadline, signal } = this.#bounds(settings);
    const server = await this.#servers.next(deadline);
    const call = server.call(method, create(method.input, request), deadline, signal);
    try {
      for await (const response of call) yield response;
    } catch (thrown) {
      throw signal.aborted ? signal.reason : errorOf(thrown, { target: server.target, timeoutSeconds });
    } finally {
      call.cancel();
    }
  }

  /** End everything that still runs, and close the connection once the servers know, within two seconds. */
  async close(): Promise<void> {
    this.#closing.abort(clientClosed());
    for (const reader of this.#readers) reader.close();
    await Promise.all(this.#farewells.values());
    this.#servers.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #stream({ timeoutSeconds = this.#timeoutSeconds, signal }: CallSettings, beginning: Beginning): TextStream {
    const { resume } = GenerationService.method;
    let server: Server | undefined;
    const reader: EventReader = new EventReader({
      target: this.#servers.targets.join(", "),
      timeoutSeconds: checkedTimeout(timeoutSeconds),
      isDurable: beginning.isDurable,
      first: beginning.first,
      signal: signal && ofItsOwn(signal),
      open: async (deadline, leaving, after) => {
        this.#closing.signal.throwIfAborted();
        this.#readers.add(reader);
        if (after) await this.#farewells.get(after.generationId); // it would end what is resumed
        server = await this.#servers.next(deadline);
        if (beginning.begin && !after) return beginning.begin(server, deadline, leaving);
        return server.call(resume, create(resume.input, after), deadline, leaving);
      },
      abort: (generationId) => server && this.#sayFarewell(server, generationId ? { generationId } : beginning.name),
      ended: () => this.#readers.delete(reader),
    });
    return new TextStream(reader);
  }

  /** Make a call that answers with one message, again where the server has not accepted it. */
  async #answer<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output>,
    request: MessageShape<Input>,
    { timeoutSeconds, deadline, signal }: Bounds,
    metadata: Readonly<Record<string, string>>,
    next: () => Server | Promise<Server>,
  ): Promise<MessageShape<Output>> {
    for (let failures = 0; ; failures += 1) {
      const server = await next();
      const call = server.call(method, request, deadline, signal, metadata);
      try {
        return await only(call);
      } catch (thrown) {
        signal.throwIfAborted();
        const error = errorOf(thrown, { target: server.target, timeoutSeconds });
        const mayRepeat = !call.isAccepted && RETRIED_SERVICES.has(method.parent.typeName);
        const pause = mayRepeat ? retryPause(error, failures) : undefined;
        if (pause === undefined || Date.now() + pause * 1000 >= deadline) throw error;
        await sleep(pause * 1000, undefined, { signal }).catch(() => {});
      }
    }
  }

  /** Tell the server that a durable generation was left. */
  #sayFarewell(server: Server, name: GenerationName): void {
    const key = "requestId" in name ? name.requestId : name.generationId;
    const request = create(AbortRequestSchema, abortFields(name));
    const deadline = Date.now() + FAREWELL_SECONDS * 1000;
    const bounds = { timeoutSeconds: FAREWELL_SECONDS, deadline, signal: new AbortController().signal };
    const farewell = this.#answer(GenerationService.method.abort, request, bounds, {}, () => server)
      .catch(() => {}) // then the server ends it by itself, later
      .finally(() => this.#farewells.delete(key));
    this.#farewells.set(key, farewell);
  }

  #bounds({ timeoutSeconds = this.#timeoutSeconds, signal = this.#closing.signal }: CallSettings): Bounds {
    const deadline = Date.now() + checkedTimeout(timeoutSeconds) * 1000;
    return { timeoutSeconds, deadline, signal: ofItsOwn(signal, this.#closing.signal) };
  }
}

/** The one message of a call that answers with one. */
async function only<Message>(call: AsyncIterable<Message>): Promise<Message> {
  let answer: Message | undefined;
  for await (const message of call) answer = message;
  if (answer === undefined) throw streamCut();
  return answer;
}

/** A signal for one call alone: Node warns of one to which many listen. */
function ofItsOwn(...signals: AbortSignal[]): AbortSignal {
  return AbortSignal.any(signals);
}

function abortFields(name: GenerationName): MessageInitShape<typeof AbortRequestSchema> {
  return "requestId" in name
    ? { target: { case: "requestId", value: name.requestId } }
    : { target: { case: "generationId", value: name.generationId } };
}

function checkedTimeout(timeoutSeconds: number): number {
  if (timeoutSeconds > 0) return timeoutSeconds;
  throw new RangeError(`timeoutSeconds must be above 0 (Infinity: no deadline), not ${timeoutSeconds}`);
}

function priorityMetadata({ priority }: GenerateSettings): Readonly<Record<string, string>> {
  return priority === undefined ? {} : { "mlx-stream-priority": `${priority}` };
}
