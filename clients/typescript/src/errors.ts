/** Errors of the client: one class, told apart by `kind`, with what the server said in its rich status. */

import { type DescMessage, fromBinary } from "@bufbuild/protobuf";
import { anyUnpack, durationMs } from "@bufbuild/protobuf/wkt";
import { type Metadata, status } from "@grpc/grpc-js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema, StatusSchema } from "./generated/google/rpc/details_pb.js";

const KIND_BY_CODE = {
  [status.INVALID_ARGUMENT]: "invalid_request",
  [status.OUT_OF_RANGE]: "out_of_range",
  [status.NOT_FOUND]: "not_found",
  [status.ALREADY_EXISTS]: "already_exists",
  [status.FAILED_PRECONDITION]: "failed_precondition",
  [status.RESOURCE_EXHAUSTED]: "overloaded",
  [status.UNAVAILABLE]: "unavailable",
  [status.UNIMPLEMENTED]: "unsupported",
  [status.UNAUTHENTICATED]: "authentication",
  [status.PERMISSION_DENIED]: "authentication",
  [status.DEADLINE_EXCEEDED]: "deadline_exceeded",
  [status.CANCELLED]: "cancelled",
  [status.DATA_LOSS]: "data_loss",
} as const;

/**
 * What a caller would do about an error:
 *
 * - `prompt_too_long`: the prompt leaves no room in the context
 * - `invalid_request`: a field is wrong; `violations` names each
 * - `out_of_range`: the point to resume from is no longer held
 * - `not_found`: no model, adapter or generation of this name
 * - `already_exists`: the request id is in use by a live generation
 * - `failed_precondition`: an adapter, a checkpoint or a model file does not fit
 * - `overloaded`: a bounded resource is full; see `retryAfterSeconds`
 * - `unavailable`: not reachable, loading, draining: try again later
 * - `unsupported`: a known option or RPC that this server or model cannot honour
 * - `authentication`: no credentials, wrong ones, or not enough rights
 * - `deadline_exceeded`: the call's deadline passed; what had arrived stays in the stream
 * - `cancelled`: the generation was ended by somebody else
 * - `data_loss`: stored data is damaged
 * - `stream_cut`: the stream ended without its last event
 * - `server`: the server's fault; `metadata` holds a correlation id
 */
export type ErrorKind = (typeof KIND_BY_CODE)[keyof typeof KIND_BY_CODE] | "prompt_too_long" | "stream_cut" | "server";

/** A failed call. */
export class MlxStreamError extends Error {
  override readonly name = "MlxStreamError";
  /** Status code of the call, such as "UNAVAILABLE". */
  readonly code: string;
  /** Name of the schema's `ErrorReason`, or where no server spoke one of the client's own: DEADLINE, UNREACHABLE,
   * UNRESOLVABLE_TARGET, CONNECTION_LOST, NOT_READY, CLIENT_CLOSED, STREAM_CUT. */
  readonly reason!: string;
  /** The values that the message speaks of, by name. */
  readonly metadata!: Readonly<Record<string, string>>;
  /** The bad fields of the request: their paths in the schema, and what is wrong with them. */
  readonly violations!: ReadonlyArray<{ field: string; description: string }>;
  /** How long the server asks to wait before another try; undefined when it does not say. */
  readonly retryAfterSeconds!: number | undefined;
  /** @internal What `grpc-retry-pushback-ms` says; negative: never again. */
  readonly pushbackSeconds!: number | undefined;

  constructor(readonly kind: ErrorKind, code: status, message: string, details: Partial<Details>) {
    super(message);
    this.code = status[code];
    Object.assign(this, NO_DETAILS, details);
  }

  /** @internal Whether a call that the server has not accepted may be tried again. */
  get isRetryable(): boolean {
    if (this.code === "RESOURCE_EXHAUSTED") return (this.pushbackSeconds ?? -1) >= 0;
    return this.code === "UNAVAILABLE" && (this.pushbackSeconds ?? 0) >= 0;
  }

  /** @internal Whether a durable generation may go on: the server is away, restarts, or is full and says for how long. */
  get isTransient(): boolean {
    if (this.kind === "overloaded") return this.retryAfterSeconds !== undefined;
    return this.kind === "unavailable" || this.kind === "stream_cut";
  }
}

type Details = Pick<MlxStreamError, "reason" | "metadata" | "violations" | "retryAfterSeconds" | "pushbackSeconds">;

const NO_DETAILS: Details = { reason: "", metadata: {}, violations: [], retryAfterSeconds: undefined, pushbackSeconds: undefined };

/** @internal What the client knows of a call. `generatedTokens` is undefined before the first event. */
export interface CallFacts {
  readonly target: string;
  readonly timeoutSeconds: number;
  readonly generatedTokens?: number | undefined;
}

/** @internal The typed error of whatever a call threw. */
export function errorOf(error: unknown, facts: CallFacts): unknown {
  if (!(error instanceof Error) || error instanceof MlxStreamError || !("code" in error && "metadata" in error)) return error;
  const { code, details: text, metadata } = error as Error & { code: status; details: string; metadata: Metadata };
  const details = detailsOf(metadata);
  const tokens = facts.generatedTokens;
  if (code === status.DEADLINE_EXCEEDED) {
    const known = { timeout_seconds: `${facts.timeoutSeconds}`, generated_tokens: `${tokens ?? 0}` };
    const message = `stopped by its deadline of ${facts.timeoutSeconds} s after ${tokens ?? 0} tokens`;
    return new MlxStreamError("deadline_exceeded", code, message, { reason: "DEADLINE", metadata: known });
  }
  if (!details.reason && (code === status.UNAVAILABLE || (tokens !== undefined && LOST_CODES.has(code)))) {
    const known = { target: facts.target, generated_tokens: `${tokens ?? 0}` };
    const [reason, message] = withoutAnswer(text, facts);
    return new MlxStreamError("unavailable", status.UNAVAILABLE, message, { ...details, reason, metadata: known });
  }
  const kinds: Readonly<Partial<Record<status, ErrorKind>>> = KIND_BY_CODE;
  const kind = details.reason === "PROMPT_TOO_LONG" ? "prompt_too_long" : (kinds[code] ?? "server");
  return new MlxStreamError(kind, code, text || status[code], details);
}

/** @internal The error of a stream that ended with OK, but without its last event. */
export function streamCut(): MlxStreamError {
  return new MlxStreamError("stream_cut", status.DATA_LOSS, "the stream ended without its last event", { reason: "STREAM_CUT" });
}

/** @internal The error of a call whose client was closed under it. */
export function clientClosed(): MlxStreamError {
  return new MlxStreamError("cancelled", status.CANCELLED, "the client was closed", { reason: "CLIENT_CLOSED" });
}

// What a dying connection or a proxy can make of a running stream, without a word from the server.
const LOST_CODES: ReadonlySet<status> = new Set([status.INTERNAL, status.UNKNOWN, status.CANCELLED]);

function withoutAnswer(text: string, { target, generatedTokens }: CallFacts): [reason: string, message: string] {
  if (generatedTokens !== undefined) return ["CONNECTION_LOST", `${target} went away after ${generatedTokens} tokens`];
  if (text.startsWith("Name resolution failed")) return ["UNRESOLVABLE_TARGET", `the target ${target} leads to no address`];
  if (text.startsWith("No connection established")) return ["UNREACHABLE", `no server answers at ${target}`];
  return ["CONNECTION_LOST", `${target} went away before it answered (${text})`];
}

function detailsOf(trailers: Metadata): Details {
  const pushback = Number.parseInt(String(trailers.get("grpc-retry-pushback-ms")[0]), 10);
  const packed = trailers.get("grpc-status-details-bin")[0];
  return {
    ...(packed instanceof Uint8Array ? unpacked(packed) : NO_DETAILS),
    pushbackSeconds: Number.isNaN(pushback) ? undefined : pushback / 1000,
  };
}

function unpacked(packed: Uint8Array): Details {
  try {
    const { details } = fromBinary(StatusSchema, packed);
    const one = <Kind extends DescMessage>(kind: Kind) => details.map((detail) => anyUnpack(detail, kind)).find(Boolean);
    const delay = one(RetryInfoSchema)?.retryDelay;
    return {
      reason: one(ErrorInfoSchema)?.reason ?? "",
      metadata: one(ErrorInfoSchema)?.metadata ?? {},
      violations: one(BadRequestSchema)?.fieldViolations ?? [],
      retryAfterSeconds: delay && durationMs(delay) / 1000,
      pushbackSeconds: undefined,
    };
  } catch {
    return NO_DETAILS; // a proxy's own bytes are no reason to hide the status
  }
}
