"""Every cache kind against lists: appends of any width, maintenance, trims, snapshots and restores, in any order."""

import mlx.core as mx
import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.contracts.composition import Composition, PagedKvComposition
from engine.contracts.graph import GraphGeometry
from engine.contracts.kv_scheme import AffineKv, AffineLayer, AffineLayersKv, TurboKv
from engine.contracts.snapshot import usable_tokens
from engine.state.affine_codec import AffineCodec
from engine.state.build import CacheBuilder
from engine.state.snapshots import joined
from engine.state.turbo_codec import TurboCodec
from tests.engine.state.oracle import HEADS, KV_HEADS, KeepsEverything, random_tokens

DIM, WINDOW = 64, 20
TYPES = ("full_attention", "sliding_attention", "full_attention")
GEOMETRY = GraphGeometry(
    vocab_size=4,
    hidden_size=HEADS * DIM,
    layers=len(TYPES),
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    context_length=4096,
    layer_types=TYPES,
    sliding_window=WINDOW,
)
AFFINE4, AFFINE8 = AffineCodec(bits=4, group_size=64), AffineCodec(bits=8, group_size=32)
TURBO = TurboCodec(key_bits=4, value_bits=3)
KINDS = {
    "pooled": (Composition(), (None, None, None)),
    "alone": (Composition(row_tile_tokens=8), (None, None, None)),
    "library": (Composition(library_arithmetic=True), (None, None, None)),
    "paged": (Composition(paged_kv=PagedKvComposition()), (None, None, None)),
    "small pages": (
        Composition(paged_kv=PagedKvComposition(block_tokens=16), library_arithmetic=True),
        (None, None, None),
    ),
    "affine4": (Composition(kv=AffineKv(bits=4)), (AFFINE4,) * 3),
    "affine8 from 30": (Composition(kv=AffineKv(bits=8, group_size=32, start=30)), (AFFINE8,) * 3),
    "turbo": (Composition(kv=TurboKv(key_bits=4, value_bits=3)), (TURBO, None, TURBO)),
    "turbo from 25": (Composition(kv=TurboKv(key_bits=4, value_bits=3, start=25)), (TURBO, None, TURBO)),
    "listed": (
        Composition(kv=AffineLayersKv(layers=(AffineLayer(layer=2, bits=8, group_size=32),))),
        (None, None, AFFINE8),
    ),
}


class AnyKind(RuleBasedStateMachine):
    """One row of three layers; each is compared with its own lists, bit for bit where nothing is quantized."""

    @initialize(seed=st.integers(0, 99), kind=st.sampled_from(sorted(KINDS)))
    def begin(self, seed, kind):
        composition, codecs = KINDS[kind]
        self.random = np.random.default_rng(seed)
        self.builder = CacheBuilder(GEOMETRY, composition)
        self.caches = self.builder.make_caches()
        self.oracles = [
            KeepsEverything(
                dim=DIM,
                window=WINDOW if kind == "sliding_attention" else 0,
                composed=composition.composes_exponentials,
                codec=codec,
                start=getattr(composition.kv, "start", 0),
            )
            for kind, codec in zip(TYPES, codecs, strict=True)
        ]
        assert self.builder.converts == any(codecs)
        self.pieces = [[] for _ in TYPES]

    @property
    def offset(self):
        return self.oracles[0].offset

    @rule(count=st.sampled_from([1, 1, 1, 2, 7, 40, 260]))
    def append(self, count):
        for cache, oracle in zip(self.caches, self.oracles, strict=True):
            cache.maintain()
            oracle.maintain()
            parts = random_tokens(self.random, count, DIM)
            found, wanted = (each.attend(*parts, scale=0.125) for each in (cache, oracle))
            if oracle.converted:
                assert mx.abs(found - wanted).max().item() < 5e-6
            else:
                assert mx.array_equal(found, wanted).item()
            assert cache.offset == oracle.offset
            assert cache.trimmable_tokens >= (count == 1)

    @rule(data=st.data())
    def trim(self, data):
        count = data.draw(st.integers(0, min(cache.trimmable_tokens for cache in self.caches)))
        for cache, oracle in zip(self.caches, self.oracles, strict=True):
            cache.trim(count)
            oracle.cut(oracle.offset - count)

            self.pieces = [[] for _ in TYPES]

    @precondition(lambda self: self.offset > 0)
    @rule()
    def take_what_was_added(self):
        for cache, pieces in zip(self.caches, self.pieces, strict=True):
            if pieces and pieces[-1].tokens == cache.offset:
                continue
            piece = cache.added_since(pieces[-1].tokens if pieces else 0)
            if piece.start and piece.kind != pieces[-1].kind:
                piece = cache.added_since(0)
            pieces[:] = [*(pieces if piece.start else []), piece]
        added = self.builder.restore([joined(pieces) for pieces in self.pieces], self.offset)
        whole = self.builder.restore([cache.snapshot() for cache in self.caches], self.offset)
        for one, other in zip(added, whole, strict=True):
            parts = random_tokens(np.random.default_rng(5), 3, DIM)
            found, wanted = (each.attend(*parts, scale=0.125) for each in (one, other))
            assert mx.array_equal(found, wanted).item()
        for cache in (*added, *whole):
            cache.close()

    @precondition(lambda self: self.offset > 0)
    @rule(data=st.data(), donor_stays=st.booleans())
    def begin_again_from_snapshots(self, data, donor_stays):
        snapshots = [cache.snapshot() for cache in self.caches]
        wanted = data.draw(st.integers(1, self.offset))
        kept = usable_tokens(snapshots, wanted)
        assert kept in (0, wanted)
        donors, heirs = self.caches, self.builder.restore(snapshots, kept or self.offset)
        assert [cache.offset for cache in heirs] == [kept or self.offset] * len(TYPES)
        self.caches, leaving = (donors, heirs) if donor_stays else (heirs, donors)
        for cache in leaving:
            cache.attend(*random_tokens(self.random, 3, DIM), scale=0.125)
            cache.close()
        if not donor_stays:
            self.pieces = [[] for _ in TYPES]
            for oracle in self.oracles:
                oracle.cut(kept or self.offset)

    def teardown(self):
        for cache in getattr(self, "caches", []):
            cache.close()
            assert cache.nbytes == 0


AnyKind.TestCase.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, phases=(Phase.reuse, Phase.generate)
)
TestAnyKind = AnyKind.TestCase


def test_the_first_chunk_is_attended_to_as_it_is_and_then_converted_one_layer_at_a_time():
    builder = CacheBuilder(GEOMETRY, Composition(kv=AffineKv(bits=4)))
    caches, plain = builder.make_caches(), CacheBuilder(GEOMETRY, Composition(row_tile_tokens=8)).make_caches()
    parts = random_tokens(np.random.default_rng(0), 9, DIM)
    for cache, exact in zip(caches, plain, strict=True):
        cache.maintain()
        assert mx.array_equal(cache.attend(*parts, scale=0.125), exact.attend(*parts, scale=0.125)).item()
    assert [cache.snapshot().kind for cache in caches] == ["plain"] * 3
    for layer, cache in enumerate(caches):
        cache.maintain()
        kinds = ["affine"] * (layer + 1) + ["plain"] * (2 - layer)
        assert [each.snapshot().kind for each in caches] == kinds
    parts = random_tokens(np.random.default_rng(1), 1, DIM)
    for cache, exact in zip(caches, plain, strict=True):
        assert not mx.array_equal(cache.attend(*parts, scale=0.125), exact.attend(*parts, scale=0.125)).item()


def test_state_that_was_converted_late_is_of_no_use_below_the_point_where_it_was():
    builder = CacheBuilder(GEOMETRY, Composition(kv=AffineKv(bits=8, group_size=32, start=30)))
    caches = builder.make_caches()
    random = np.random.default_rng(0)
    for cache in caches:
        cache.attend(*random_tokens(random, 19, DIM), scale=0.125)
    assert usable_tokens([cache.snapshot() for cache in caches], 12) == 12
    for cache in caches:
        for count in (14, 1, 1):
            cache.attend(*random_tokens(random, count, DIM), scale=0.125)
            cache.maintain()
    full = [cache.snapshot() for cache in (caches[0], caches[2])]
    assert [usable_tokens(full, wanted) for wanted in (35, 34, 33, 32, 12)] == [35, 34, 33, 0, 0]
