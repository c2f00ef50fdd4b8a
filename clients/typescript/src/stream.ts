/**
 * One generation as it happens: an async iterable of its text or its events, and its account.
 *
 * Leaving a loop early (`break`, `return`, an exception), `cancel`, an aborted signal and the end of a `using` block
 * each end the generation on the server. A durable one goes on by itself after a lost connection.
 */

import type { Finished, Started } from "./generated/mlxstream/v1/event_pb.js";
import type { GenerateResponse } from "./generated/mlxstream/v1/generation_pb.js";
import { FinishReason as Reason, type GenerateStats } from "./generated/mlxstream/v1/result_pb.js";
import type { EventReader } from "./reader.js";

/** Why a generation ended. A value that this client does not know counts as unspecified. */
export type FinishReason = "unspecified" | "stop" | "length" | "cancelled" | "deadline" | "error";

/** What a generation has used so far, in tokens. `cachedTokens` are part of `promptTokens`. */
export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly generatedTokens: number;
}

/** One generation. Iterate over it for its text, or over `events()` for everything. The first iteration sends it. */
export class TextStream implements AsyncIterable<string>, Disposable {
  readonly #reader: EventReader;

  /** @internal */
  constructor(reader: EventReader) {
    this.#reader = reader;
  }

  /** The text, piece by piece: joined, they are the completion. */
  async *[Symbol.asyncIterator](): AsyncGenerator<string, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "chunk" && event.value.text) yield event.value.text;
    }
  }

  /** Every message of the stream, the last one included. */
  events(): AsyncGenerator<GenerateResponse, void, undefined> {
    return this.#reader.read();
  }

  /** End the generation now. An iteration that is under way stops without an error. */
  cancel(): void {
    this.#reader.cancel();
  }

  [Symbol.dispose](): void {
    this.cancel();
  }

  /** The first event; undefined before it. */
  get started(): Started | undefined {
    return this.#reader.started;
  }

  /** The last event; undefined before it, and when the generation was left early. */
  get finished(): Finished | undefined {
    return this.#reader.finished;
  }

  /** Number of the last event that was received; `resume` takes it. */
  get sequence(): bigint {
    return this.#reader.sequence;
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
      generatedTokens: this.stats?.generatedTokens ?? this.#reader.generatedTokens,
    };
  }
}

/** @internal The reason in the last event of a stream. */
export function finishReasonOf(finished: Finished): FinishReason {
  return (Reason[finished.finishReason] ?? "UNSPECIFIED").toLowerCase() as FinishReason;
}
