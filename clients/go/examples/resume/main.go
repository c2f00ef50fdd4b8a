// A durable generation goes on after its reader has gone: go run ./examples/resume [TARGET]
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"google.golang.org/protobuf/proto"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	client, err := mlxstream.Connect(target)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()

	// A lost connection and a restarted server are taken care of by the stream itself. This reader leaves on purpose,
	// and another one, in another process perhaps, goes on by the two values that name the point.
	stream := client.Stream(ctx, &v1.GenerateRequest{
		Prompt:   mlxstream.Chat(mlxstream.User("Count from one to twenty.")),
		Options:  &v1.GenerateOptions{MaxTokens: proto.Uint32(80)},
		Delivery: &v1.DeliveryOptions{Durable: true},
	})
	for text, err := range stream.Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
		if stream.Usage().GeneratedTokens > 10 {
			break
		}
	}
	fmt.Print(" | ")
	for text, err := range client.Resume(ctx, stream.Started().GetGenerationId(), stream.Sequence()).Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
	fmt.Println()
}
