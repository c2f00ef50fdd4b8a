// Every call has a deadline: fail at it, or take what there is by then: go run ./examples/deadline [TARGET]
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
	question := &v1.GenerateRequest{Prompt: mlxstream.Chat(mlxstream.User("Tell a story that never ends."))}

	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := client.Generate(ctx, question); errors.Is(err, context.DeadlineExceeded) {
		fmt.Println("failed:", err)
	}

	ctx, cancel = context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	question.Delivery = &v1.DeliveryOptions{DeadlinePolicy: v1.DeadlinePolicy_DEADLINE_POLICY_PARTIAL_RESULT}
	result, err := client.Generate(ctx, question)
	if err != nil {
		log.Fatal(err)
	}
	finished := result.GetFinished()
	fmt.Printf("%s: %d tokens in one second\n", finished.GetFinishReason(), finished.GetStats().GetGeneratedTokens())
}
