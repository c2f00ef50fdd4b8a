"""The machine under the engine: device, BLAS, memory, and the policy that follows from them.

Importing this package never imports mlx. `engine.runtime.prepare` is the first thing that the engine thread calls.
"""
