"""Copies hold what they show, and nothing besides."""

import gc

import mlx.core as mx
import pytest

from engine.ops.copying import true_copy


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32, mx.uint8])
@pytest.mark.parametrize("shown", [(slice(None), slice(0, 3)), (slice(0, 1), slice(2, 9)), (slice(None), slice(None))])
def test_a_copy_keeps_nothing_else_alive(shown, dtype):
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    whole = (mx.random.normal((1, 64, 8), key=mx.random.key(1)) * 9).astype(dtype)
    mx.eval(whole)
    copy = true_copy(whole[shown])
    mx.eval(copy)
    assert mx.array_equal(copy, whole[shown]).item()
    del whole
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < copy.nbytes + 256


def test_a_single_number_is_copied_too():
    assert true_copy(mx.array(5)).item() == 5
