/**
 * One generation as it happens: an async iterable of its text or its events, and its account.
 *
 * Leaving a loop early (`break`, `return`, an exception), `cancel`, an aborted signal and the end of a `using` block
 * each end the generation on the server. A durable one goes on by itself after a lost connection.
 */

import { setTimeout as sleep } from "node:timers/promises";
import type { ClientReadableStream } from "@grpc/grpc-js";
import { clientClosed, errorOf, MlxStreamError, streamCut } from "./errors.js";
import type { Finished, Started } from "./generated/mlxstream/v1/event_pb.js";
import type { GenerateResponse } from "./generated/mlxstream/v1/generation_pb.js";
import { FinishReason as Reason, type GenerateStats } from "./generated/mlxstream/v1/result_pb.js";

const QUIETLY = Symbol("left by its reader");
const MOST_ATTEMPTS = 4;
const FIRST_PAUSE_SECONDS = 0.1;
const LONGEST_PAUSE_SECONDS = 2;

/** Why a generation ended. A value that this client does not know counts as unspecified. */
export type FinishReason = "unspecified" | "stop" | "length" | "cancelled" | "deadline" | "error";

/** What a generation has used so far, in tokens. `cachedTokens` are part of `promptTokens`. */
export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly generatedTokens: number;
}

/** @internal What a stream needs of its client. */
export interface Opening {
  readonly target: string;
  readonly timeoutSeconds: number;
  readonly isDurable: boolean;
  readonly signal: AbortSignal | undefined;
  /** Begin the generation, or go on after an event of it. */
  open(deadline: number, after?: { generationId: string; afterSequence: bigint }): Promise<ClientReadableStream<GenerateResponse>>;
  /** End a generation that does not end with its call. */
  abort(generationId: string): Promise<unknown>;
  /** Tell that the stream has ended. */
  ended(): void;
}

/** One generation. Iterate over it for its text, or over `events()` for everything. The first iteration sends it. */
export class TextStream implements AsyncIterable<string>, Disposable {
  /** The first event; undefined before it. */
  started: Started | undefined;
  /** The last event; undefined before it, and when the generation was left early. */
  finished: Finished | undefined;
  /** Number of the last event that was received; `resume` takes it. */
  sequence = 0n;
  #generatedTokens = 0;
  #isOver = false;
  #call: ClientReadableStream<GenerateResponse> | undefined;
  #abort: Promise<unknown> | undefined;
  readonly #leaving = new AbortController();

  /** @internal */
  constructor(readonly opening: Opening) {}

  /** The text, piece by piece: joined, they are the completion. */
  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "chunk" && event.value.text) yield event.value.text;
    }
  }

  /** Every message of the stream, the last one included. */
  async *events(): AsyncGenerator<GenerateResponse, void, undefined> {
    const { signal, timeoutSeconds } = this.opening;
    const leave = () => this.#leave(signal?.reason);
    const deadline = Date.now() + timeoutSeconds * 1000;
    signal?.addEventListener("abort", leave);
    try {
      if (signal?.aborted) leave();
      for (let failures = 0; !this.#hasEnded; ) {
        try {
          for await (const response of await this.#open(deadline)) {
            failures = 0;
            if (this.#remember(response)) yield response;
          }
          if (!this.#hasEnded) throw streamCut();
        } catch (error) {
          await this.#settle(error, failures++, deadline);
        }
      }
      if (!this.finished && !this.#isOver && this.#leaving.signal.reason !== QUIETLY) throw this.#leaving.signal.reason;
    } finally {
      signal?.removeEventListener("abort", leave);
      this.cancel();
      this.#isOver = true;
      await this.#abort;
      this.opening.ended();
    }
  }

  /** End the generation now. An iteration that is under way stops without an error. */
  cancel(): void {
    this.#leave(QUIETLY);
  }

  [Symbol.dispose](): void {
    this.cancel();
  }

  /** @internal End it because its client is closed: an iteration that is under way fails. */
  close(): void {
    this.#leave(clientClosed());
  }

  /** Why the generation ended; undefined before it has. */
  get finishReason(): FinishReason | undefined {
    return this.finished && finishReasonOf(this.finished);
  }

  /** The account of the whole generation; undefined before its end. */
  get stats(): GenerateStats | undefined {
    return this.finished?.stats;
  }

  /** The tokens used so far, by what has arrived; final once the generation has ended. */
  get usage(): Usage {
    return {
      promptTokens: this.started?.promptTokens ?? 0,
      cachedTokens: this.started?.cachedTokens ?? 0,
      generatedTokens: this.stats?.generatedTokens ?? this.#generatedTokens,
    };
  }

  get #hasEnded(): boolean {
    return this.#isOver || this.finished !== undefined || this.#leaving.signal.aborted;
  }

  async #open(deadline: number): Promise<ClientReadableStream<GenerateResponse>> {
    const after = this.started && { generationId: this.started.generationId, afterSequence: this.sequence };
    this.#call = await this.opening.open(deadline, after);
    if (this.#leaving.signal.aborted) this.#call.cancel();
    return this.#call;
  }

  /** Note what matters of an event; false for the Started with which a resumed stream begins again. */
  #remember({ sequence, event }: GenerateResponse): boolean {
    this.sequence = sequence;
    if (event.case === "started" && this.started) return false;
    if (event.case === "started") this.started = event.value;
    if (event.case === "finished") this.finished = event.value;
    if (event.case === "chunk") this.#generatedTokens = (event.value.tokens.at(-1)?.index ?? this.#generatedTokens - 1) + 1;
    return true;
  }

  /** Return where the loop may go on, after a pause; throw where it may not. */
  async #settle(thrown: unknown, failures: number, deadline: number): Promise<void> {
    if (this.#leaving.signal.aborted) return;
    const { target, timeoutSeconds, isDurable } = this.opening;
    const error = errorOf(thrown, { target, timeoutSeconds, generatedTokens: this.started && this.#generatedTokens });
    const mayGoOn = isDurable && !this.finished && this.started !== undefined;
    const pause = mayGoOn ? resumePause(error, failures) : retryPause(error, this.started ? MOST_ATTEMPTS : failures);
    if (pause === undefined || Date.now() + pause * 1000 >= deadline) {
      this.#isOver = true; // it has ended by itself, so that nothing is left to cancel
      throw error;
    }
    await sleep(pause * 1000, undefined, { signal: this.#leaving.signal }).catch(() => {});
  }

  #leave(reason: unknown): void {
    if (this.#hasEnded) return;
    this.#leaving.abort(reason);
    this.#call?.cancel();
    if (this.opening.isDurable && this.started) this.#abort = this.opening.abort(this.started.generationId).catch(() => {});
  }
}

/** @internal Seconds to wait before a call that has not been answered is tried again; undefined: not at all. */
export function retryPause(error: unknown, failures: number): number | undefined {
  if (!(error instanceof MlxStreamError) || !error.isRetryable || failures + 1 >= MOST_ATTEMPTS) return undefined;
  return error.pushbackSeconds ?? backoff(failures);
}

/** @internal The reason in the last event of a stream. */
export function finishReasonOf(finished: Finished): FinishReason {
  return (Reason[finished.finishReason] ?? "UNSPECIFIED").toLowerCase() as FinishReason;
}

function resumePause(error: unknown, failures: number): number | undefined {
  if (!(error instanceof MlxStreamError) || !(error.isConnectionLost || error.isRetryable)) return undefined;
  return Math.max(error.pushbackSeconds ?? 0, backoff(failures));
}

function backoff(failures: number): number {
  return Math.min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** failures) * (0.8 + 0.4 * Math.random());
}
