// A conversation: the client keeps the turns, the model's template makes the prompt: go run ./examples/chat [TARGET]
package main

import (
	"context"
	"errors"
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

	turns := []*v1.ChatMessage{mlxstream.Message("system", "Answer in one sentence.")}
	for _, question := range []string{"What is the capital of France?", "And which river runs through it?"} {
		turns = append(turns, mlxstream.User(question))
		answer, err := client.Generate(ctx, &v1.GenerateRequest{
			Prompt:  mlxstream.Chat(turns...),
			Options: &v1.GenerateOptions{MaxTokens: proto.Uint32(60)},
		})
		if err != nil {
			log.Fatal(err)
		}
		turns = append(turns, mlxstream.Message("assistant", answer.GetText()))
		fmt.Printf("> %s\n%s\n", question, answer.GetText())
	}

	_, err = client.Generate(ctx, &v1.GenerateRequest{
		Prompt:  mlxstream.Chat(turns...),
		Options: &v1.GenerateOptions{Temperature: proto.Float64(-1)},
	})
	var failure *mlxstream.Error
	if errors.As(err, &failure) {
		for _, violation := range failure.Violations {
			fmt.Println(violation.GetField(), violation.GetDescription())
		}
	}
}
