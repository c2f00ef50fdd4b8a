// Stream an answer, then look at its account: go run ./examples/stream [TARGET]
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"google.golang.org/protobuf/proto"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
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

	stream := client.Stream(context.Background(), mlxstream.Request{
		Prompt:  mlxstream.Chat(mlxstream.User("Name three rivers.")),
		Options: &mlxstream.Options{MaxTokens: proto.Uint32(60), Temperature: proto.Float64(0.7), Seed: proto.Uint64(1)},
	})
	for text, err := range stream.Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
	fmt.Println()
	stats := stream.Finished().GetStats()
	fmt.Printf("%s: %d tokens, %.1f per second\n", stream.FinishReason(), stream.Usage().GeneratedTokens, stats.GetDecodeTps())
}
