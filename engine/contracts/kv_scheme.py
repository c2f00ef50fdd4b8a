"""How the keys and values of rows are stored: the schemes, their names, and the bytes that a token takes.

A scheme is a fact of the composition: the operator chooses it, nothing changes it later. Units: tokens and bytes.
Source: reference, autoregressive §4.1 and §4.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

DEFAULT_GROUP_SIZE = 64
AFFINE_BITS = (4, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
TURBO_HEAD_DIMS = (64, 128, 256, 512)
TURBO_GROUP_SIZE = 32

SPELLINGS = "plain, affine4, affine8 (each with -g32, -g64 or -g128), config, turbo-k{2,4,5,8}v{2,3,4,5,8}, paged"
"""What an operator can write; quantized schemes also take -start{tokens}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainKv:
    """In the activations' dtype."""

    start: ClassVar[int] = 0

    @property
    def store_key(self) -> str:
        """The name under which state of this form is kept."""
        return "bf16"

    def token_bytes(self, values: int, element_bytes: int) -> int:
        """Bytes of one token in a layer whose keys take `values` numbers a token, and its values as many."""
        return 2 * values * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineKv:
    """Quantized to `bits` with a scale and a bias for each group; plain until `start` tokens are held."""

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    start: int = 0

    @property
    def store_key(self) -> str:
        """The name under which state of this form is kept."""
        group = "" if self.group_size == DEFAULT_GROUP_SIZE else f"-g{self.group_size}"
        return f"kv{self.bits}{group}{_start_key(self.start)}"

    def token_bytes(self, values: int, element_bytes: int) -> int:
        """See `PlainKv.token_bytes`."""
        return 2 * (values * self.bits // 8 + 2 * values // self.group_size * element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineLayer:
    """What one listed layer is quantized to. `layer` is an index into a row's caches."""

    layer: int
    bits: int
    group_size: int = DEFAULT_GROUP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineLayersKv:
    """Each listed layer in its own affine form, the others plain."""

    layers: tuple[AffineLayer, ...]
    start: int = 0

    @property
    def store_key(self) -> str:
        """The name under which state of this form is kept."""
        return f"config{_start_key(self.start)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurboKv:
    """TurboQuant: affine keys, and values in a rotated space; layers that slide stay plain."""

    key_bits: int
    value_bits: int
    start: int = 0

    @property
    def store_key(self) -> str:
        """The name under which state of this form is kept."""
        return f"turbo-k{self.key_bits}v{self.value_bits}{_start_key(self.start)}"

    def token_bytes(self, values: int, element_bytes: int) -> int:  # noqa: ARG002 - its numbers have a fixed width
        """See `PlainKv.token_bytes`."""
        groups = values // TURBO_GROUP_SIZE
        return values * (self.key_bits + self.value_bits) // 8 + groups * (4 + 2)


PLAIN_KV = PlainKv()
LayerKv: TypeAlias = PlainKv | AffineKv | TurboKv
KvStorageScheme: TypeAlias = PlainKv | AffineKv | AffineLayersKv | TurboKv


def layer_scheme(scheme: KvStorageScheme, layer: int, *, sliding: bool) -> LayerKv:
    """The form of one layer of a row."""
    match scheme:
        case AffineLayersKv():
            listed = [entry for entry in scheme.layers if entry.layer == layer]
            if not listed:
                return PLAIN_KV
            return AffineKv(bits=listed[0].bits, group_size=listed[0].group_size, start=scheme.start)
        case TurboKv() if sliding:
            return PLAIN_KV
        case _:
            return scheme


def converts_at(scheme: KvStorageScheme) -> int | None:
    """Tokens from which on a row's state is quantized, once one is held; None when it stays plain."""
    return None if isinstance(scheme, PlainKv) else scheme.start


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWish:
    """What an operator asked for. `from_config` stands for the model's own list of layers, with `scheme.start`."""

    scheme: KvStorageScheme
    paged: bool = False
    from_config: bool = False


def parse_kv_wish(text: str) -> KvWish:
    """Read one of `SPELLINGS`.

    Raises:
        ValueError: it is none of them; the message says what can be written.
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no way to store keys and values; known: {SPELLINGS}")
    start = int(match["start"] or 0)
    if match["bits"]:
        group_size = int(match["group"] or DEFAULT_GROUP_SIZE)
        return KvWish(scheme=AffineKv(bits=int(match["bits"]), group_size=group_size, start=start))
    if match["keys"]:
        return KvWish(scheme=TurboKv(key_bits=int(match["keys"]), value_bits=int(match["values"]), start=start))
    if match["config"]:
        return KvWish(scheme=AffineLayersKv(layers=(), start=start), from_config=True)
    return KvWish(scheme=PLAIN_KV, paged=text == "paged")


_GRAMMAR = re.compile(
    r"plain|paged|(?:affine(?P<bits>[48])(?:-g(?P<group>32|64|128))?"
    r"|(?P<config>config)|turbo-k(?P<keys>[2458])v(?P<values>[23458]))(?:-start(?P<start>[0-9]{1,7}))?"
)


def _start_key(start: int) -> str:
    return f"-start{start}" if start else ""
