/** The conformance program: requests as lines of JSON on standard input, answers on standard output (clients/conformance). */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { durationFromMs } from "@bufbuild/protobuf/wkt";
import { AdminService, Client, connect, type GenerateResponse, type GenerateSettings, MlxStreamError, type Prompt, type TextStream } from "mlx-stream-client";
import { DeadlinePolicy } from "mlx-stream-client/v1/delivery";
import type { Started } from "mlx-stream-client/v1/event";
import { AbortStatus } from "mlx-stream-client/v1/generation";

type Json = any; // what a line holds is checked by the runner
type Report = Record<string, unknown>;

const LONGEST = 10_000;
const clients = new Map<string, Client>();

function clientOf(server: Json): Client {
  const key = JSON.stringify(server);
  const tls = server.tls && {
    ...(server.tls.ca_file && { ca: readFileSync(server.tls.ca_file) }),
    ...(server.tls.certificate_file && { certificate: readFileSync(server.tls.certificate_file) }),
    ...(server.tls.key_file && { key: readFileSync(server.tls.key_file) }),
    ...(server.tls.server_name && { serverName: server.tls.server_name }),
  };
  const client = clients.get(key) ?? connect(server.targets ?? server.target, { tls, token: server.token });
  clients.set(key, client);
  return client;
}

function promptOf({ text, filler_bytes, tokens, messages }: Json): Prompt {
  return tokens ?? messages ?? text + "x".repeat(filler_bytes ?? 0);
}

const seconds = (value: number | undefined) => (value === undefined ? undefined : durationFromMs(value * 1000));

function policyOf(name: string | number | undefined): DeadlinePolicy | undefined {
  if (typeof name === "number") return name;
  return name === undefined ? undefined : DeadlinePolicy[name.toUpperCase() as keyof typeof DeadlinePolicy];
}

function settingsOf(request: Json): GenerateSettings {
  const { options = {}, delivery } = request;
  return {
    maxTokens: options.max_tokens,
    temperature: options.temperature,
    topP: options.top_p,
    topK: options.top_k,
    seed: options.seed === undefined ? undefined : BigInt(options.seed),
    stopSequences: options.stop_sequences ?? [],
    logprobs: options.logprobs,
    topLogprobs: options.top_logprobs,
    model: request.model,
    requestId: request.request_id,
    priority: request.priority,
    timeoutSeconds: request.timeout_seconds,
    ...(delivery && {
      delivery: {
        heartbeatInterval: seconds(delivery.heartbeat_seconds),
        maxDelay: seconds(delivery.max_delay_seconds),
        maxTokensPerMessage: delivery.max_tokens_per_message,
        includeText: delivery.include_text,
        includeTokenBytes: delivery.include_token_bytes ?? false,
        draftBlocks: delivery.draft_blocks ?? false,
        durable: delivery.durable ?? false,
        deadlinePolicy: policyOf(delivery.deadline_policy) ?? DeadlinePolicy.UNSPECIFIED,
      },
    }),
  };
}

function errorReport(error: unknown): Report {
  if (!(error instanceof MlxStreamError)) return { kind: "client", message: String(error) };
  const { kind, code, reason, message, metadata, violations, retryAfterSeconds } = error;
  return { kind, code, reason, message, metadata, violations: violations.map(({ field }) => field), retry_after_seconds: retryAfterSeconds };
}

function startedReport(started: Started | undefined): Report | null {
  if (!started) return null;
  const { seed, temperature, topP, topK, maxTokens } = started.options ?? {};
  return {
    model: started.model,
    seed_was_explicit: started.seedWasExplicit,
    seed: `${seed ?? 0n}`,
    temperature: temperature ?? null,
    top_p: topP ?? null,
    top_k: topK ?? null,
    max_tokens: maxTokens ?? null,
    resumed_tokens: started.resumedTokens,
  };
}

/** What one stream showed. */
class Account {
  text = "";
  tokens: number[] = [];
  indices: number[] = [];
  tokenBytes: string[] = [];
  logprobs: number[] = [];
  blocks: Report[] = [];
  messages = 0;
  chunks = 0;
  heartbeats = 0;
  unknownEvents = 0;
  firstTextSeconds: number | null = null;
  readonly #begun = performance.now();

  read({ event }: GenerateResponse): void {
    this.messages += 1;
    if (event.case === "heartbeat") this.heartbeats += 1;
    if (event.case === undefined) this.unknownEvents += 1;
    if (event.case === "block") {
      const { blockIndex, revision, committed, tokens } = event.value;
      this.blocks.push({ block_index: blockIndex, revision, committed, tokens });
    }
    if (event.case !== "chunk") return;
    this.chunks += 1;
    this.text += event.value.text;
    if (event.value.text) this.firstTextSeconds ??= this.seconds();
    this.take(event.value.tokens);
  }

  take(tokens: Json[]): void {
    for (const token of tokens) {
      this.tokens.push(token.token);
      this.indices.push(token.index);
      this.tokenBytes.push(Buffer.from(token.textBytes).toString("hex"));
      if (token.logprobs?.logprob !== undefined) this.logprobs.push(token.logprobs.logprob);
    }
  }

  #isInOrder(isResumed: boolean): boolean {
    const first = isResumed ? (this.indices[0] ?? 0) : 0;
    return this.indices.every((index, place) => index === first + place);
  }

  seconds(): number {
    return (performance.now() - this.#begun) / 1000;
  }

  report(request: Json): Report {
    const characters = Array.from(this.text);
    return {
      text: characters.slice(0, LONGEST).join(""),
      text_characters: characters.length,
      tokens: this.tokens.slice(0, LONGEST),
      ...(request.delivery?.include_token_bytes && { token_bytes: this.tokenBytes }),
      ...(request.options?.logprobs && { logprobs: this.logprobs }),
      in_order: this.#isInOrder(request.do === "resume"),
      heartbeats: this.heartbeats,
      unknown_events: this.unknownEvents,
      blocks: this.blocks,
      seconds: this.seconds(),
      first_text_seconds: this.firstTextSeconds,
    };
  }
}

function streamReport(stream: TextStream): Report {
  const { promptTokens, cachedTokens, generatedTokens } = stream.usage;
  return {
    finish_reason: stream.finishReason ?? null,
    matched_stop: stream.finished?.matchedStop ?? "",
    usage: { prompt_tokens: promptTokens, cached_tokens: cachedTokens, generated_tokens: generatedTokens },
    started: startedReport(stream.started),
  };
}

/** Reads one stream as the request says; `owner` is the signal's own controller. */
async function readStream(request: Json, stream: TextStream, owner: AbortController, account: Account): Promise<boolean> {
  const { end, pause_seconds } = request;
  const isDue = () => (end?.after === "started" && stream.started !== undefined) || (end?.after === "chunks" && account.chunks >= end.count);
  const leave = () => (end.by === "owner" ? owner.abort() : stream.cancel());
  const timer = end?.after === "seconds" ? setTimeout(leave, end.seconds * 1000) : undefined;
  let isMarked = request.mark_after_chunks === undefined;
  let hasLeft = false;
  try {
    for await (const response of stream.events()) {
      account.read(response);
      if (!isMarked && account.chunks >= request.mark_after_chunks) {
        isMarked = true;
        answer({ id: request.id, mark: "chunks", generation_id: stream.started?.generationId, sequence: `${stream.sequence}` });
      }
      if (!hasLeft && isDue()) {
        hasLeft = true;
        if (end.by === "leave") break;
        leave();
      }
      if (pause_seconds) await sleep(pause_seconds * 1000);
    }
  } catch (error) {
    if (!owner.signal.aborted) throw error;
  } finally {
    clearTimeout(timer);
  }
  return stream.finished === undefined;
}

async function playStream(request: Json): Promise<Report> {
  const account = new Account();
  const owner = new AbortController();
  const client = clientOf(request.server);
  const settings = { ...settingsOf(request), signal: owner.signal };
  const stream = request.do === "resume"
    ? client.resume(request.generation_id, BigInt(request.after_sequence), settings)
    : client.stream(promptOf(request.prompt), settings);
  try {
    const hasLeft = await readStream(request, stream, owner, account);
    return { outcome: hasLeft ? "left" : "finished", ...streamReport(stream), ...account.report(request) };
  } catch (error) {
    return { outcome: "failed", error: errorReport(error), ...streamReport(stream), ...account.report(request) };
  }
}

async function playGenerate(request: Json): Promise<Report> {
  const account = new Account();
  const { text, tokens, finishReason, matchedStop, stats, started } = await clientOf(request.server).generate(promptOf(request.prompt), settingsOf(request));
  account.text = text;
  account.take([...tokens]);
  const { promptTokens, cachedTokens, generatedTokens } = stats;
  return {
    outcome: "finished",
    finish_reason: finishReason,
    matched_stop: matchedStop,
    usage: { prompt_tokens: promptTokens, cached_tokens: cachedTokens, generated_tokens: generatedTokens },
    started: startedReport(started),
    ...account.report(request),
  };
}

async function playBurst(request: Json): Promise<Report> {
  const client = clientOf(request.server);
  const totals = { finished: 0, messages: 0, generatedTokens: 0 };
  const failed: Record<string, number> = {};
  const texts = new Set<string>();
  const added: number[] = [];
  const begun = performance.now();
  let left: number = request.count;
  const one = async () => {
    const account = new Account();
    const stream = client.stream(promptOf(request.prompt), settingsOf(request));
    try {
      for await (const response of stream.events()) account.read(response);
      totals.finished += 1;
      texts.add(account.text);
      if (account.firstTextSeconds !== null) added.push(account.firstTextSeconds * 1000 - (stream.stats?.timeToFirstTokenMs ?? 0));
    } catch (error) {
      const kind = String(errorReport(error).kind);
      failed[kind] = (failed[kind] ?? 0) + 1;
    }
    totals.messages += account.messages;
    totals.generatedTokens += stream.usage.generatedTokens;
  };
  const lane = async () => {
    while (left-- > 0) await one();
  };
  await Promise.all(Array.from({ length: request.streams }, lane));
  added.sort((one, other) => one - other);
  const quantile = (share: number) => added[Math.min(added.length - 1, Math.floor(added.length * share))] ?? 0;
  return {
    outcome: "ok",
    finished: totals.finished,
    failed,
    texts: [...texts].sort(),
    messages: totals.messages,
    generated_tokens: totals.generatedTokens,
    seconds: (performance.now() - begun) / 1000,
    added_ms: { p50: quantile(0.5), p99: quantile(0.99) },
  };
}

async function playWatch(request: Json): Promise<Report> {
  const statuses: string[] = [];
  for await (const status of clientOf(request.server).watchHealth(request.service)) {
    statuses.push(status);
    if (statuses.length === 1) answer({ id: request.id, mark: "chunks" });
    if (statuses.length >= request.count) break;
  }
  return { outcome: "ok", statuses };
}

async function play(request: Json): Promise<Report> {
  switch (request.do) {
    case "stream":
    case "resume":
      return playStream(request);
    case "generate":
      return playGenerate(request);
    case "burst":
      return playBurst(request);
    case "watch":
      return playWatch(request);
    case "abort": {
      const { request_id: requestId, generation_id: generationId } = request;
      const { status } = await clientOf(request.server).abort(requestId === undefined ? { generationId } : { requestId });
      return { outcome: "ok", status: AbortStatus[status] };
    }
    case "health":
      return { outcome: "ok", status: await clientOf(request.server).health(request.service) };
    case "model":
      return { outcome: "ok", model: (await clientOf(request.server).model()).name };
    case "load": {
      const { queueLimit } = await clientOf(request.server).call(AdminService.method.getLoad, {});
      return { outcome: "ok", queue_limit: queueLimit };
    }
    case "drain": {
      const { finishedGenerations, abortedGenerations } = await clientOf(request.server).call(AdminService.method.drain, {});
      return { outcome: "ok", finished: finishedGenerations, aborted: abortedGenerations };
    }
    case "close": {
      const client = clientOf(request.server);
      clients.delete(JSON.stringify(request.server));
      await client.close();
      return { outcome: "ok" };
    }
    default:
      throw new Error(`unknown request ${request.do}`);
  }
}

function answer(line: Report): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

async function respond(request: Json): Promise<void> {
  const begun = performance.now();
  try {
    answer({ id: request.id, ...(await play(request)) });
  } catch (error) {
    answer({ id: request.id, outcome: "failed", error: errorReport(error), seconds: (performance.now() - begun) / 1000 });
  }
}

const running = new Set<Promise<void>>();
for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.do === "quit") break;
  const response = respond(request).finally(() => running.delete(response));
  running.add(response);
}
await Promise.all(running);
await Promise.all([...clients.values()].map((client) => client.close()));
