/** Servers: channels with their settings, single calls by the schema's methods, and the choice among several. */

import { create, type DescMessage, type DescMethod, fromBinary, type MessageShape, toBinary } from "@bufbuild/protobuf";
import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import * as grpc from "@grpc/grpc-js";
import { Health, HealthCheckRequestSchema, HealthCheckResponse_ServingStatus as Serving } from "./generated/grpc/health/v1/health_pb.js";

/** The service whose health tells that generations are taken. */
export const READINESS_SERVICE = "mlxstream.v1.GenerationService";
const MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024;
const RECONNECT_PAUSE_MS = 500;
const LONGEST_TIMER_MS = 2 ** 31 - 1;
const HOST_AND_PORT = /^(\[[0-9A-Fa-f:.]+\]|[^\s/:[\]]+):(\d{1,5})$/;
const LOOPBACK = /^(127\.|localhost:|\[::1\]:|unix:)/;

/** TLS: all is optional; without `ca` the system's authorities are trusted. Contents of PEM files, not their paths. */
export interface Tls {
  /** The authorities that may have signed the server's certificate. */
  readonly ca?: Buffer;
  /** This client's own certificate, where the server asks for one (mTLS). */
  readonly certificate?: Buffer;
  /** The key of `certificate`. */
  readonly key?: Buffer;
  /** The name that the server's certificate must have, in place of the target's host. */
  readonly serverName?: string;
}

/** @internal A method of the schema, by the types of its messages. */
export type Method<Input extends DescMessage, Output extends DescMessage> = DescMethod & { input: Input; output: Output };

/** @internal A call under way: its messages. Whoever leaves it early must `cancel` it. */
export interface Call<Output extends DescMessage> extends AsyncIterable<MessageShape<Output>> {
  /** Whether the server has begun to answer: then the call must not be made again. */
  readonly isAccepted: boolean;
  cancel(): void;
}

/** @internal One server. */
export class Server {
  readonly #client: grpc.Client;
  readonly #metadata: grpc.Metadata;
  /** Whether it takes generations, as its health tells; undefined before it has told. */
  isServing: boolean | undefined;

  constructor(readonly target: string, tls: Tls | undefined, metadata: Readonly<Record<string, string>>) {
    const [, , port] = HOST_AND_PORT.exec(target) ?? [];
    if (!target.startsWith("unix:") && !(Number(port) > 0 && Number(port) < 65536)) {
      throw new RangeError(`the target must be HOST:PORT or unix:PATH, not "${target}"`);
    }
    const credentials = tls
      ? grpc.credentials.createSsl(tls.ca ?? null, tls.key ?? null, tls.certificate ?? null)
      : grpc.credentials.createInsecure();
    this.#client = new grpc.Client(target, credentials, channelOptions(target, tls));
    this.#metadata = new grpc.Metadata();
    for (const [name, value] of Object.entries(metadata)) this.#metadata.set(name, value);
  }

  /** Begin a call, whether it answers with one message or with many. `signal` cancels it. */
  call<Input extends DescMessage, Output extends DescMessage>(
    method: Method<Input, Output>,
    request: MessageShape<Input>,
    { deadline, signal }: { readonly deadline: number; readonly signal: AbortSignal },
    metadata: Readonly<Record<string, string>> = {},
  ): Call<Output> {
    signal.throwIfAborted();
    const all = this.#metadata.clone();
    for (const [name, value] of Object.entries(metadata)) all.set(name, value);
    const call = this.#client.makeServerStreamRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: MessageShape<Input>) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      request,
      all,
      { deadline },
    );
    const accepting = Object.assign(call, { isAccepted: false });
    const cancel = () => call.cancel();
    signal.addEventListener("abort", cancel);
    call.on("metadata", () => (accepting.isAccepted = true));
    call.on("error", () => {}); // the reader hears of it; an abandoned call has none, and Node would end the process
    call.on("status", () => signal.removeEventListener("abort", cancel));
    return accepting;
  }

  /** Follow its health until the signal aborts, and call `changed` whenever `isServing` was set. */
  async follow(changed: () => void, signal: AbortSignal): Promise<void> {
    const request = create(HealthCheckRequestSchema, { service: READINESS_SERVICE });
    while (!signal.aborted) {
      try {
        for await (const { status } of this.call(Health.method.watch, request, { deadline: Infinity, signal })) {
          this.#serves(status === Serving.SERVING, changed);
        }
        this.#serves(false, changed);
      } catch (error) {
        this.#serves((error as grpc.ServiceError).code === grpc.status.UNIMPLEMENTED, changed);
      }
      await sleep(RECONNECT_PAUSE_MS, undefined, { signal, ref: false }).catch(() => {});
    }
  }

  close(): void {
    this.#client.close();
  }

  #serves(isServing: boolean, changed: () => void): void {
    this.isServing = isServing;
    changed();
  }
}

/** @internal One server, or several that take turns while their health says that they serve. */
export class Servers {
  readonly #servers: readonly Server[];
  readonly #closing = new AbortController();
  #waiting: (() => void)[] = [];
  #turn = 0;

  constructor(readonly targets: readonly string[], tls: Tls | undefined, metadata: Readonly<Record<string, string>>) {
    if (targets.length === 0) throw new RangeError("there must be at least one target");
    setMaxListeners(0, this.#closing.signal); // every server listens
    this.#servers = targets.map((target) => new Server(target, tls, metadata));
  }

  /** Each of them, this one first: to be asked for what only one may know, a generation. */
  from(first = this.#servers[0] as Server): readonly Server[] {
    return [first, ...this.#servers.filter((server) => server !== first)];
  }

  /** Whose turn it is. With several, waits until one is known to serve, or until none is; then any may refuse. */
  async next(deadline: number): Promise<Server> {
    const one = this.#servers[0];
    if (one && this.#servers.length === 1) return one;
    if (this.#turn === 0) for (const server of this.#servers) void server.follow(() => this.#wake(), this.#closing.signal);
    this.#turn += 1;
    while (Date.now() < deadline && !this.#servers.some(({ isServing }) => isServing)) {
      if (this.#closing.signal.aborted || this.#servers.every(({ isServing }) => isServing === false)) break;
      const news = new Promise<void>((resolve) => this.#waiting.push(resolve));
      await Promise.race([news, sleep(Math.min(deadline - Date.now(), LONGEST_TIMER_MS), undefined, { ref: false })]);
    }
    const serving = this.#servers.filter(({ isServing }) => isServing);
    const candidates = serving.length > 0 ? serving : this.#servers;
    return candidates[this.#turn % candidates.length] as Server;
  }

  close(): void {
    this.#closing.abort();
    this.#wake();
    for (const server of this.#servers) server.close();
  }

  #wake(): void {
    for (const wake of this.#waiting.splice(0)) wake();
  }
}

function channelOptions(target: string, tls: Tls | undefined): grpc.ChannelOptions {
  return {
    "grpc.max_receive_message_length": MESSAGE_LIMIT_BYTES,
    "grpc.max_send_message_length": MESSAGE_LIMIT_BYTES,
    // Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 5_000,
    "grpc.enable_retries": 0, // the client has its own, which moves on to another server
    "grpc.use_local_subchannel_pool": 1,
    ...(LOOPBACK.test(target) && { "grpc.enable_http_proxy": 0 }),
    ...(tls?.serverName && { "grpc.ssl_target_name_override": tls.serverName }),
  };
}
