"""The names of schemes, and the bytes of a token, as the reference states them."""

import pytest

from engine.contracts.composition import COMPOSITION_DEFAULTS, Composition, PagedKvComposition
from engine.contracts.kv_scheme import (
    AffineKv,
    AffineLayer,
    AffineLayersKv,
    PlainKv,
    TurboKv,
    layer_scheme,
    parse_kv_wish,
)


@pytest.mark.parametrize(
    ("text", "scheme", "key"),
    [
        ("plain", PlainKv(), "bf16"),
        ("affine4", AffineKv(bits=4), "kv4"),
        ("affine8-g32", AffineKv(bits=8, group_size=32), "kv8-g32"),
        ("affine4-g64-start512", AffineKv(bits=4, start=512), "kv4-start512"),
        ("turbo-k4v3", TurboKv(key_bits=4, value_bits=3), "turbo-k4v3"),
        ("turbo-k8v2-start7", TurboKv(key_bits=8, value_bits=2, start=7), "turbo-k8v2-start7"),
        ("config-start9", AffineLayersKv(layers=(), start=9), "config-start9"),
    ],
)
def test_a_spelling_becomes_a_scheme_with_the_reference_s_store_key(text, scheme, key):
    wish = parse_kv_wish(text)
    assert (wish.scheme, wish.scheme.store_key, wish.paged) == (scheme, key, False)
    assert wish.from_config == text.startswith("config")


def test_paged_storage_is_plain_and_has_a_key_of_its_own():
    wish = parse_kv_wish("paged")
    assert (wish.scheme, wish.paged) == (PlainKv(), True)
    paged = Composition(paged_kv=PagedKvComposition(block_tokens=256))
    assert (paged.kv_store_key, COMPOSITION_DEFAULTS.kv_store_key) == ("bf16-b256", "bf16")


OTHERS = """affine affine5 affine4-g16 affine4-start-1 plain-start5 turbo turbo-k3v4 turbo-k4v6 turbo-k4 PLAIN
paged-start1 affine4-start1.5 affine4-start99999999 affine4-start5-g64 affine8-start٣"""


@pytest.mark.parametrize("text", ["", "affine4 ", *OTHERS.split()])
def test_anything_else_is_refused_with_what_can_be_written(text):
    with pytest.raises(ValueError, match="turbo-k"):
        parse_kv_wish(text)


def test_a_token_takes_the_bytes_of_the_reference():
    values = 3 * 128
    assert PlainKv().token_bytes(values, 2) == 2 * values * 2
    for bits in (4, 8):
        for group in (32, 64, 128):
            element = bits / 8 + 4 / group
            assert AffineKv(bits=bits, group_size=group).token_bytes(values, 2) == 2 * values * element
    assert TurboKv(key_bits=4, value_bits=3).token_bytes(128, 2) == 128 * 4 / 8 + 128 / 8 + 128 * 3 / 8 + 128 / 16


def test_layers_that_are_not_listed_stay_plain_and_so_do_sliding_ones_under_turbo():
    listed = AffineLayersKv(layers=(AffineLayer(layer=1, bits=8, group_size=32),), start=3)
    assert layer_scheme(listed, 0, sliding=False) == PlainKv()
    assert layer_scheme(listed, 1, sliding=True) == AffineKv(bits=8, group_size=32, start=3)
    turbo = TurboKv(key_bits=4, value_bits=4)
    assert layer_scheme(turbo, 0, sliding=False) == turbo
    assert layer_scheme(turbo, 0, sliding=True) == PlainKv()
