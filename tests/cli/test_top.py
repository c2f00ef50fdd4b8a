"""`mlx-stream top`: what an operator sees of a server, and what is said when there is nothing to see."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from rich.console import Console

from mlxstream.v1 import admin_pb2, admin_pb2_grpc
from service.cli.top_screen import FIXED_LINES, History, Snapshot, bar, screen, sparkline, state_of
from tests.cli.conftest import Run

LOAD = admin_pb2.GetLoadResponse(
    model="tiny", running=2, queued=1, max_rows=8, queue_limit=64, kv_bytes=500_000_000, kv_limit_bytes=1_000_000_000,
    prefix_cache_bytes=1_500, prefix_cache_limit_bytes=250_000_000, decode_tps=123.45, prefill_tps=6_789.0,
    generated_tokens=12_345, prefilled_tokens=678,
)  # fmt: skip


def generation(index: int, **fields: Any) -> admin_pb2.GenerationInfo:
    values = {"phase": admin_pb2.GENERATION_PHASE_DECODING, "prompt_tokens": 900, "generated_tokens": 40}
    one = admin_pb2.GenerationInfo(generation_id=f"{index:032x}", model="tiny", **(values | fields))
    one.create_time.FromSeconds(1000)
    return one


def shown(snapshot: Snapshot, before: Snapshot | None = None, *, height: int = 40, width: int = 100) -> str:
    history = History()
    for rate in (1.0, 2.0, 4.0):
        history.add(admin_pb2.GetLoadResponse(decode_tps=rate))
    output = io.StringIO()
    console = Console(file=output, width=width, height=height)
    console.print(screen(snapshot, before, history, target="127.0.0.1:50051", height=height))
    return output.getvalue()


def test_a_busy_server_is_shown_with_its_gauges_rates_and_generations() -> None:
    before = Snapshot(at=10.0, now=1008.0, load=LOAD, generations=[generation(1, generated_tokens=20)])
    generations = [
        generation(1, request_id="mine"),
        generation(2, phase=admin_pb2.GENERATION_PHASE_PREFILLING, prefilled_tokens=300, generated_tokens=0),
        generation(3, phase=admin_pb2.GENERATION_PHASE_QUEUED, generated_tokens=0),
    ]
    text = shown(Snapshot(at=12.0, now=1010.0, load=LOAD, generations=generations), before)
    for part in (
        "tiny", "working", "127.0.0.1:50051", "2 of 8", "1 of 64", "500.0 MB of 1.0 GB", "50%", "123.5 tokens/s",
        "12,345 in all", "mine", "writing", "reading", "300/900", "queued", "10.0", "10 s",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"draining": True}, "draining"),
        ({"model": ""}, "waiting for a model"),
        ({"step_age": {"seconds": 42}}, "the step in hand takes 42 s"),
        ({"running": 0, "queued": 0}, "idle"),
    ],
)
def test_the_state_is_told_in_words(fields: dict[str, Any], words: str) -> None:
    load = admin_pb2.GetLoadResponse()
    load.CopyFrom(LOAD)
    for name, value in fields.items():
        if isinstance(value, dict):
            load.step_age.seconds = value["seconds"]
        else:
            setattr(load, name, value)
    assert state_of(load)[0] == words


def test_more_generations_than_lines_are_counted_and_the_picture_fits() -> None:
    generations = [generation(index) for index in range(100)]
    text = shown(Snapshot(at=1.0, now=1001.0, load=LOAD, generations=generations), height=30)
    assert f"and {100 - (30 - FIXED_LINES)} more" in text
    assert len(text.splitlines()) <= 30


@pytest.mark.parametrize(
    ("width", "left_out"), [(90, []), (80, ["request"]), (60, ["request"]), (45, ["request", "prompt"])]
)
def test_a_narrow_screen_leaves_out_columns_and_cuts_none(width: int, left_out: list[str]) -> None:
    one = generation(1, request_id="r" * 30, generated_tokens=12_345)
    text = shown(Snapshot(at=1.0, now=1042.0, load=LOAD, generations=[one]), width=width)
    assert "\u2026" not in text
    (head,) = [line.split() for line in text.splitlines() if line.startswith("generation")]
    names = ["generation", "request", "does", "prompt", "written", "tokens/s", "age"]
    assert head == [name for name in names if name not in left_out]
    for part in ("12,345", "42 s", "500.0 MB of 1.0 GB", "12,345 in all"):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    snapshot = Snapshot(at=1.0, now=1001.0, load=LOAD, generations=[generation(1, request_id="r" * 128)])
    assert max(len(line.rstrip()) for line in shown(snapshot, width=width).splitlines()) <= width


def test_what_a_caller_has_named_cannot_drive_the_screen() -> None:
    load = admin_pb2.GetLoadResponse(model="\x1b]0;title\x07")
    text = shown(Snapshot(at=1.0, now=1.0, load=load, generations=[generation(1, request_id="\x1b[2J")]))
    assert "\x1b" not in text


def test_a_share_shows_however_small_and_fills_the_bar_when_it_is_all() -> None:
    assert bar(0.0).plain.count("━") == 0
    assert bar(0.001).plain.count("━") == 1
    assert bar(1.0).plain.count("─") == 0
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([1.0, 4.0, 8.0]) == "▂▅█"


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.metadata: list[tuple[str, str]] = []

    def GetLoad(self, request: Any, context: Any) -> admin_pb2.GetLoadResponse:  # noqa: N802
        self.metadata += [(key, value) for key, value in context.invocation_metadata()]
        return LOAD

    def ListGenerations(self, request: Any, context: Any) -> admin_pb2.ListGenerationsResponse:  # noqa: N802
        return admin_pb2.ListGenerationsResponse(generations=[generation(1, request_id="mine")])


@pytest.fixture
def admin() -> Iterator[tuple[str, _Admin]]:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), _Admin()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None)


def test_one_look_is_printed_where_nobody_looks_on(run: Run, admin: tuple[str, _Admin], tmp_path: Any) -> None:
    target, servicer = admin
    (tmp_path / "token").write_text("s3cret\n")
    result = run("top", "--target", target, "--token-file", str(tmp_path / "token"))
    assert result.exit_code == 0
    assert "mine" in result.output
    assert ("authorization", "Bearer s3cret") in servicer.metadata


def test_a_server_without_the_service_is_explained(run: Run) -> None:
    result = run("top")
    assert result.exit_code == 1
    assert "does not offer AdminService" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_no_server_is_one_line_and_a_status_of_its_own(run: Run) -> None:
    result = run("top", "--target", "127.0.0.1:1")
    assert result.exit_code == 69
    assert "127.0.0.1:1" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_target_that_is_none_is_wrong_usage(run: Run) -> None:
    assert run("top", "--target", "nowhere").exit_code == 2
