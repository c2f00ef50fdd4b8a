"""How a configuration states quantization: overrides, exemptions, and widths that no kernel reads."""

import pytest

from engine.artifacts.config import QuantizationScheme
from engine.artifacts.huggingface import model_config
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from tests.engine.artifacts.tiny_files import CONFIG


def parsed(**changes):
    return model_config(CONFIG | changes)


@pytest.mark.parametrize("place", ["quantization", "quantization_config"])
def test_overrides_mean_what_mlx_takes_them_for(place):
    stated = {
        "bits": 4,
        "group_size": 64,
        "a.q_proj": {"bits": 6},
        "a.k_proj": {"group_size": 32},
        "a.v_proj": False,
        "a.o_proj": True,
        "a.up": {"mode": "mxfp4"},
        "a.down": {"mode": "nvfp4"},
        "a.gate": {},
    }
    quantization = parsed(**{place: stated}).quantization
    default = QuantizationScheme(bits=4, group_size=64)
    assert quantization.scheme("anything") == default
    assert quantization.scheme("a.q_proj") == QuantizationScheme(bits=6, group_size=64)
    assert quantization.scheme("a.k_proj") == QuantizationScheme(bits=4, group_size=32)
    assert quantization.scheme("a.v_proj") is None
    assert quantization.scheme("a.o_proj") == default
    assert quantization.scheme("a.up") == QuantizationScheme(bits=4, group_size=32, mode="mxfp4")
    assert quantization.scheme("a.down") == QuantizationScheme(bits=4, group_size=16, mode="nvfp4")
    assert quantization.scheme("a.gate") is None


@pytest.mark.parametrize(("mode", "widths"), [("mxfp4", (4, 32)), ("nvfp4", (4, 16)), ("mxfp8", (8, 32))])
def test_an_override_without_a_mode_is_affine_whatever_the_default_is(mode, widths):
    bits, group_size = widths
    stated = {"bits": bits, "group_size": group_size, "mode": mode}
    overrides = {"a.router": {"bits": 8, "group_size": 64}, "a.o_proj": {"bits": 8}, "a.q_proj": {"group_size": 32}}
    quantization = parsed(quantization=stated | overrides).quantization
    assert quantization.default == QuantizationScheme(bits=bits, group_size=group_size, mode=mode)
    assert quantization.scheme("a.router") == QuantizationScheme(bits=8, group_size=64)
    assert quantization.scheme("a.o_proj") == QuantizationScheme(bits=8, group_size=64)
    assert quantization.scheme("a.q_proj") == QuantizationScheme(bits=4, group_size=32)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"bits": 7, "group_size": 64}, "quantization of the default: bits 7 is none of 2, 3, 4, 5, 6, 8"),
        ({"bits": 5, "group_size": 48}, "quantization of the default: group_size 48 is none of 32, 64, 128"),
        ({"bits": 4, "group_size": 64, "a.b": {"bits": 9}}, "quantization of a.b: bits 9"),
        ({"bits": 4, "group_size": 64, "a.b": {"bits": "6"}}, "bits must be a whole number"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "bits 8 is none of 4"),
    ],
)
def test_impossible_widths_are_refused_with_the_layer(stated, message):
    with pytest.raises(CorruptArtifactError, match=message):
        parsed(quantization=stated)


@pytest.mark.parametrize("missing", ["bits", "group_size"])
def test_a_width_that_nothing_states_is_missed_by_name(missing):
    stated = {"bits": 4, "group_size": 64}
    del stated[missing]
    with pytest.raises(MissingArtifactError, match=f"quantization of the default has no {missing}"):
        parsed(quantization=stated)


@pytest.mark.parametrize(
    ("stated", "message"),
    [({"quant_method": "gptq", "bits": 4}, "method 'gptq'"), ({"bits": 4, "group_size": 32, "mode": "x"}, "mode 'x'")],
)
def test_other_ways_to_quantize_are_refused_by_name(stated, message):
    with pytest.raises(UnsupportedArtifactError, match=message):
        parsed(quantization=stated)
