// Stream an answer, then look at its account: go run ./examples/stream [TARGET]
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

	stream := client.Stream(context.Background(), &v1.GenerateRequest{
		Prompt:  mlxstream.Chat(mlxstream.User("Name three rivers.")),
		Options: &v1.GenerateOptions{MaxTokens: proto.Uint32(60), Temperature: proto.Float64(0.7), Seed: proto.Uint64(1)},
	})
	for text, err := range stream.Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(text)
	}
	fmt.Println()
	finished := stream.Finished()
	fmt.Printf("%s: %d tokens, %.1f per second\n",
		finished.GetFinishReason(), stream.Usage().GeneratedTokens, finished.GetStats().GetDecodeTps())
}
