/** Errors of the client: one class, told apart by `kind`, with what the server said in its rich status. */

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { type Metadata, status } from "@grpc/grpc-js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema, StatusSchema } from "./generated/google/rpc/details_pb.js";

/** What a caller would do about an error. */
export type ErrorKind =
  | "prompt_too_long" // the prompt leaves no room in the context
  | "invalid_request" // a field is wrong; `violations` names each
  | "out_of_range" // the point to resume from is no longer held
  | "not_found" // no model, adapter or generation of this name
  | "already_exists" // the request id is in use by a live generation
  | "failed_precondition" // an adapter, a checkpoint or a model file does not fit
  | "overloaded" // a bounded resource is full; see `retryAfterSeconds`
  | "unavailable" // not reachable, loading, draining: try again later
  | "unsupported" // a known option or RPC that this server or model cannot honour
  | "authentication" // no credentials, wrong ones, or not enough rights
  | "deadline_exceeded" // the call's deadline passed; what had arrived stays in the stream
  | "cancelled" // the generation was ended by somebody else
  | "data_loss" // stored data is damaged
  | "stream_cut" // the stream ended without its last event
  | "server"; // the server's fault; `metadata` holds a correlation id

const KIND_BY_CODE: Readonly<Record<number, ErrorKind>> = {
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
};

/** A failed call. */
export class MlxStreamError extends Error {
  override readonly name = "MlxStreamError";
  /** Status code of the call, such as "UNAVAILABLE". */
  readonly code: string;
  /** Name of the schema's `ErrorReason`, or where no server spoke one of the client's own: DEADLINE, UNREACHABLE,
   * UNRESOLVABLE_TARGET, CONNECTION_LOST, NOT_READY, CLIENT_CLOSED, STREAM_CUT. */
  readonly reason: string;
  /** The values that the message speaks of, by name. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The bad fields of the request: their paths in the schema, and what is wrong with them. */
  readonly violations: ReadonlyArray<{ field: string; description: string }>;
  /** How long the server asks to wait before another try; undefined when it does not say. */
  readonly retryAfterSeconds: number | undefined;
  /** @internal What `grpc-retry-pushback-ms` says; negative: never again. */
  readonly pushbackSeconds: number | undefined;

  constructor(readonly kind: ErrorKind, code: status, message: string, details: Partial<Details> = {}) {
    super(message);
    this.code = status[code];
    this.reason = details.reason ?? "";
    this.metadata = details.metadata ?? {};
    this.violations = details.violations ?? [];
    this.retryAfterSeconds = details.retryAfterSeconds;
    this.pushbackSeconds = details.pushbackSeconds;
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
  const kind = details.reason === "PROMPT_TOO_LONG" ? "prompt_too_long" : (KIND_BY_CODE[code] ?? "server");
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
  const details: { -readonly [Name in keyof Details]: Details[Name] } = {
    reason: "",
    metadata: {},
    violations: [],
    retryAfterSeconds: undefined,
    pushbackSeconds: Number.isNaN(pushback) ? undefined : pushback / 1000,
  };
  const packed = trailers.get("grpc-status-details-bin")[0];
  if (!(packed instanceof Uint8Array)) return details;
  try {
    for (const detail of fromBinary(StatusSchema, packed).details) {
      const info = anyUnpack(detail, ErrorInfoSchema);
      const delay = anyUnpack(detail, RetryInfoSchema)?.retryDelay;
      if (info) Object.assign(details, { reason: info.reason, metadata: info.metadata });
      if (delay) details.retryAfterSeconds = Number(delay.seconds) + delay.nanos / 1e9;
      const violations = anyUnpack(detail, BadRequestSchema)?.fieldViolations;
      if (violations) details.violations = violations.map(({ field, description }) => ({ field, description }));
    }
  } catch {
    return details; // a proxy's own bytes are no reason to hide the status
  }
  return details;
}
