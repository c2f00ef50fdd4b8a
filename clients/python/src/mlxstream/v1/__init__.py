"""Generated code of the schema `mlxstream.v1`: one module per file, services in `*_pb2_grpc`."""
