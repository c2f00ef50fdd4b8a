/**
 * Client of mlx-stream: stream tokens from an MLX engine over gRPC. Begin with {@link
 * io.mlxstream.MlxStreamClient#connect}. The schema's own messages are in {@code io.mlxstream.v1}.
 */
package io.mlxstream;
