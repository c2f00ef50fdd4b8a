"""The configuration of a vision tower: defaults, what is stated, and what is refused by name."""

import pytest

from engine.artifacts.huggingface import model_config, sees_images
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from tests.engine.models.tiny_diffusion import TEXT
from tests.engine.models.tiny_vision import IDS, SIZES

BARE = {"model_type": "diffusion_gemma"}


def read(vision=None, text=None, **top):
    stated = SIZES | (vision or {})
    return model_config(BARE | {"vision_config": stated, "text_config": TEXT | (text or {})} | IDS | top, sees=True)


def test_an_empty_description_has_the_sizes_of_gemma_4_s_tower():
    vision = model_config(BARE | {"vision_config": {}}, sees=True).vision
    sizes = vision.geometry
    assert (sizes.hidden_size, sizes.intermediate_size, sizes.layers, sizes.head_dim) == (768, 3072, 16, 64)
    assert (sizes.heads, sizes.kv_heads) == (12, 12)
    assert (sizes.patch_pixels, sizes.pooling, sizes.most_tokens, sizes.token_pixels) == (16, 3, 280, 48)
    assert sizes.patches(280) == 2520
    assert (vision.positions, vision.theta, vision.norm_eps) == (10240, 100.0, 1e-6)
    assert (vision.standardizes, vision.clips, vision.both_ways) == (False, False, True)
    assert (vision.ids.begin, vision.ids.image, vision.ids.end) == (255999, 258880, 258882)


def test_what_is_stated_wins():
    stated = {"standardize": True, "use_clipped_linears": True, "rms_norm_eps": 1e-5}
    vision = read(stated | {"rope_parameters": {"rope_theta": 10, "rope_type": "default"}}).vision
    assert (vision.standardizes, vision.clips, vision.norm_eps, vision.theta) == (True, True, 1e-5, 10.0)
    assert (vision.ids.begin, vision.ids.image, vision.ids.end) == (60, 61, 62)
    assert vision.geometry.most_tokens == 6


@pytest.mark.parametrize(("stated", "both_ways"), [("vision", True), (None, False), (False, False)])
def test_the_text_model_says_whether_the_tokens_of_an_image_see_each_other(stated, both_ways):
    assert read(text={"use_bidirectional_attention": stated}).vision.both_ways is both_ways


TOWER = "model.encoder.vision_tower.std_bias"


@pytest.mark.parametrize(
    ("document", "stored", "sees"),
    [
        (BARE | {"vision_config": {}}, [TOWER], True),
        (BARE, [TOWER], False),
        (BARE | {"vision_config": {}}, ["model.decoder.norm.weight"], False),
        (BARE | {"vision_config": None}, [TOWER], False),
        ({"model_type": "gemma4_text", "vision_config": {}}, ["vision_tower.std_bias", TOWER], False),
    ],
    ids=["both", "stored alone", "described alone", "null", "another family"],
)
def test_a_tower_counts_where_it_is_described_and_stored(document, stored, sees):
    assert sees_images(document, stored) is sees


def test_a_model_that_sees_nothing_has_no_tower():
    assert model_config(BARE | {"vision_config": SIZES}).vision is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, r"vision_config\.hidden_activation 'silu' is not supported"),
        ({"attention_bias": True}, r"vision_config\.attention_bias is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"vision_config\.rope_parameters\.rope_type 'yarn' is not"),
    ],
    ids=str,
)
def test_what_the_tower_would_compute_otherwise_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedArtifactError, match=message):
        read(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 0}, r"vision_config\.patch_size must be a whole number from 1"),
        ({"patch_size": "16"}, r"vision_config\.patch_size must be a whole number"),
        ({"head_dim": 6}, r"vision_config\.head_dim must be a multiple of 4"),
        ({"num_key_value_heads": 3}, r"vision_config\.num_key_value_heads must divide num_attention_heads, 2"),
        ({"position_embedding_size": 11}, r"vision_config\.position_embedding_size must be at least 12"),
        ({"standardize": "yes"}, r"vision_config\.standardize must be true or false"),
        ({"rms_norm_eps": 0}, r"vision_config\.rms_norm_eps must be above 0"),
        ({"rope_parameters": {"rope_theta": -1}}, r"vision_config\.rope_parameters\.rope_theta must be above 0"),
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(changes, message):
    with pytest.raises(CorruptArtifactError, match=message):
        read(changes)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(("ids", "told"), [(64, "below 64"), ([1, 2], "one token id, got 2")])
def test_ids_that_cannot_stand_for_an_image_are_refused_by_name(name, ids, told):
    with pytest.raises(CorruptArtifactError, match=f"{name} must be .*{told}"):
        read(**{name: ids})
