"""The stepper beside its steps: accounts of experts' use are finished, and a fault there harms nobody."""

from types import SimpleNamespace

from engine.execution.stepper import MethodStepper


class Experts:
    planned_bytes = 0

    def __init__(self, fault=None):
        self.finished = 0
        self.fault = fault

    def finish_usage(self):
        self.finished += 1
        if self.fault is not None:
            raise self.fault


class Wired:
    def __enter__(self):
        return self


def stepper(experts):
    method = SimpleNamespace(graph=SimpleNamespace(experts=experts))
    return MethodStepper(method, Wired(), limits=None, prefixes=None, checkpoints=None)


def test_accounts_are_finished_each_time_a_generation_has_ended():
    experts = Experts()
    driven = stepper(experts)
    driven.ended()
    driven.ended()
    assert experts.finished == 2


def test_accounts_that_cannot_be_written_are_logged_and_harm_nobody(caplog):
    experts = Experts(OSError("the disk is full"))
    stepper(experts).ended()
    assert experts.finished == 1
    assert "the accounts of experts' use could not be written" in caplog.text
    assert "the disk is full" in caplog.text


def test_a_graph_without_accounts_has_nothing_to_finish(caplog):
    stepper(None).ended()
    assert not caplog.records
