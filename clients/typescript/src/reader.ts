/**
 * Reads one generation through as many calls as it takes, and can end it.
 *
 * A durable one that was cut off is resumed where it stood, until its deadline; whoever reads sees each token once.
 */

import { setTimeout as sleep } from "node:timers/promises";
import type { Call } from "./connection.js";
import { clientClosed, errorOf, MlxStreamError, streamCut } from "./errors.js";
import type { Finished, Started, TokenChunk } from "./generated/mlxstream/v1/event_pb.js";
import type { GenerateResponse, GenerateResponseSchema } from "./generated/mlxstream/v1/generation_pb.js";

const QUIETLY = Symbol("left by its reader");
const MOST_ATTEMPTS = 4;
const FIRST_PAUSE_SECONDS = 0.1;
const LONGEST_PAUSE_SECONDS = 2;
// What the server says of a point that its log has lost; what lies before it is whole.
const LOST_POINT_REASONS: ReadonlySet<string> = new Set(["RESUME_POINT_GONE", "CHECKPOINT_DAMAGED"]);

/** @internal A place in a generation that was begun: after the event with this number. */
export interface Point {
  readonly generationId: string;
  readonly afterSequence: bigint;
}

/** @internal What a reader needs of its client. */
export interface Source {
  readonly target: string;
  readonly timeoutSeconds: number;
  readonly isDurable: boolean;
  readonly signal: AbortSignal | undefined;
  /** Where to begin, if not with a new generation. */
  readonly first: Point | undefined;
  /** Go on after a point, or begin the generation; `signal` ends the call. */
  open(deadline: number, signal: AbortSignal, after: Point | undefined): Promise<Call<typeof GenerateResponseSchema>>;
  /** Have a generation ended that does not end with its call; `generationId` is undefined before its first event. */
  abort(generationId: string | undefined): void;
  /** Tell that the reader has ended. */
  ended(): void;
}

/** @internal See above. */
export class EventReader {
  started: Started | undefined;
  finished: Finished | undefined;
  sequence: bigint;
  generatedTokens = 0;
  readonly #source: Source;
  readonly #leaving = new AbortController();
  // How much text has come since the first point, and how far into it the calls have got: one may say it again.
  #textLength = 0;
  #place = 0;
  // The end of a durable generation that failed: the status that follows shows whether it is the end.
  #held: GenerateResponse | undefined;
  #isOver = false;

  constructor(source: Source) {
    this.#source = source;
    this.sequence = this.#firstSequence;
  }

  /** Every event that the caller has not had. */
  async *read(): AsyncGenerator<GenerateResponse, void, undefined> {
    const { signal, timeoutSeconds } = this.#source;
    const deadline = Date.now() + timeoutSeconds * 1000;
    const leave = () => this.#leave(signal?.reason);
    if (signal?.aborted) leave();
    signal?.addEventListener("abort", leave);
    try {
      yield* this.#read(deadline);
      if (this.#hasLeft && this.#leaving.signal.reason !== QUIETLY) throw this.#leaving.signal.reason;
    } finally {
      signal?.removeEventListener("abort", leave);
      this.cancel();
      this.#isOver = true;
      this.#source.ended();
    }
  }

  /** End the generation, without effect once it has ended. A reader that is under way stops without an error. */
  cancel(): void {
    this.#leave(QUIETLY);
  }

  /** End it because its client is closed: a reader that is under way fails. */
  close(): void {
    this.#leave(clientClosed());
  }

  get #firstSequence(): bigint {
    return this.#source.first?.afterSequence ?? 0n;
  }

  get #generationId(): string | undefined {
    return this.started?.generationId ?? this.#source.first?.generationId;
  }

  get #hasLeft(): boolean {
    return this.#leaving.signal.aborted;
  }

  get #hasEnded(): boolean {
    return this.#isOver || this.finished !== undefined || this.#hasLeft;
  }

  async *#read(deadline: number): AsyncGenerator<GenerateResponse, void, undefined> {
    for (let failures = 0; !this.#hasEnded; ) {
      let call: Call<typeof GenerateResponseSchema> | undefined;
      try {
        call = await this.#open(deadline);
        for await (const response of call) {
          if (this.#hasLeft) return;
          failures = 0;
          const news = this.#news(response);
          if (news) yield this.#remembered(news);
        }
        if (!this.#hasEnded) throw streamCut();
      } catch (thrown) {
        if (this.#hasLeft) return;
        const { target, timeoutSeconds } = this.#source;
        const error = errorOf(thrown, { target, timeoutSeconds, generatedTokens: this.started && this.generatedTokens });
        const pause = this.#pauseBeforeNext(error, failures++, call?.isAccepted ?? false);
        if (pause === undefined || Date.now() + pause * 1000 >= deadline) {
          if (error instanceof MlxStreamError && error.kind === "deadline_exceeded") this.#sayFarewell();
          this.#isOver = true; // it has ended by itself, so that nothing is left to cancel
          if (this.#held) yield this.#remembered(this.#held);
          throw error;
        }
        this.#held = undefined;
        await sleep(pause * 1000, undefined, { signal: this.#leaving.signal }).catch(() => {});
      }
    }
  }

  #open(deadline: number): Promise<Call<typeof GenerateResponseSchema>> {
    if (this.sequence === this.#firstSequence) this.#place = 0;
    const generationId = this.#generationId;
    const after = generationId === undefined ? undefined : { generationId, afterSequence: this.sequence };
    return this.#source.open(deadline, this.#leaving.signal, after);
  }

  /** What the caller has not had of `response`; undefined if that is nothing. */
  #news(response: GenerateResponse): GenerateResponse | undefined {
    const { sequence, event } = response;
    this.sequence = sequence;
    if (event.case === "started" && this.started) return undefined;
    if (event.case === "chunk" && !this.#cutToNews(event.value)) return undefined;
    if (event.case === "finished" && event.value.error && this.#source.isDurable) {
      this.#held = response;
      return undefined;
    }
    return response;
  }

  /** Take from a chunk what an earlier call has brought already; false if nothing is left of it. */
  #cutToNews(chunk: TokenChunk): boolean {
    chunk.tokens = chunk.tokens.filter(({ index }) => index >= this.generatedTokens);
    const known = Math.max(0, this.#textLength - this.#place);
    this.#place += chunk.text.length;
    chunk.text = chunk.text.slice(known);
    this.#textLength += chunk.text.length;
    return chunk.tokens.length > 0 || chunk.text !== "";
  }

  #remembered(response: GenerateResponse): GenerateResponse {
    const { event } = response;
    if (event.case === "started") this.started = event.value;
    if (event.case === "finished") this.finished = event.value;
    if (event.case === "chunk") this.generatedTokens = (event.value.tokens.at(-1)?.index ?? this.generatedTokens - 1) + 1;
    return response;
  }

  /** Seconds until the next call may be made; undefined: none may. */
  #pauseBeforeNext(error: unknown, failures: number, wasAccepted: boolean): number | undefined {
    if (!this.started) return wasAccepted ? undefined : retryPause(error, failures);
    if (!this.#source.isDurable || this.finished || !(error instanceof MlxStreamError)) return undefined;
    if (LOST_POINT_REASONS.has(error.reason) && this.sequence !== this.#firstSequence) {
      this.sequence = this.#firstSequence; // everything is said again, and skipped
      return backoff(failures);
    }
    return error.isTransient ? Math.max(error.retryAfterSeconds ?? 0, backoff(failures)) : undefined;
  }

  #leave(reason: unknown): void {
    if (this.#hasEnded) return;
    this.#leaving.abort(reason); // ends the call too
    this.#sayFarewell();
  }

  /** A durable generation would wait for somebody to come back. */
  #sayFarewell(): void {
    if (this.#source.isDurable) this.#source.abort(this.#generationId);
  }
}

/** @internal Seconds to wait before a call that was not accepted is tried again; undefined: not at all. */
export function retryPause(error: unknown, failures: number): number | undefined {
  if (!(error instanceof MlxStreamError) || !error.isRetryable || failures + 1 >= MOST_ATTEMPTS) return undefined;
  return error.pushbackSeconds ?? backoff(failures);
}

function backoff(failures: number): number {
  return Math.min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** failures) * (0.8 + 0.4 * Math.random());
}
