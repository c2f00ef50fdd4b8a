"""Choices that no machine offers are refused when they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.contracts.errors import ConfigurationError
from engine.runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("choice", "value", "message"),
    [
        ("device", "gpu", "device: must be one of cpu, metal, cuda, got 'gpu'"),
        ("compute_dtype", "float64", "compute_dtype: must be one of float32, bfloat16, float16, got 'float64'"),
        ("blas_threads", 0, "blas_threads: must be at least 1, got 0"),
    ],
)
def test_impossible_choices_are_named(choice: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RuntimeSettings(cache_directory=Path("cache"), **{choice: value})
    assert str(caught.value) == message


def test_everything_but_the_folder_may_be_left_to_the_engine() -> None:
    settings = RuntimeSettings(cache_directory=Path("cache"))
    assert (settings.device, settings.compute_dtype, settings.blas) == (None, None, None)
