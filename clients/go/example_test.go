package mlxstream_test

import (
	"context"
	"errors"
	"fmt"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

func ExampleClient_Close() {
	client, err := mlxstream.Connect("127.0.0.1:50051")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(client.Close(), client.Close())

	_, err = client.Generate(context.Background(), &v1.GenerateRequest{Prompt: mlxstream.Text("Once")})
	var failure *mlxstream.Error
	if errors.As(err, &failure) {
		fmt.Println(failure.Reason, failure.Kind == mlxstream.Cancelled)
	}
	for _, durable := range []bool{false, true} {
		request := &v1.GenerateRequest{Prompt: mlxstream.Text("Once"), Delivery: &v1.DeliveryOptions{Durable: durable}}
		for _, err := range client.Stream(context.Background(), request).Text() {
			fmt.Println(err)
		}
	}
	// Output:
	// <nil> <nil>
	// CLIENT_CLOSED true
	// mlxstream: the client was closed
	// mlxstream: the client was closed
}
