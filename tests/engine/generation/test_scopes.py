"""Scopes restore what they changed on every way out."""

import pytest

from engine.generation.scopes import WiredScope, needs_wired_limit


@pytest.mark.parametrize(
    ("weights", "experts", "working_set", "forced", "wired"),
    [(51, 0, 100, False, True), (50, 0, 100, False, False), (1, 60, 100, False, True), (1, 0, 100, True, True)],
)
def test_a_model_is_wired_past_half_of_the_working_set_or_when_forced(weights, experts, working_set, forced, wired):
    found = needs_wired_limit(
        weights_bytes=weights, planned_expert_bytes=experts, working_set_bytes=working_set, forced=forced
    )
    assert found is wired


def test_without_a_known_working_set_nothing_is_wired():
    assert not needs_wired_limit(weights_bytes=10**12, planned_expert_bytes=0, working_set_bytes=0, forced=True)


def test_the_wired_limit_is_set_once_by_the_outermost_and_restored_after_waiting():
    calls = []

    def set_limit(limit):
        calls.append(limit)
        return 7

    scope = WiredScope(limit_bytes=100, set_limit=set_limit, synchronize=lambda: calls.append("wait"))
    with pytest.raises(RuntimeError), scope:
        with scope:
            pass
        assert calls == [100]
        raise RuntimeError("a fault")
    assert calls == [100, "wait", 7]
    with scope:
        pass
    assert calls == [100, "wait", 7] * 2
