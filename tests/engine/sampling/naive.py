"""The sampler's rules in numpy, one row and one token at a time, in float64; only the noise is the library's."""

import math

import mlx.core as mx
import numpy as np

from engine.sampling.keys import step_key


def kept(row, options, chance=None):
    """Ids that the filters keep of a row of logits [V], best first; `chance` is the number drawn for XTC."""
    row = np.asarray(row, dtype=np.float32)
    scores = row - row.max()
    odds = np.exp(scores.astype(np.float64))
    best_first = np.lexsort((np.arange(row.size), -scores)).tolist()
    left = [token for token in best_first if odds[token] > 0]
    if 0 < options.top_p < 1:
        ascending = np.lexsort((np.arange(row.size), scores))
        mass = np.cumsum(odds[ascending]) / math.fsum(odds)
        stay = {*ascending[mass > 1 - options.top_p].tolist(), int(ascending[-1])}
        left = [token for token in left if token in stay]
    if options.min_p > 0:
        least = np.float32(math.log(options.min_p))
        left = [token for rank, token in enumerate(left) if scores[token] >= least or rank < options.min_tokens_to_keep]
    if options.xtc_probability > 0 and chance <= options.xtc_probability:
        total = math.fsum(odds[token] for token in left)
        tops = [token for token in left if odds[token] / total > options.xtc_threshold]
        if len(tops) > 1:
            least = min(odds[token] for token in tops)
            gone = {token for token in left if odds[token] > least} - set(options.xtc_special_tokens)
            left = [token for token in left if token not in gone]
    return left[: options.top_k] if options.top_k else left


def token(row, options, step):
    """The id that is drawn from a row of logits [V]."""
    row = np.asarray(row, dtype=np.float32)
    if options.temperature < 1e-5:
        return int(np.argmax(row))
    key, chance = step_key(options.seed, step), None
    if options.xtc_probability > 0:
        first, key = mx.random.split(key)
        chance = mx.random.uniform(key=first).item()
    left = sorted(kept(row, options, chance))
    noise = np.array(mx.random.gumbel(row.shape, key=key))
    scores = (row - row.max()) / np.float32(options.temperature) + noise
    return left[int(np.argmax(scores[left]))]
