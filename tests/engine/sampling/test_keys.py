"""Step keys against the reference's worked values."""

import mlx.core as mx
import pytest

from engine.sampling.keys import KeySequence, step_key, step_seed


def test_step_seeds_equal_the_references_worked_values():
    assert step_seed(0, 0) == 0x9E3779B97F4A7C15
    assert step_seed(42, 7) == 0xF1BBCDCBFA53E082


def test_high_bits_of_a_seed_count():
    assert step_seed(1, 0) != step_seed(1 + 2**40, 0)
    assert step_seed(2**63, 3) != step_seed(0, 3)


def test_a_key_holds_all_64_bits_of_the_step_seed():
    high, low = step_key(2**64 - 1, 5).tolist()
    assert (high << 32) | low == step_seed(2**64 - 1, 5)


@pytest.mark.parametrize("seed", [0, 1, 3, 2**31 - 1, 2**40 + 5, 2**64 - 1])
def test_a_key_sequence_draws_what_the_seeded_library_draws(seed):
    keys, shapes = KeySequence(seed), [(1, 16), (1, 16), (1, 5), (1, 64)]
    drawn = [mx.random.randint(0, 4096, shape, dtype=mx.int32, key=keys.next_key()).tolist() for shape in shapes]
    mx.random.seed(seed)
    assert drawn == [mx.random.randint(0, 4096, shape).tolist() for shape in shapes]


def test_a_copied_key_sequence_goes_on_by_itself():
    keys = KeySequence(5)
    keys.next_key()
    twin = keys.copy()
    first = keys.next_key().tolist()
    assert keys.next_key().tolist() != first
    assert twin.next_key().tolist() == first


def test_key_sequences_leave_the_library_s_own_generator_alone():
    mx.random.seed(9)
    undisturbed = mx.random.randint(0, 4096, (8,)).tolist()
    mx.random.seed(9)
    KeySequence(1).next_key()
    assert mx.random.randint(0, 4096, (8,)).tolist() == undisturbed
