"""How fast states are taken, given, written and read, and how long a look-up takes. Prints JSON.

Run as a process of its own: `python -m benchmarks.prefix.bandwidth FOLDER TOKENS ROUNDS`. The states are those of
SmolLM2-135M in float32. Seconds are the least of the rounds; the file is read from the system's cache.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine.contracts.composition import Composition
from engine.contracts.graph import GraphGeometry
from engine.state.build import CacheBuilder
from engine.state.prefix_disk import PrefixDisk
from engine.state.prefix_index import token_key
from engine.state.prefix_store import PrefixEntry, PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.cache import Cache

LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64
GEOMETRY = GraphGeometry(
    vocab_size=49152,
    hidden_size=HEADS * DIM,
    layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    context_length=8192,
    layer_types=("full_attention",) * LAYERS,
)
ENTRIES, SHARED_TOKENS = 1000, 1000
WAIT_SECONDS = 120.0


def main() -> None:
    """Measure and print."""
    folder, tokens, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    mx.set_default_device(mx.cpu)
    builder = CacheBuilder(GEOMETRY, Composition())
    caches = filled(builder, tokens)
    record: dict[str, Any] = {"tokens": tokens, "look_up_seconds": look_up(tokens, rounds)}
    record["take_seconds"] = least(rounds, lambda: [cache.snapshot() for cache in caches])
    snapshots = [cache.snapshot() for cache in caches]
    record["bytes"] = sum(snapshot.nbytes for snapshot in snapshots)
    record["give_seconds"] = least(rounds, lambda: settle(builder.restore(snapshots, tokens)))
    record |= on_disk(folder, PrefixEntry(namespace="", key=token_key(range(tokens)), snapshots=snapshots), rounds)
    print(json.dumps(record))


def filled(builder: CacheBuilder, tokens: int) -> list[Cache]:
    """Caches that hold `tokens` tokens, all alike, since attending to so many different ones takes a minute."""
    one: Any = builder.make_caches()
    noise = mx.random.normal((1, KV_HEADS, 1, DIM))
    mx.eval([cache.attend(mx.zeros((1, HEADS, 1, DIM)), noise, noise, scale=1.0) for cache in one])
    long = []
    for snapshot in (cache.snapshot() for cache in one):
        arrays = {name: mx.repeat(array, tokens, axis=2) for name, array in snapshot.arrays.items()}
        long.append(replace(snapshot, tokens=tokens, arrays=arrays))
    caches = builder.restore(long, tokens)
    mx.eval([cache.arrays() for cache in caches])
    return caches


def settle(caches: list[Cache]) -> None:
    """Wait for restored caches, and let go of them."""
    mx.eval([cache.arrays() for cache in caches])
    for cache in caches:
        cache.close()


def look_up(tokens: int, rounds: int) -> float:
    """Seconds to find the longest prefix among many entries that begin alike."""
    generator = random.Random(1)
    system = [generator.randrange(49152) for _ in range(SHARED_TOKENS)]
    store = PrefixStore(10**9)
    for _ in range(ENTRIES):
        key = token_key([*system, *(generator.randrange(49152) for _ in range(tokens - SHARED_TOKENS))])
        store.put(PrefixEntry(namespace="", key=key, snapshots=[]))
    prompt = [*system, *range(tokens)]
    return least(rounds, lambda: store.find("", token_key(prompt)))


def on_disk(folder: Path, entry: PrefixEntry, rounds: int) -> dict[str, float]:
    """Seconds to write one entry, fsync included, to hand it over for that, and to read it, verified."""
    handed, written, read = [], [], []
    for number in range(rounds):
        place = folder / f"bandwidth-{number}"
        disk = PrefixDisk(place, identity="", capacity_bytes=2**40)
        disk.wait_idle(WAIT_SECONDS)
        began = time.perf_counter()
        disk.offer(entry)
        handed.append(time.perf_counter() - began)
        disk.wait_idle(WAIT_SECONDS)
        written.append(time.perf_counter() - began)
        hit = disk.find("", entry.key)
        if hit is None:
            raise RuntimeError("the entry was not written")
        began = time.perf_counter()
        disk.load(hit.stored)
        read.append(time.perf_counter() - began)
        disk.close()
        shutil.rmtree(place)
    return {"hand_over_seconds": min(handed), "write_seconds": min(written), "read_seconds": min(read)}


def least(rounds: int, action: Callable[[], object]) -> float:
    """Seconds of the fastest of `rounds`."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
