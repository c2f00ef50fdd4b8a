/** Calls of a client: each with its bounds, again where no server has accepted it, and all of them ended with the client. */

import { create, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { clientClosed, errorOf, MlxStreamError, streamCut } from "./errors.js";
import { AbortRequestSchema, type AbortResponse, type GenerateResponse, GenerationService, type ResumeRequest } from "./generated/mlxstream/v1/generation_pb.js";
import { ModelService } from "./generated/mlxstream/v1/model_pb.js";
import { abortFields, type CallSettings, type GenerationName } from "./requests.js";
import type { Method, Server, Servers } from "./servers.js";

// How long telling the server of a durable stream that was left may take.
const FAREWELL_SECONDS = 2;
const MOST_ATTEMPTS = 4;
const FIRST_PAUSE_SECONDS = 0.1;
const LONGEST_PAUSE_SECONDS = 2;
// What may be tried again; an operator's calls change things.
const RETRIED_SERVICES: ReadonlySet<string> = new Set([GenerationService.typeName, ModelService.typeName]);

/** @internal What bounds a call under way. */
export interface Bounds {
  readonly timeoutSeconds: number;
  readonly deadline: number;
  /** Aborts, with the reason, when the call is to end early. */
  readonly signal: AbortSignal;
  /** Tell that the call is over. */
  end(): void;
}

/** @internal What a call may have beside its request and its bounds. */
export interface CallParts {
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /** Whom to ask. Default: whose turn it is. */
  readonly server?: Server;
  /** Tell who is asked. */
  asked?(server: Server): void;
  /** How much has come before, for what errors tell; undefined before the first event. */
  generatedTokens?(): number | undefined;
}

/** @internal What a client's calls have in common. */
export class Connection {
  readonly #servers: Servers;
  readonly #timeoutSeconds: number;
  readonly #running = new Set<AbortController>();
  readonly #farewells = new Map<string, Promise<unknown>>();
  #isClosed = false;

  constructor(servers: Servers, timeoutSeconds: number) {
    this.#servers = servers;
    this.#timeoutSeconds = checkedTimeout(timeoutSeconds);
  }

  /** Begin to bound a call: its deadline runs, and `running` aborts with the caller's signal and with the client's end. */
  begin({ timeoutSeconds = this.#timeoutSeconds, signal }: CallSettings, running = new AbortController()): Bounds {
    const deadline = Date.now() + checkedTimeout(timeoutSeconds) * 1000;
    const leave = () => running.abort(signal?.reason);
    const end = () => {
      this.#running.delete(running);
      signal?.removeEventListener("abort", leave);
    };
    this.#running.add(running);
    if (this.#isClosed) running.abort(clientClosed());
    if (signal?.aborted) leave();
    if (signal) setMaxListeners(0, signal); // many calls may share it
    signal?.addEventListener("abort", leave);
    return { timeoutSeconds, deadline, signal: running.signal, end };
  }

  /** Make a call, again where no server has accepted it, and give what it answers. Leaving the loop ends it. */
  async *messages<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output>,
    request: MessageShape<Input>,
    { timeoutSeconds, deadline, signal }: Omit<Bounds, "end">,
    { metadata, server: chosen, asked, generatedTokens }: CallParts = {},
  ): AsyncGenerator<MessageShape<Output>, void, undefined> {
    for (let failures = 0; ; failures += 1) {
      signal.throwIfAborted();
      const server = chosen ?? (await this.#servers.next(deadline));
      asked?.(server);
      const call = server.call(method, request, { deadline, signal }, metadata);
      try {
        for await (const message of call) {
          signal.throwIfAborted();
          yield message;
        }
        return;
      } catch (thrown) {
        signal.throwIfAborted();
        const error = errorOf(thrown, { target: server.target, timeoutSeconds, generatedTokens: generatedTokens?.() });
        const mayRepeat = !call.isAccepted && RETRIED_SERVICES.has(method.parent.typeName);
        const pause = mayRepeat ? retryPause(error, failures) : undefined;
        if (pause === undefined || !(await hasPaused(pause, deadline, signal))) throw error;
      } finally {
        call.cancel();
      }
    }
  }

  /**
   * Go on with a generation. One server after the other is asked, this one first: whoever does not know it, or cannot be asked,
   * is passed over. Whoever could not be asked may know it yet, so that it is not found only where all have said so.
   */
  async *resumed(
    point: ResumeRequest,
    bounds: Bounds,
    parts: CallParts,
    first: Server | undefined,
  ): AsyncGenerator<GenerateResponse, void, undefined> {
    let verdict: MlxStreamError | undefined;
    for (const server of this.#servers.from(first)) {
      let hasAnswered = false;
      try {
        for await (const message of this.messages(GenerationService.method.resume, point, bounds, { ...parts, server })) {
          hasAnswered = true;
          yield message;
        }
        return;
      } catch (error) {
        if (hasAnswered || !(error instanceof MlxStreamError) || !(error.kind === "not_found" || error.isTransient)) throw error;
        if (!verdict || error.kind !== "not_found") verdict = error;
      }
    }
    throw verdict;
  }

  /** End a generation: ask one server after the other, this one first, until one knows it and tells its account. */
  async abort(name: GenerationName, bounds: Omit<Bounds, "end">, first?: Server): Promise<AbortResponse> {
    const request = create(AbortRequestSchema, abortFields(name));
    let answer: AbortResponse | undefined;
    let failure: unknown;
    for (const server of this.#servers.from(first)) {
      try {
        answer = await only(this.messages(GenerationService.method.abort, request, bounds, { server }));
        if (answer.stats) return answer;
      } catch (error) {
        bounds.signal.throwIfAborted();
        failure = error;
      }
    }
    if (!answer) throw failure;
    return answer;
  }

  /** Tell the servers, without waiting and this one first, that a durable generation was left: it would wait for somebody. */
  sayFarewell(server: Server, name: GenerationName): void {
    const deadline = Date.now() + FAREWELL_SECONDS * 1000;
    const bounds = { timeoutSeconds: FAREWELL_SECONDS, deadline, signal: new AbortController().signal };
    const key = "requestId" in name ? name.requestId : name.generationId;
    const farewell = this.abort(name, bounds, server)
      .catch(() => {}) // then the server ends it by itself, later
      .finally(() => this.#farewells.delete(key));
    this.#farewells.set(key, farewell);
  }

  /** Wait for the farewell to a generation, if one is being said: it would end whoever resumes it. */
  async farewellTo(generationId: string): Promise<void> {
    await this.#farewells.get(generationId);
  }

  /** End everything that still runs, and close once the servers know. */
  async close(): Promise<void> {
    this.#isClosed = true;
    for (const running of this.#running) running.abort(clientClosed());
    await Promise.all(this.#farewells.values());
    this.#servers.close();
  }
}

/** @internal The one message of a call that answers with one. */
export async function only<Message>(messages: AsyncIterable<Message>): Promise<Message> {
  let answer: Message | undefined;
  for await (const message of messages) answer = message;
  if (answer === undefined) throw streamCut();
  return answer;
}

/** @internal How long to wait after so many failures in a row. */
export function backoff(failures: number): number {
  return Math.min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** failures) * (0.8 + 0.4 * Math.random());
}

/** @internal Wait so many seconds, or until the signal aborts; false, and at once, where the deadline comes first. */
export async function hasPaused(seconds: number, deadline: number, signal: AbortSignal): Promise<boolean> {
  if (Date.now() + seconds * 1000 >= deadline) return false;
  await sleep(seconds * 1000, undefined, { signal }).catch(() => {});
  return true;
}

/** Seconds to wait before a call that was not accepted is made again; undefined: not at all. */
function retryPause(error: unknown, failures: number): number | undefined {
  if (!(error instanceof MlxStreamError) || !error.isRetryable || failures + 1 >= MOST_ATTEMPTS) return undefined;
  return error.pushbackSeconds ?? backoff(failures);
}

function checkedTimeout(timeoutSeconds: number): number {
  if (timeoutSeconds > 0) return timeoutSeconds;
  throw new RangeError(`timeoutSeconds must be above 0 (Infinity: no deadline), not ${timeoutSeconds}`);
}
