/** One generation as it happens: an async iterable of its text or its events, and its account. */

import { create } from "@bufbuild/protobuf";
import { backoff, type Bounds, type Connection, hasPaused } from "./connection.js";
import { MlxStreamError, streamCut } from "./errors.js";
import type { Finished, Started, TokenChunk } from "./generated/mlxstream/v1/event_pb.js";
import { type GenerateRequest, type GenerateResponse, GenerationService, type ResumeRequest, ResumeRequestSchema } from "./generated/mlxstream/v1/generation_pb.js";
import { FinishReason as Reason, type GenerateStats } from "./generated/mlxstream/v1/result_pb.js";
import { type CallSettings, type GenerateSettings, priorityMetadata } from "./requests.js";
import type { Server } from "./servers.js";

const QUIETLY = Symbol("left by its reader");
// What the server says of a point that its log has lost; what lies before it is whole.
const LOST_POINT_REASONS: ReadonlySet<string> = new Set(["RESUME_POINT_GONE", "CHECKPOINT_DAMAGED"]);

/** Why a generation ended. A value that this client does not know counts as unspecified. */
export type FinishReason = "unspecified" | "stop" | "length" | "cancelled" | "deadline" | "error";

/** What a generation has used so far, in tokens. `cachedTokens` are part of `promptTokens`. */
export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly generatedTokens: number;
}

/**
 * One generation. Iterate over it, once, for its text, or over `events()` for everything; that sends the request.
 *
 * Leaving the loop early (`break`, `return`, an exception), `cancel`, an aborted signal and the end of a `using` block
 * each end the generation on the server. A durable one that was cut off is resumed where it stood, until its deadline;
 * whoever reads sees each token once.
 */
export class TextStream implements AsyncIterable<string>, Disposable {
  readonly #connection: Connection;
  readonly #settings: GenerateSettings;
  readonly #request: GenerateRequest | undefined;
  readonly #first: Pick<ResumeRequest, "generationId" | "afterSequence">;
  readonly #isDurable: boolean;
  readonly #leaving = new AbortController();
  #server: Server | undefined;
  #hasBegun = false;
  #hasFailed = false;
  #started: Started | undefined;
  #finished: Finished | undefined;
  #sequence: bigint;
  #generatedTokens = 0;
  // How much text has come since the first point, and how far into it the calls have got: one may say it again.
  #textLength = 0;
  #place = 0;
  // The end of a durable generation that failed: the status that follows shows whether it is the end.
  #held: GenerateResponse | undefined;

  /** @internal Begins with `request`, or, where `first` names a generation, after that point. */
  constructor(connection: Connection, settings: CallSettings, request?: GenerateRequest, first = { generationId: "", afterSequence: 0n }) {
    this.#connection = connection;
    this.#settings = settings;
    this.#request = request;
    this.#first = first;
    this.#sequence = first.afterSequence;
    this.#isDurable = request?.delivery?.durable ?? request === undefined;
    this.#leaving.signal.addEventListener("abort", () => this.#sayFarewell());
  }

  /** The text, piece by piece: joined, they are the completion. */
  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "chunk" && event.value.text) yield event.value.text;
    }
  }

  /** Every message of the stream, the last one included. */
  async *events(): AsyncGenerator<GenerateResponse, void, undefined> {
    if (this.#hasBegun) throw new Error("a stream is read once");
    this.#hasBegun = true;
    const bounds = this.#connection.begin(this.#settings, this.#leaving);
    try {
      for (let failures = 0; !this.#finished; failures += 1) {
        try {
          for await (const response of await this.#call(bounds)) {
            failures = 0;
            const news = this.#news(response);
            if (news) yield this.#remembered(news);
          }
          if (!this.#finished) throw streamCut();
        } catch (error) {
          const pause = this.#pauseBeforeNext(error, failures);
          if (pause === undefined || !(await hasPaused(pause, bounds.deadline, bounds.signal))) {
            this.#hasFailed = !isOwnDeadline(error); // then nothing is left to end
            if (this.#held && !bounds.signal.aborted) yield this.#remembered(this.#held);
            throw error;
          }
          this.#held = undefined;
        }
      }
    } catch (error) {
      const wasLeftAfterItsEnd = this.#finished && this.#leaving.signal.aborted;
      if (error !== QUIETLY && !wasLeftAfterItsEnd) throw error;
    } finally {
      bounds.end();
      this.cancel();
    }
  }

  /** End the generation now. An iteration that is under way stops without an error. */
  cancel(): void {
    this.#leaving.abort(QUIETLY);
  }

  [Symbol.dispose](): void {
    this.cancel();
  }

  /** The first event; undefined before it. */
  get started(): Started | undefined {
    return this.#started;
  }

  /** The last event; undefined before it, and when the generation was left early. */
  get finished(): Finished | undefined {
    return this.#finished;
  }

  /** Number of the last event that was received; `resume` takes it. */
  get sequence(): bigint {
    return this.#sequence;
  }

  /** Why the generation ended; undefined before it has. */
  get finishReason(): FinishReason | undefined {
    return this.#finished && finishReasonOf(this.#finished);
  }

  /** The account of the whole generation; undefined before its end. */
  get stats(): GenerateStats | undefined {
    return this.#finished?.stats;
  }

  /** The tokens used so far, by what has arrived; final once the generation has ended. */
  get usage(): Usage {
    return {
      promptTokens: this.#started?.promptTokens ?? 0,
      cachedTokens: this.#started?.cachedTokens ?? 0,
      generatedTokens: this.stats?.generatedTokens ?? this.#generatedTokens,
    };
  }

  /** Begin the generation, or go on where the last call got to. */
  async #call(bounds: Bounds): Promise<AsyncIterable<GenerateResponse>> {
    if (this.#sequence === this.#first.afterSequence) this.#place = 0;
    const { generate } = GenerationService.method;
    const parts = {
      metadata: priorityMetadata(this.#settings),
      asked: (server: Server) => void (this.#server = server),
      generatedTokens: () => this.#started && this.#generatedTokens,
    };
    if (this.#request && !this.#started) return this.#connection.messages(generate, this.#request, bounds, parts);
    const point = { generationId: this.#generationId, afterSequence: this.#sequence };
    await this.#connection.farewellTo(point.generationId);
    return this.#connection.resumed(create(ResumeRequestSchema, point), bounds, parts, this.#server);
  }

  /** What the caller has not had of `response`; undefined if that is nothing. */
  #news(response: GenerateResponse): GenerateResponse | undefined {
    const { sequence, event } = response;
    this.#sequence = sequence;
    if (event.case === "started" && this.#started) return undefined;
    if (event.case === "chunk" && !this.#cutToNews(event.value)) return undefined;
    if (event.case === "finished" && event.value.error && this.#isDurable) {
      this.#held = response;
      return undefined;
    }
    return response;
  }

  /** Take from a chunk what an earlier call has brought already; false if nothing is left of it. */
  #cutToNews(chunk: TokenChunk): boolean {
    chunk.tokens = chunk.tokens.filter(({ index }) => index >= this.#generatedTokens);
    const known = Math.max(0, this.#textLength - this.#place);
    this.#place += chunk.text.length;
    chunk.text = chunk.text.slice(known);
    this.#textLength += chunk.text.length;
    return chunk.tokens.length > 0 || chunk.text !== "";
  }

  #remembered(response: GenerateResponse): GenerateResponse {
    const { event } = response;
    if (event.case === "started") this.#started = event.value;
    if (event.case === "finished") this.#finished = event.value;
    if (event.case === "chunk") this.#generatedTokens = (event.value.tokens.at(-1)?.index ?? this.#generatedTokens - 1) + 1;
    return response;
  }

  /** Seconds until a durable generation may be resumed; undefined: it may not. */
  #pauseBeforeNext(error: unknown, failures: number): number | undefined {
    if (!this.#isDurable || !this.#started || this.#finished || this.#leaving.signal.aborted) return undefined;
    if (!(error instanceof MlxStreamError)) return undefined;
    if (LOST_POINT_REASONS.has(error.reason) && this.#sequence !== this.#first.afterSequence) {
      this.#sequence = this.#first.afterSequence; // everything is said again, and skipped
      return backoff(failures);
    }
    return error.isTransient ? Math.max(error.retryAfterSeconds ?? 0, backoff(failures)) : undefined;
  }

  get #generationId(): string {
    return this.#started?.generationId ?? this.#first.generationId;
  }

  /** A durable generation does not end with its call. */
  #sayFarewell(): void {
    if (!this.#isDurable || !this.#server || this.#finished || this.#hasFailed) return;
    const generationId = this.#generationId;
    this.#connection.sayFarewell(this.#server, generationId ? { generationId } : { requestId: this.#request?.requestId ?? "" });
  }
}

/** @internal The reason in the last event of a stream. */
export function finishReasonOf(finished: Finished): FinishReason {
  return (Reason[finished.finishReason] ?? "UNSPECIFIED").toLowerCase() as FinishReason;
}

function isOwnDeadline(error: unknown): boolean {
  return error instanceof MlxStreamError && error.kind === "deadline_exceeded";
}
