"""What tokens of a reading step and of a canvas see, against masks written out in numpy."""

import mlx.core as mx
import numpy as np
import pytest

from engine.models.diffusion_state import CanvasStep, EncoderState, ReadingStep

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.5
WINDOWS = [0, 1, 2, 5, 9, 40]


class Recorder:
    """Keeps every token that was read, of one layer, and says what each must have seen."""

    def __init__(self, window):
        self.window = window
        self.keys = np.zeros((0, KV_HEADS, DIM))
        self.values = np.zeros((0, KV_HEADS, DIM))

    def read(self, queries, keys, values):
        """Attention of tokens that are appended: causal, and no further back than the window, themselves included."""
        first = len(self.keys)
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        places, positions = np.arange(len(self.keys)), np.arange(first, len(self.keys))[:, None]
        seen = places <= positions
        if self.window:
            seen = seen & (places > positions - self.window)
        return attend(queries, self.keys, self.values, seen)

    def canvas(self, queries, keys, values):
        """Attention of a canvas: all of it, and the newest tokens that a window but one holds."""
        held = len(self.keys)
        all_keys, all_values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        places = np.arange(len(all_keys))
        seen = (places >= held) | (places >= held - (self.window - 1)) if self.window else places >= 0
        return attend(queries, all_keys, all_values, np.broadcast_to(seen, (len(queries), len(all_keys))))


def attend(queries, keys, values, seen):
    """Softmax attention in float64 of [L, H, D] over [N, Hkv, D] where `seen` [L, N]; returns [L, H·D]."""
    found = np.zeros(queries.shape)
    for query in range(queries.shape[0]):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = SCALE * keys[:, shared] @ queries[query, head]
            weights = np.where(seen[query], np.exp(scores - scores[seen[query]].max()), 0.0)
            found[query, head] = weights @ values[:, shared] / weights.sum()
    return found.reshape(queries.shape[0], -1)


def drawn(source, length):
    """Queries, keys and values [L, heads, D]."""
    return [source.standard_normal((length, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def packed(parts):
    return [mx.array(part[:, :, None].astype(np.float32)) for part in parts]


@pytest.mark.parametrize("composed", [True, False], ids=["composed", "library"])
@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_see_what_the_masks_of_their_layers_say(window, composed):
    source, oracle = np.random.default_rng(window), Recorder(window)
    state = EncoderState([0, window])
    for length in (1, 7, 3, 12, 1, 2):
        parts = drawn(source, length)
        step = ReadingStep(state, length, scale=SCALE, composed=composed)
        for layer in (0, 1):
            found = step.attention(*packed(parts), layer=layer)
        state.advance(length)
        assert found.shape == (1, length, HEADS * DIM)
        assert np.abs(np.array(found[0]) - oracle.read(*parts)).max() < 1e-5
        canvas = drawn(source, 6)
        seen = CanvasStep(state, 6, scale=SCALE, composed=composed).attention(*packed(canvas), layer=1)
        assert np.abs(np.array(seen[0]) - oracle.canvas(*canvas)).max() < 1e-5
    assert state.offset == 26


@pytest.mark.parametrize("window", WINDOWS)
def test_a_layer_holds_what_can_still_be_seen_and_no_more(window):
    source, state = np.random.default_rng(3), EncoderState([window])
    for length in (4, 11, 1):
        step = ReadingStep(state, length, scale=SCALE, composed=False)
        mx.eval(step.attention(*packed(drawn(source, length)), layer=0))
        state.advance(length)
        held = min(state.offset, window - 1) if window else state.offset
        assert [array.shape for array in state.arrays()] == [(1, KV_HEADS, held, DIM)] * 2
        assert state.nbytes == 2 * KV_HEADS * held * DIM * 4


def test_a_canvas_is_rotated_from_the_position_that_follows():
    class Positions:
        def at(self, positions):
            return positions.tolist()

    state, rope = EncoderState([0]), Positions()
    state.advance(5)
    assert CanvasStep(state, 3, scale=1.0, composed=False).rotation(rope) == [5, 6, 7]
    assert ReadingStep(state, 2, scale=1.0, composed=False).rotation(rope) == [5, 6]
