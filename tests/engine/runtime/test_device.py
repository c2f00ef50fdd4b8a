"""The device that is chosen from the wish and from what is installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from engine.contracts.errors import ConfigurationError
from engine.runtime.device import blas_matters, choose_device, offered_devices

EVERYTHING = frozenset({"cpu", "metal", "cuda"})


@pytest.mark.parametrize(
    ("offered", "driver", "device"),
    [
        ({"cpu"}, True, "cpu"),
        ({"cpu", "metal"}, False, "metal"),
        ({"cpu", "cuda"}, True, "cuda"),
        ({"cpu", "cuda"}, False, "cpu"),
    ],
)
def test_the_best_offered_device_is_chosen(offered: set[str], driver: bool, device: str) -> None:
    assert choose_device(None, offered=offered, driver_present=lambda: driver) == device


@pytest.mark.parametrize("wish", sorted(EVERYTHING))
def test_a_wish_is_honoured_where_it_is_offered(wish: str) -> None:
    assert choose_device(wish, offered=EVERYTHING, driver_present=lambda: False) == wish


def test_a_wish_that_is_not_offered_names_what_to_install() -> None:
    with pytest.raises(
        ConfigurationError, match=r"device: the installed mlx offers cpu; in the checkout, `make setup DEVICE=cuda`"
    ):
        choose_device("cuda", offered={"cpu"})


@pytest.mark.parametrize(
    ("installed", "devices"),
    [
        ("mlx-cpu", {"cpu"}),
        ("mlx-metal", {"cpu", "metal"}),
        ("mlx-cuda-12", {"cpu", "cuda"}),
        ("mlx-cuda-13", {"cpu", "cuda"}),
    ],
)
def test_what_is_offered_follows_from_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch, installed: str, devices: set[str]
) -> None:
    def distribution(name: str) -> object:
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    assert offered_devices() == devices


def test_a_missing_mlx_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="mlx is not installed"):
        offered_devices()


@pytest.mark.parametrize(
    ("device", "platform", "matters"),
    [("cpu", "linux", True), ("cpu", "darwin", False), ("cuda", "linux", False), ("metal", "darwin", False)],
)
def test_a_blas_is_chosen_on_linux_cpus_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, platform: str, matters: bool
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert blas_matters(device) is matters  # type: ignore[arg-type]
