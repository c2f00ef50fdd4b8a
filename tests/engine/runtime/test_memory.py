"""How much memory there is: the host's, and within that of an accelerator, which mlx is asked for."""

import pytest

from engine.contracts.errors import ConfigurationError
from engine.runtime import activation
from engine.runtime.host import Host
from engine.runtime.memory import memory_before_loading, memory_in_use
from tests.engine.machines import machine


@pytest.mark.parametrize(
    ("limit_bytes", "active_bytes", "available_bytes"),
    [(None, 900, 1000), (600, 200, 400), (600, 700, 0), (5000, 200, 1000)],
)
def test_memory_is_that_of_the_host_within_what_the_device_has_left(limit_bytes, active_bytes, available_bytes):
    there = machine(1000, device="metal", limit_bytes=limit_bytes, active_bytes=active_bytes)
    assert there.available_bytes() == available_bytes


def test_what_fits_leaves_a_fifth():
    assert machine(1000).fits(800)
    assert not machine(1000).fits(801)
    assert not machine(10**9, device="cuda", limit_bytes=1000).fits(801)


@pytest.mark.parametrize(
    ("facts", "limit_bytes"),
    [
        ({"max_recommended_working_set_size": 11 * 2**30, "memory_size": 16 * 2**30}, 11 * 2**30),
        ({"total_memory": 80 * 2**30, "device_name": "one"}, 80 * 2**30),
        ({"device_name": "silent"}, None),
    ],
)
@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize("ask", [memory_before_loading, memory_in_use])
def test_an_accelerator_is_asked_for_its_own_before_a_load_as_after_it(monkeypatch, ask, device, facts, limit_bytes):
    monkeypatch.setattr(activation.mx, "is_available", lambda _: True)
    monkeypatch.setattr(activation.mx, "device_info", lambda _: facts)
    found = ask(device, Host())
    assert (found.device, found.limit_bytes) == (device, limit_bytes)
    assert found.active_bytes() == activation.active_memory_bytes()


def test_an_accelerator_that_mlx_does_not_find_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(activation.mx, "is_available", lambda _: False)
    with pytest.raises(ConfigurationError, match=r"^device: the installed mlx finds no usable cuda device"):
        memory_before_loading("cuda", Host())


def test_a_cpu_has_the_memory_of_its_machine_and_what_mlx_holds_is_told_once_it_is_there():
    assert memory_before_loading("cpu", Host()).limit_bytes is None
    held = activation.mx.zeros((1000,))
    activation.mx.eval(held)
    assert memory_in_use("cpu", Host()).active_bytes() >= held.nbytes
