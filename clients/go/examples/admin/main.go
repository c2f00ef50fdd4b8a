// What a server serves, how it is, and how busy: go run ./examples/admin [TARGET]
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"google.golang.org/grpc"

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

	answer, err := client.Models().GetModel(ctx, &v1.GetModelRequest{}, grpc.WaitForReady(true))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("serving", answer.GetModel().GetName())
	load, err := client.Admin().GetLoad(ctx, &v1.GetLoadRequest{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d running, %d waiting\n", load.GetRunning(), load.GetQueued())
}
