"""Types, Protocols and errors that every other part of the engine shares.

Plain Python only: importing this package never imports mlx. Protobuf and gRPC stay in `service`.
"""
