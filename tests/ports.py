"""Ports for servers that end and come back to the same one, or that cannot tell which one they were given."""

import random
import socket

# Below those that systems give out by themselves: for outgoing connections, and for listeners on port 0.
LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    """A loopback port on which nobody listens, and which nobody gets by chance."""
    choice = random.SystemRandom()
    while True:
        port = choice.randint(LOWEST, HIGHEST)
        with socket.socket() as probe:
            if not _is_taken(probe, port):
                return port


def _is_taken(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return True
    return False
