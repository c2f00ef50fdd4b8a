"""Facts resolved once before a graph is built: device, KV storage, chunking, rows, tail split.

Everything here is concrete; a graph without a composition runs under `COMPOSITION_DEFAULTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.kv_scheme import PLAIN_KV, KvStorageScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKvComposition:
    """Paged storage: tokens per block."""

    block_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The facts. `prefill_chunk_tokens` None leaves the width to the prefill policy.

    `device` is "cpu", "metal" or "cuda"; `compute_dtype` names the dtype of activations and dense weights.
    `row_tile_tokens` makes every product take exactly so many tokens, filled up with zeros or split, and every row
    attend by itself: a row's bits then do not depend on who shares its steps. None lets products take what there is.
    `library_arithmetic` keeps the library's own softmax and sigmoid, bit for bit, where faster forms are known.
    `host_kernels` lets compiled code of the host do what stands between products, where there is some; see
    `engine.runtime.host_kernels`.
    """

    device: str = "cpu"
    compute_dtype: str = "float32"
    kv: KvStorageScheme = PLAIN_KV
    paged_kv: PagedKvComposition | None = None
    prefill_chunk_tokens: int | None = None
    prefill_tail_split: bool = True
    grammar_jump: bool = False
    adapters: bool = False
    max_rows: int = 32
    row_tile_tokens: int | None = None
    library_arithmetic: bool = False
    host_kernels: bool = False

    @property
    def kv_store_key(self) -> str:
        """The name under which rows' state of this form is kept; state of another name is of no use here."""
        return self.kv.store_key if self.paged_kv is None else f"{self.kv.store_key}-b{self.paged_kv.block_tokens}"

    @property
    def composes_exponentials(self) -> bool:
        """Whether exponentials are composed of operations that are fast on a CPU; see `engine.ops.exponential`."""
        return self.device == "cpu" and self.compute_dtype == "float32" and not self.library_arithmetic

    @property
    def computes_on_host(self) -> bool:
        """Whether a step is computed while it is built, by compiled code between its products."""
        return self.host_kernels and self.composes_exponentials


COMPOSITION_DEFAULTS = Composition()
