"""One form of JSON for equal values, whatever made them; RFC 8785's own examples among others."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.generation.canonical_json import canonical_json

# From RFC 8785, appendix B, and ECMA-262.
NUMBERS = {
    0.0: "0",
    5e-324: "5e-324",
    -5e-324: "-5e-324",
    1.7976931348623157e308: "1.7976931348623157e+308",
    9007199254740992.0: "9007199254740992",
    295147905179352830000.0: "295147905179352830000",
    1e21: "1e+21",
    1e23: "1e+23",
    9.999999999999997e22: "9.999999999999997e+22",
    1e20: "100000000000000000000",
    1e-6: "0.000001",
    1e-7: "1e-7",
    1.2345e-7: "1.2345e-7",
    0.000001234: "0.000001234",
    333333333.3333333: "333333333.3333333",
    -0.0000033333333333333333: "-0.0000033333333333333333",
    0.1: "0.1",
    0.7: "0.7",
    1.0: "1",
    123456789.125: "123456789.125",
}


@pytest.mark.parametrize(("number", "text"), NUMBERS.items(), ids=list(NUMBERS.values()))
def test_numbers_are_written_as_ecmascript_writes_them(number, text):
    assert canonical_json(number) == text.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_reads_back(number):
    assert float(canonical_json(number)) == number


def test_integers_keep_all_their_digits():
    assert canonical_json(2**64 - 1) == b"18446744073709551615"
    assert canonical_json(-0.0) == b"0"
    assert canonical_json([1, 1.0, True, None]) == b"[1,1,true,null]"


def test_keys_are_sorted_by_utf16_and_arrays_are_not():
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\u00f6": 7, "b": [3, 1, 2]}
    written = canonical_json(value).decode()
    in_order = ("\\r", "1", "b", "\x80", "\u00f6", "\u20ac", "\U0001f600", "\ufb33")
    places = [written.index(f'"{key}"') for key in in_order]
    assert places == sorted(places)
    assert '"b":[3,1,2]' in written


def test_texts_escape_what_they_must_and_nothing_else():
    assert canonical_json('\u20ac$\x0f\nA\'B"\\\\"/\x7f') == '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\x7f"'.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan], {"a": {"b": math.inf}}])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="no number"):
        canonical_json(value)


@pytest.mark.parametrize("value", ["\ud800", {"\udc00": 1}, {1: 2}, {1, 2}, object()])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError, match=r"surrogates|text|canonical"):
        canonical_json(value)


def test_the_form_does_not_depend_on_the_process(tmp_path):
    """Not on hash seeds, nor on the order in which a mapping was made."""
    program = (
        "from engine.generation.canonical_json import canonical_json\n"
        "import sys\n"
        "names = list(set('abcdefgh'))\n"
        "sys.stdout.buffer.write(canonical_json({name: {n: 1.5 for n in names} for name in names}))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(set(runs)) == 1
    assert runs[0].startswith(b'{"a":{"a":1.5,')
