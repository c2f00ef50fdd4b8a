"""Trains the tales' model on the CPU and writes it as a folder that the product serves.

`python -m benchmarks.tales.train [--minutes 20] [--most-minutes 35] [--out benchmarks/tales/model]`

The objective is the model's own task: given a prompt and a canvas of which some positions are noise, tell every
position's token; in half of the lessons after a pass over a noisier canvas, whose proposal is fed back as a step does.
The share of noise is uniform. `--minutes` are of processor time, `--most-minutes` of the clock, whichever comes first;
the rate of learning falls with them. Weights are kept in bfloat16. Source: reference, denoising-and-models §2.5; Chen
et al. 2022, "Analog Bits" (self-conditioning); Austin et al. 2021, "Structured Denoising Diffusion Models" (uniform
noise).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tales import corpus
from benchmarks.tales.batches import Lessons, encoded
from benchmarks.tales.vocabulary import learn_tokenizer, write_tokenizer
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from benchmarks.tales.batches import Batch

TALES, SEED = 12_000, 7
HALF_LESSONS = 0.5
PEAK_RATE, FINAL_RATE, WARMUP_STEPS = 3e-3, 2e-4, 60
SLOWER = 0.4
TOLD_SHARE = 0.02
T_MIN, T_MAX = 0.4, 0.8
"""The range of temperatures with which a denoising step sharpens what it feeds back."""


def main() -> None:
    """Read the arguments, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--most-minutes", type=float, default=35.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--go-on", action="store_true", help="begin with the weights that are there, and learn slower")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare_runtime(RuntimeSettings(cache_directory=Path(folder), blas_threads=arguments.threads))
        clock = Clock(60 * arguments.minutes, 60 * arguments.most_minutes)
        train(arguments.out, clock, rows=arguments.rows, goes_on=arguments.go_on)


class Clock:
    """How much of a training run's time is spent: of the processor's, or by the clock on the wall."""

    def __init__(self, processor_seconds: float, wall_seconds: float) -> None:
        """Start."""
        self._processor_seconds, self._wall_seconds = processor_seconds, wall_seconds
        self._started = time.process_time(), time.perf_counter()

    @property
    def processor_minutes(self) -> float:
        """Processor time since the start."""
        return (time.process_time() - self._started[0]) / 60

    @property
    def wall_minutes(self) -> float:
        """Time since the start."""
        return (time.perf_counter() - self._started[1]) / 60

    @property
    def share(self) -> float:
        """What is spent, 1 at the end."""
        return max(self.processor_minutes * 60 / self._processor_seconds, self.wall_minutes * 60 / self._wall_seconds)


def train(folder: Path, clock: Clock, *, rows: int, goes_on: bool = False) -> None:
    """Train until `clock` has run out, and write the model into `folder` now and then, and at the end."""
    import mlx.core as mx
    import mlx.optimizers as optimizers

    network = importlib.import_module("benchmarks.tales.network")
    sizes = network.Sizes()
    texts = corpus.tales(TALES, seed=SEED)
    tokenizer = learn_tokenizer(texts)
    seed = SEED + goes_on
    lessons = Lessons(encoded(tokenizer, texts), canvas=sizes.canvas, vocab_size=sizes.vocab_size, size=rows, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.document(), indent=1) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, folder)
    weights = _stored(folder) if goes_on else network.initial_weights(sizes, seed=SEED)
    optimizer = optimizers.Adam(learning_rate=PEAK_RATE, betas=[0.9, 0.98])
    mx.random.seed(seed)
    told, step, mean = 0.0, 0, 0.0
    for batch in lessons:
        share = clock.share
        if share >= 1:
            break
        optimizer.learning_rate = _rate(step, share) * (SLOWER if goes_on else 1.0)
        feedback = _feedback(network, sizes, weights, batch) if mx.random.uniform().item() < HALF_LESSONS else None
        loss, gradients = mx.value_and_grad(partial(_loss, network, sizes, batch, feedback))(weights)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state, loss)
        mean, step = loss.item() if not step else 0.98 * mean + 0.02 * loss.item(), step + 1
        if share - told >= TOLD_SHARE:
            told = share
            print(_progress(clock, step, mean), flush=True)
            _write(weights, folder)
    _write(weights, folder)
    print(_progress(clock, step, mean))


def _progress(clock: Clock, step: int, loss: float) -> str:
    return (
        f"{clock.processor_minutes:.1f} minutes of the processor, {clock.wall_minutes:.1f} on the clock: "
        f"step {step}, loss {loss:.3f} nats a token"
    )


def _rate(step: int, share: float) -> float:
    """The rate of learning: a short rise, then half a cosine over the time that there is."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def _loss(network, sizes, batch: Batch, feedback, weights):
    """Mean cross-entropy of the canvas' own tokens, in nats a position."""
    import mlx.core as mx

    logits = network.canvas_logits(weights, sizes, mx.array(batch.prompt), mx.array(batch.noisy), feedback)
    return network.cross_entropy(logits, mx.array(batch.canvas))


def _feedback(network, sizes, weights, batch: Batch):
    """What the pass before feeds back, sharpened as denoising steps sharpen it."""
    import mlx.core as mx

    logits = network.canvas_logits(weights, sizes, mx.array(batch.prompt), mx.array(batch.earlier), None)
    temperature = mx.random.uniform(T_MIN, T_MAX)
    soft = network.soft_embeddings(weights, sizes, network.softmax(logits / temperature))
    mx.eval(soft)
    return soft


def _stored(folder: Path):
    import mlx.core as mx

    return {name: array.astype(mx.float32) for name, array in mx.load(str(folder / "model.safetensors")).items()}


def _write(weights, folder: Path) -> None:
    import mlx.core as mx

    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    )


if __name__ == "__main__":
    main()
