"""The gRPC face of the engine: converts messages, answers calls, tells health, lives and dies as a process.

Never imports mlx; of the engine it knows the front door and the contracts.
"""
