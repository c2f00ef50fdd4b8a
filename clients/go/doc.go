// Package mlxstream is the Go client of mlx-stream: it streams tokens from an MLX engine over gRPC.
//
//	client, err := mlxstream.Connect("127.0.0.1:50051")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//	stream := client.Stream(ctx, &v1.GenerateRequest{
//		Prompt: mlxstream.Chat(mlxstream.User("Name three rivers.")),
//	})
//	for text, err := range stream.Text() {
//		if err != nil {
//			return err
//		}
//		fmt.Print(text)
//	}
//
// Leaving the loop, cancelling the context and [Stream.Cancel] each end the generation on the server at once. Calls are
// tried again only while the server has not begun to answer them; a durable stream resumes by itself after it was cut.
//
// The schema's own messages are in the package v1 below this one; what has no method here is reached by the stubs of
// [Client.Generations], [Client.Models] and [Client.Admin].
package mlxstream
