/** What a caller may pass as a prompt and as settings, and the schema's messages that come of it. */

import { randomUUID } from "node:crypto";
import { create, type JsonObject, type MessageInitShape } from "@bufbuild/protobuf";
import { DeliveryOptionsSchema } from "./generated/mlxstream/v1/delivery_pb.js";
import type { AbortRequestSchema, GenerateRequestSchema } from "./generated/mlxstream/v1/generation_pb.js";
import { GenerateOptionsSchema } from "./generated/mlxstream/v1/options_pb.js";

/** One turn of a conversation. Images are the bytes of a PNG, JPEG or WebP file. */
export interface ChatMessage {
  readonly role: string;
  readonly content: string | ReadonlyArray<string | Uint8Array>;
}

/** A conversation with the settings of the chat template. */
export interface Chat {
  readonly messages: readonly ChatMessage[];
  readonly tools?: JsonObject[];
  readonly addGenerationPrompt?: boolean;
  readonly enableThinking?: boolean;
  readonly templateVariables?: JsonObject;
}

/** Raw text, token ids, a conversation, or a conversation with its settings. */
export type Prompt = string | readonly number[] | readonly ChatMessage[] | Chat;

/** A way to name a generation. */
export type GenerationName = { readonly requestId: string } | { readonly generationId: string };

/** Settings of any call. */
export interface CallSettings {
  /** Seconds until the call ends with an error of kind "deadline_exceeded". Default: the client's. Infinity: never. */
  readonly timeoutSeconds?: number;
  /** Ends the call when it aborts; what waits for it throws the signal's reason, as `fetch` does. */
  readonly signal?: AbortSignal;
}

/** Settings of a generation: those of a call, those of the request, and every field of the schema's GenerateOptions. */
export type GenerateSettings = CallSettings &
  Omit<MessageInitShape<typeof GenerateOptionsSchema>, "$typeName" | "$unknown"> & {
    /** Name of the model. Default: the served one. */
    readonly model?: string;
    /** The caller's own name for the generation, which `abort` takes. */
    readonly requestId?: string;
    /** How the stream is delivered: the fields of the schema's DeliveryOptions. `durable: true` survives lost connections. */
    readonly delivery?: Omit<MessageInitShape<typeof DeliveryOptionsSchema>, "$typeName" | "$unknown">;
    /** From -100 to 100: higher values leave the queue first. */
    readonly priority?: number;
  };

type RequestFields = Exclude<MessageInitShape<typeof GenerateRequestSchema>, { readonly $typeName: string }>;
type PromptArm = NonNullable<RequestFields["prompt"]>;

/** @internal The request's fields; those of GenerateRequest and CompleteRequest are the same. */
export function requestFields(prompt: Prompt, settings: GenerateSettings): RequestFields {
  const { timeoutSeconds: _1, signal: _2, priority: _3, model, requestId, delivery, ...options } = settings;
  const known = new Set(GenerateOptionsSchema.members.map(({ localName }) => localName));
  const unknown = Object.keys(options).find((name) => !known.has(name) && name !== "$typeName" && name !== "$unknown");
  if (unknown) throw new TypeError(`there is no option "${unknown}"`);
  return {
    model: model ?? "",
    requestId: requestId || (delivery?.durable ? randomUUID() : ""), // tells the server a repetition from a twin
    prompt: promptArm(prompt),
    options: create(GenerateOptionsSchema, options),
    ...(delivery && { delivery: create(DeliveryOptionsSchema, delivery) }),
  };
}

/** @internal The fields of an AbortRequest. */
export function abortFields(name: GenerationName): MessageInitShape<typeof AbortRequestSchema> {
  return "requestId" in name
    ? { target: { case: "requestId", value: name.requestId } }
    : { target: { case: "generationId", value: name.generationId } };
}

/** @internal The fields of a ChatPrompt. */
export function chatFields({ messages, ...settings }: Chat) {
  const parts = (content: ChatMessage["content"]) => (typeof content === "string" ? [content] : content).map((part) => ({
    part: typeof part === "string" ? { case: "text" as const, value: part } : { case: "image" as const, value: part },
  }));
  return { ...settings, messages: messages.map(({ role, content }) => ({ role, content: parts(content) })) };
}

function promptArm(prompt: Prompt): PromptArm {
  if (typeof prompt === "string") return { case: "text", value: { text: prompt } };
  if ("messages" in prompt) return { case: "chat", value: chatFields(prompt) };
  if (prompt.every((item) => typeof item === "number")) return { case: "tokens", value: { ids: [...prompt] } };
  return { case: "chat", value: chatFields({ messages: prompt as readonly ChatMessage[] }) };
}

/** @internal The metadata that carry a generation's priority. */
export function priorityMetadata({ priority }: GenerateSettings): Readonly<Record<string, string>> {
  return priority === undefined ? {} : { "mlx-stream-priority": `${priority}` };
}
