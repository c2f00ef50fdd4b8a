/** Client of mlx-stream: stream tokens from an MLX engine over gRPC. The schema's own messages are in `mlx-stream-client/v1/*`. */

export { Client, connect, type ConnectSettings, type Generation } from "./client.js";
export { type ErrorKind, MlxStreamError } from "./errors.js";
export { AdminService } from "./generated/mlxstream/v1/admin_pb.js";
export type { GenerateResponse } from "./generated/mlxstream/v1/generation_pb.js";
export { ModelService } from "./generated/mlxstream/v1/model_pb.js";
export type { CallSettings, Chat, ChatMessage, GenerateSettings, GenerationName, Prompt } from "./requests.js";
export type { Tls } from "./servers.js";
export { type FinishReason, TextStream, type Usage } from "./stream.js";
