"""Token embedding tables, dense or quantized, and their use as a tied output head."""

from __future__ import annotations

import mlx.core as mx

from engine.ops.linear import DenseLinear, DenseWeight, QuantizedLinear, QuantizedWeight, Weight


class Embedding:
    """A table [V, H]: looks rows up, and can serve as the output head of a tied model."""

    __slots__ = ("_table",)

    def __init__(self, table: Weight) -> None:
        """Take the table as stored."""
        self._table = table

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        table = self._table
        if isinstance(table, DenseWeight):
            return [table.weight]
        return [a for a in (table.weight, table.scales, table.biases) if a is not None]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return rows [..., H] for `tokens` [...]; ids must be checked before (gathers do not)."""
        table = self._table
        if isinstance(table, DenseWeight):
            return table.weight[tokens]
        return _unpacked(
            table,
            table.weight[tokens],
            table.scales[tokens],
            None if table.biases is None else table.biases[tokens],
        )

    def dense(self) -> mx.array:
        """All rows [V, H]: those of a dense table themselves, those of a quantized one unpacked anew."""
        table = self._table
        if isinstance(table, DenseWeight):
            return table.weight
        return _unpacked(table, table.weight, table.scales, table.biases)

    def as_head(self, *, pretranspose: bool) -> DenseLinear | QuantizedLinear:
        """The table as a product [.., H] → [.., V]; `pretranspose` makes a second, transposed copy."""
        table = self._table
        if isinstance(table, QuantizedWeight):
            return QuantizedLinear(table)
        return DenseLinear(table.weight, transposed=pretranspose)


def _unpacked(table: QuantizedWeight, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
    """The values of rows that are stored as those of `table`."""
    return mx.dequantize(weight, scales, biases, group_size=table.group_size, bits=table.bits, mode=table.mode)
