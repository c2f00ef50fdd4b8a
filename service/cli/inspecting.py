"""Shows what is known of a model before it is loaded, as a page for people or as JSON for tools."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.cli.terminal import harmless, print_whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.execution.inspection import MemoryReport, ModelReport, StorageReport, TextReport, UnreadableModel


def show_report(report: ModelReport, console: Console) -> None:
    """The page: what the model is, how it is stored, what it would hold here, its text half, and what is missing."""
    console.print(Text(harmless(report.name), style="bold"))
    page = Table.grid(padding=(0, 2))
    page.add_column(style="dim", no_wrap=True)
    page.add_column(overflow="fold")
    for label, value in (
        *_shape(report),
        *_storage(report.storage),
        *_memory(report.memory, report),
        *_text(report.text),
        ("declares", _declares(report)),
    ):
        page.add_row(label, Text(harmless(value)))
    print_whole(page, console)
    console.print()
    print_whole(_forms(report.storage), console)
    _show_lines("cannot be served", report.problems, "red", console)
    _show_lines("note", report.notes, "yellow", console)


def show_unreadable(report: UnreadableModel, console: Console) -> None:
    """The page of a model of which no more is known than why it cannot be served."""
    console.print(Text(harmless(report.name), style="bold"))
    _show_lines("cannot be served", report.problems, "red", console)


def report_as_json(report: ModelReport | UnreadableModel, output: TextIO) -> None:
    """One JSON object, with the fields of the report."""
    json.dump(dataclasses.asdict(report), output, indent=2)
    output.write("\n")


def _show_lines(heading: str, lines: Iterable[str], style: str, console: Console) -> None:
    for line in lines:
        console.print(Text(f"{heading}: ", style=style) + Text(harmless(line)), soft_wrap=True)


def _shape(report: ModelReport) -> Iterable[tuple[str, str]]:
    geometry = report.geometry
    served = "" if report.graph == "native" else ", served by mlx-lm"
    yield "family", f"{report.model_type} ({'a GGUF file' if report.kind == 'gguf' else 'a folder'}{served})"
    if report.graph == "native":
        yield from _attention(report)
    else:
        yield "layers", str(geometry.layers)
    inner = f", {report.intermediate_size} inside" if report.intermediate_size else ""
    yield "width", f"{geometry.hidden_size}{inner}"
    if report.experts:
        yield "experts", f"{report.experts_per_token} of {report.experts} for each token"
    head = "tied to the embeddings" if report.tied_head else "of its own"
    yield "vocabulary", f"{geometry.vocab_size}{f' (output head {head})' if report.graph == 'native' else ''}"
    yield "context", f"{geometry.context_length} tokens"
    if geometry.canvas_length:
        yield "canvas", f"{geometry.canvas_length} tokens, denoised together"


def _attention(report: ModelReport) -> Iterable[tuple[str, str]]:
    geometry = report.geometry
    kinds = Counter(kind.removesuffix("_attention") for kind in geometry.layer_types)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    window = f", window {geometry.sliding_window}" if geometry.sliding_window else ""
    yield "layers", f"{geometry.layers} ({layers}{window})"
    yield "attention", f"{geometry.heads} heads of {geometry.head_dim}, {geometry.kv_heads} for keys and values"
    yield "rotation", ", ".join(report.rotations)


def _storage(storage: StorageReport) -> Iterable[tuple[str, str]]:
    yield "parameters", _count(storage.parameters)
    dtypes = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in storage.dtypes.items())
    files = storage.files[0] if len(storage.files) == 1 else f"{len(storage.files)} files"
    yield "stored", f"{size_text(storage.nbytes)} in {files}: {dtypes}"


def _memory(memory: MemoryReport, report: ModelReport) -> Iterable[tuple[str, str]]:
    yield "here", f"{memory.device}: weights in {memory.compute_dtype}, {size_text(memory.weights_bytes)}"
    about = "" if report.graph == "native" else "about "  # mlx-lm's caches are not predicted layer by layer
    token, context = size_text(memory.token_bytes), size_text(memory.context_bytes)
    yield "state", f"{about}{token} a token, {context} for the whole context"
    whole = memory.largest_context == report.geometry.context_length
    fits = "the whole context" if whole else f"{memory.largest_context} tokens"
    yield "fits", f"{fits} in one row, with {size_text(memory.available_bytes)} free"


def _text(text: TextReport | None) -> Iterable[tuple[str, str]]:
    if text is None:
        return
    yield "tokenizer", f"{text.vocabulary} tokens, {text.control_tokens} of them control tokens"
    ends = ", ".join(f"{id_} {token}".rstrip() for id_, token in zip(text.eos_token_ids, text.eos_tokens, strict=True))
    yield "ends with", ends or "nothing"
    yield "chat", "has a template" if text.has_chat_template else "no template"


def _declares(report: ModelReport) -> str:
    declaration = report.declaration
    facts = ["packed steps" if declaration.packed_segments else "rows one by one"]
    named = {
        "adapters": declaration.adapters.mountable,
        "media": declaration.media is not None,
        "paged attention": declaration.paged_attention,
        "compiled decode": declaration.compiled_decode,
        "embeddings": declaration.embeddings,
        "hidden layer taps": declaration.hidden_layer_taps,
        "a draft head": declaration.native_draft is not None,
    }
    facts += [name for name, promised in named.items() if promised]
    missing = [name for name, promised in named.items() if not promised]
    return f"{declaration.method}, {', '.join(facts)}; not: {', '.join(missing)}"


def _forms(storage: StorageReport) -> Table:
    table = Table("MATRIX", "STORED AS", "LAYERS", "VALUES", "SIZE", box=None, pad_edge=False, header_style="bold")
    for form in storage.forms:
        cells: list[Any] = [Text(harmless(cell)) for cell in (form.module, form.form, form.layers)]
        table.add_row(*cells, _count(form.values), size_text(form.nbytes))
    return table


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def size_text(number: int) -> str:
    """So many bytes in three digits, in the largest unit that is not more."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} bytes"
