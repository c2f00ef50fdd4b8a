"""What an operator writes becomes a scheme, and what a graph cannot read is refused by name."""

from dataclasses import replace

import pytest

from engine.contracts.composition import Composition, PagedKvComposition
from engine.contracts.errors import ConfigurationError
from engine.contracts.graph import GraphDeclaration, GraphGeometry, KvCapability
from engine.contracts.kv_scheme import AffineKv, AffineLayer, AffineLayersKv, PlainKv, TurboKv
from engine.generation.bindings.kv_storage import refuse_unreadable_storage, resolve_kv_storage

LISTED = (AffineLayer(layer=1, bits=4, group_size=32),)
ABLE = GraphDeclaration(kv=KvCapability(delayed_affine="ordinary"))


def geometry(head_dim=64, kinds=("full_attention", "sliding_attention")):
    return GraphGeometry(
        vocab_size=10,
        hidden_size=8,
        layers=len(kinds),
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        context_length=4096,
        layer_types=kinds,
        sliding_window=16,
    )


def never_read():
    raise AssertionError("nobody asked for the model's own list")


def test_a_wish_is_resolved():
    assert resolve_kv_storage("plain", never_read) == (PlainKv(), None)
    assert resolve_kv_storage("paged", never_read) == (PlainKv(), PagedKvComposition())
    assert resolve_kv_storage("affine4-start8", never_read) == (AffineKv(bits=4, start=8), None)
    assert resolve_kv_storage("config-start8", lambda: LISTED) == (AffineLayersKv(layers=LISTED, start=8), None)


@pytest.mark.parametrize("text", ["q4", "config"])
def test_a_wish_that_cannot_be_met_names_the_setting(text):
    with pytest.raises(ConfigurationError, match=r"^kv_storage: .*(kv_config|known)"):
        resolve_kv_storage(text, lambda: None)


@pytest.mark.parametrize(
    ("scheme", "declaration", "sizes", "why"),
    [
        (AffineKv(bits=4, group_size=64), ABLE, geometry(head_dim=96), "kv4: heads of 96 values .* groups of 64"),
        (TurboKv(key_bits=4, value_bits=4), ABLE, geometry(head_dim=96), "turbo-k4v4: heads have 96 values"),
        (AffineLayersKv(layers=LISTED), ABLE, geometry(head_dim=48), "config: heads of 48 values"),
        (AffineLayersKv(layers=LISTED), ABLE, geometry(kinds=("full_attention",)), "layer 1 of a model with 1"),
        (AffineKv(bits=4), replace(ABLE, kv=KvCapability(dense_reads=True)), geometry(), "plain keys and values alone"),
        (AffineKv(bits=4, start=1), GraphDeclaration(), geometry(), "cannot convert"),
    ],
)
def test_what_a_graph_cannot_read_is_refused(scheme, declaration, sizes, why):
    with pytest.raises(ConfigurationError, match=why):
        refuse_unreadable_storage(declaration, sizes, Composition(kv=scheme))


@pytest.mark.parametrize(
    ("scheme", "declaration", "sizes"),
    [
        (PlainKv(), GraphDeclaration(kv=KvCapability(dense_reads=True)), geometry(head_dim=7)),
        (AffineKv(bits=8, group_size=32), GraphDeclaration(), geometry(head_dim=96)),
        (AffineKv(bits=4, start=5), ABLE, geometry()),
        (AffineLayersKv(layers=LISTED), GraphDeclaration(), geometry(head_dim=96)),
        (TurboKv(key_bits=4, value_bits=4), GraphDeclaration(), geometry(head_dim=256)),
        (TurboKv(key_bits=4, value_bits=4), GraphDeclaration(), geometry(96, ("sliding_attention",))),
    ],
)
def test_what_a_graph_can_read_is_taken(scheme, declaration, sizes):
    refuse_unreadable_storage(declaration, sizes, Composition(kv=scheme))


def test_pages_of_quantized_numbers_are_refused():
    composition = Composition(kv=AffineKv(bits=4), paged_kv=PagedKvComposition())
    with pytest.raises(ConfigurationError, match="kv4: paged storage keeps plain"):
        refuse_unreadable_storage(ABLE, geometry(), composition)
