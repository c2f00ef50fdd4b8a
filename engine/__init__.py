"""The engine: one shared model, stepped by one thread, behind one front door.

Nothing here knows about gRPC or protobuf; `service` translates. Layers, highest first:
execution > generation > models | state | sampling | adapters > artifacts | ops > runtime > contracts.
"""
