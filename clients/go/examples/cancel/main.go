// Three ways to end a generation early, each of which frees the server at once: go run ./examples/cancel [TARGET]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

var question = &v1.GenerateRequest{Prompt: mlxstream.Chat(mlxstream.User("Tell a story that never ends."))}

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

	// 1. Leave the loop.
	for text, err := range client.Stream(context.Background(), question).Text() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("left after %q\n", text)
		break
	}

	// 2. Cancel the context.
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(500*time.Millisecond, cancel)
	for _, err := range client.Stream(ctx, question).Text() {
		if errors.Is(err, context.Canceled) {
			fmt.Println("gave up after half a second")
		}
	}

	// 3. Cancel the stream from somewhere else: its loop ends without an error.
	stream := client.Stream(context.Background(), question)
	time.AfterFunc(500*time.Millisecond, stream.Cancel)
	for _, err := range stream.Text() {
		if err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("cancelled after %d tokens\n", stream.Usage().GeneratedTokens)
}
