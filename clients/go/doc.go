package mlxstream

import (
	_ "google.golang.org/genproto/googleapis/rpc/errdetails"
	_ "google.golang.org/grpc/health"
	_ "google.golang.org/grpc/health/grpc_health_v1"
	_ "google.golang.org/grpc/resolver/manual"
	_ "github.com/mlx-stream/mlx-stream/clients/go/v1"
)
