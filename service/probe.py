"""Asks a server how it is, for container engines that run a command: `python -m service.probe TARGET [SERVICE]`.

Without SERVICE it is liveness, as in `grpc.health.v1`. The exit status is 0 when it is SERVING, else 1, with one line
on standard error that says why. Needs no model, no engine and little time.
"""

from __future__ import annotations

import sys
from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from service.libraries import silence_grpc_core

ANSWER_SECONDS: Final = 3.0
USAGE: Final = (
    "usage: python -m service.probe TARGET [SERVICE]\n"
    "Ask TARGET (HOST:PORT or unix:PATH, without TLS) for the health of SERVICE, or of the process.\n"
    "Exit status: 0 SERVING, 1 anything else, 2 wrong usage."
)


def problem_of(target: str, service: str) -> str:
    """Why `service` ("" for the process) at `target`, asked without TLS, does not count as SERVING; "": it does."""
    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            check = HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = check(HealthCheckRequest(service=service), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return _failure(error)
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return f"it is {HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _failure(error: grpc.RpcError) -> str:
    code: grpc.StatusCode = error.code()
    cause = str(error.details()).rpartition(": ")[2].rstrip("]")
    if code is grpc.StatusCode.NOT_FOUND:
        return "it has no such service"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {ANSWER_SECONDS:g} s"
    return f"{cause}; it may want TLS, which the probe does not speak" if cause == "Socket closed" else cause


def main(arguments: list[str]) -> int:
    """The exit status of the command."""
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n")
        return 0
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        sys.stderr.write(f"{USAGE}\n")
        return 2
    target, service = arguments[0], arguments[1] if len(arguments) == 2 else ""
    problem = problem_of(target, service)
    if problem:
        sys.stderr.write(f"probe: {f'{target} {service}'.strip()}: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    silence_grpc_core()
    sys.exit(main(sys.argv[1:]))
