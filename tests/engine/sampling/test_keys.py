"""Step keys against the reference's worked values."""

from engine.sampling.keys import step_key, step_seed


def test_step_seeds_equal_the_references_worked_values():
    assert step_seed(0, 0) == 0x9E3779B97F4A7C15
    assert step_seed(42, 7) == 0xF1BBCDCBFA53E082


def test_high_bits_of_a_seed_count():
    assert step_seed(1, 0) != step_seed(1 + 2**40, 0)
    assert step_seed(2**63, 3) != step_seed(0, 3)


def test_a_key_holds_all_64_bits_of_the_step_seed():
    high, low = step_key(2**64 - 1, 5).tolist()
    assert (high << 32) | low == step_seed(2**64 - 1, 5)
