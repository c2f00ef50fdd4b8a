"""What makes a run of the conformance cases fail: clients that do not build, not machines that lack their tools."""

from __future__ import annotations

import pytest

from clients.conformance.runner.__main__ import _report
from clients.conformance.runner.table import Verdict

PASSED = {"python": {"text": Verdict("passed")}}


@pytest.mark.parametrize(
    ("broken", "skipped", "strict", "status"),
    [
        ([], [], False, 0),
        ([], ["go: needs go"], False, 0),
        ([], ["go: needs go"], True, 1),
        (["go: does not build"], [], False, 1),
    ],
)
def test_a_client_that_does_not_build_fails_and_tools_that_are_not_here_do_not(
    broken: list[str], skipped: list[str], strict: bool, status: int
) -> None:
    assert _report(PASSED, [], broken=broken, skipped=skipped, strict=strict) == status


def test_a_run_that_plays_nothing_fails() -> None:
    assert _report({}, [], broken=[], skipped=["go: needs go"], strict=False) == 1
