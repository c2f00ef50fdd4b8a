"""Asks a server how it is, for container engines that run a command: `python -m service.probe TARGET [SERVICE]`.

Without SERVICE it is liveness, as in `grpc.health.v1`. The exit status is 0 when it is SERVING, else 1. Needs no model,
no engine and little time.
"""

from __future__ import annotations

import sys
from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

ANSWER_SECONDS: Final = 3.0


def is_serving(target: str, service: str) -> bool:
    """Whether `service` ("" for the process) is SERVING at `target`, without encryption."""
    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            check = HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = check(HealthCheckRequest(service=service), timeout=ANSWER_SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def main(arguments: list[str]) -> int:
    """The exit status of the command."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: probe TARGET [SERVICE]\n")
        return 2
    return 0 if is_serving(arguments[0], arguments[1] if len(arguments) == 2 else "") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
