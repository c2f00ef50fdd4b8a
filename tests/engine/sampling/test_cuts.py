"""Cuts promise no more than is true: what is above `certain` stays, what is below `possible` goes."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.cuts import HEAD_TOKENS, find_cuts
from engine.sampling.mass import odds_of, total
from engine.sampling.recipe import SHALLOW_TOKENS, Recipe
from tests.engine.sampling import naive
from tests.engine.sampling.resolved import options

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "top_p": st.floats(0.001, 0.9999),
        "min_p": st.floats(1e-5, 1.0),
        "min_tokens_to_keep": st.integers(1, 3 * HEAD_TOKENS),
    },
)
SIZES = st.sampled_from([17, 500, HEAD_TOKENS, HEAD_TOKENS + 3, 3 * HEAD_TOKENS])


@given(
    st.integers(0, 10**6),
    SIZES,
    st.lists(CHANGES, min_size=1, max_size=3),
    st.one_of(st.integers(1, SHALLOW_TOKENS), st.sampled_from([0, SHALLOW_TOKENS + 1, HEAD_TOKENS, 2**32 - 1])),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_certain_tokens_stay_and_impossible_ones_go(seed, size, changes, top_k, deviation, coarse):
    """Coarse scores are full of ties."""
    rows = np.random.default_rng(seed).normal(size=(len(changes), size)).astype(np.float32) * np.float32(deviation)
    rows = np.round(rows * 8) / 8 if coarse else rows
    scores = mx.array(rows - rows.max(axis=-1, keepdims=True))
    recipes = [Recipe(options(temperature=1.0, top_k=top_k, **change)) for change in changes]
    cuts = find_cuts(scores, recipes, total(odds_of(scores, composed=True)))
    for row, recipe, possible, certain in zip(
        np.array(scores), recipes, cuts.possible.tolist(), cuts.certain.tolist(), strict=True
    ):
        kept = set(naive.kept(row, recipe.options))
        assert set(np.flatnonzero(row > certain).tolist()) <= kept
        assert kept <= set(np.flatnonzero(row >= possible).tolist())
        assert len(kept) > 0
