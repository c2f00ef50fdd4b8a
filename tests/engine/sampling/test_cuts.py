"""Cuts promise no more than is true: what is above `certain` stays, what is below `possible` goes."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.cuts import HEAD_TOKENS, find_cuts, find_cuts_with_exclusion
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


@given(
    st.integers(0, 10**6),
    SIZES,
    st.lists(CHANGES, min_size=1, max_size=3),
    st.lists(st.one_of(st.integers(0, 6), st.sampled_from([SHALLOW_TOKENS + 1, HEAD_TOKENS])), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.001, 0.02, 0.1]),
    st.integers(0, 12),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_same_holds_beside_xtc_whatever_it_protects(seed, size, changes, top_ks, threshold, protected, coarse):
    """Protected tokens are among the best ones."""
    rows = np.random.default_rng(seed).normal(size=(len(changes), size)).astype(np.float32) * np.float32(4.0)
    rows = np.round(rows * 2) / 2 if coarse else rows
    scores = rows - rows.max(axis=-1, keepdims=True)
    best = np.argsort(-scores, axis=-1)[:, :16]
    guarded = [row[np.random.default_rng(seed).permutation(min(16, size))[:protected]].tolist() for row in best]
    recipes = [
        Recipe(
            options(
                temperature=1.0,
                xtc_probability=1.0,
                xtc_threshold=threshold,
                xtc_special_tokens=tuple(ids),
                top_k=top_k,
                **change,
            )
        )
        for change, top_k, ids in zip(changes, top_ks, guarded, strict=False)
    ]
    exposed = np.ones(scores.shape, dtype=np.bool_)
    for row, ids in enumerate(guarded):
        exposed[row, ids] = False
    cuts, left = find_cuts_with_exclusion(
        mx.array(scores),
        recipes,
        total(odds_of(mx.array(scores), composed=True)),
        chances=mx.zeros(len(recipes)),
        exposed=mx.array(exposed),
    )
    for row, recipe, possible, certain in zip(
        range(len(recipes)), recipes, cuts.possible.tolist(), cuts.certain.tolist(), strict=True
    ):
        kept = set(naive.kept(scores[row], recipe.options, 0.0))
        remaining = np.array(left[row])
        assert set(np.flatnonzero(remaining > certain).tolist()) <= kept
        if certain < np.inf:
            assert kept <= set(np.flatnonzero((remaining >= possible) & (remaining > -np.inf)).tolist())
