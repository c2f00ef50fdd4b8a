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

	turns := []*v1.ChatMessage{mlxstream.System("Answer in one sentence.")}
	for _, question := range []string{"What is the capital of France?", "And which river runs through it?"} {
		turns = append(turns, mlxstream.User(question))
		answer, err := client.Generate(ctx, mlxstream.Request{
			Prompt:  mlxstream.Chat(turns...),
			Options: &mlxstream.Options{MaxTokens: proto.Uint32(60)},
		})
		if err != nil {
			log.Fatal(err)
		}
		turns = append(turns, mlxstream.Assistant(answer.GetText()))
		fmt.Printf("> %s\n%s\n", question, answer.GetText())
	}

	_, err = client.Generate(ctx, mlxstream.Request{
		Prompt:  mlxstream.Chat(turns...),
		Options: &mlxstream.Options{Temperature: proto.Float64(-1)},
	})
	var failure *mlxstream.Error
	if errors.As(err, &failure) {
		for _, violation := range failure.Violations {
			fmt.Println(violation.Field, violation.Description)
		}
	}
}
