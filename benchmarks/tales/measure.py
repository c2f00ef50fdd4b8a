"""How well the tales' model denoises tales that it has never seen, beside the same model untrained.

`python -m benchmarks.tales.measure [--model benchmarks/tales/model] [--tales 48] [--samples 12]`

Two numbers, both in bits per byte and of the product's own graph:

* held out: how well the canvas that follows a tale's first 12 ids is told from a noisy one, the mean over shares of
  noise from an eighth to all; of the tale's own positions and bytes alone, up to the id that ends it;
* closeness: how unlikely answers are to a model of letters that has seen the learned tales (each from the five before
  it), which tells whether they look like the corpus. Held-out tales themselves are the mark to reach.

Answers are denoised by the product's own method with its defaults, from the beginnings of held-out tales.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from benchmarks.tales import corpus
from benchmarks.tales.batches import Lessons, encoded
from benchmarks.tales.train import SEED, TALES
from benchmarks.tales.vocabulary import END
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISE_SHARES = tuple(share / 8 for share in range(1, 9))
MODEL = Path(__file__).parent / "model"
CUT, HELD_OUT_SEED, LETTERS, MOST_BLOCKS = 12, 11, 5, 2


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tales", type=int, default=48)
    parser.add_argument("--samples", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare_runtime(RuntimeSettings(cache_directory=Path(folder), blas_threads=1))
        untrained = write_untrained(Path(folder) / "untrained", arguments.model)
        texts = corpus.tales(arguments.tales, seed=HELD_OUT_SEED, held_out=True)
        letters = Letters(corpus.tales(TALES // 12, seed=SEED))
        print(json.dumps({"closeness_of_held_out_tales": round(mean_bits(letters, texts), 3)}))
        for name, model in (("trained", arguments.model), ("untrained", untrained)):
            graph, tokenizer = open_graph(model), Tokenizer.from_file(str(model / "tokenizer.json"))
            told = [tell(graph, tokenizer, text, seed=seed) for seed, text in enumerate(texts[: arguments.samples])]
            account = {
                "model": name,
                "held_out_bits_per_byte": round(held_out_bits(graph, tokenizer, texts), 3),
                "closeness": round(mean_bits(letters, [answer.text for answer in told]), 3),
                "passes_per_token": round(sum(a.passes for a in told) / sum(max(1, a.tokens) for a in told), 3),
                "samples": [[answer.prompt, answer.text] for answer in told[:3]],
            }
            print(json.dumps(account, indent=1))
            graph.close()


def write_untrained(folder: Path, trained: Path) -> Path:
    """The model as training finds it, in the folder of its own."""
    import mlx.core as mx

    from benchmarks.tales.network import Sizes, initial_weights

    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((trained / name).read_bytes())
    mx.save_safetensors(str(folder / "model.safetensors"), initial_weights(Sizes(), seed=SEED))
    return folder


def open_graph(model: Path):
    """The product's own graph of the model in a folder."""
    from engine.artifacts.artifact import open_artifact
    from engine.artifacts.weights import WeightStore
    from engine.contracts.composition import Composition
    from engine.models.reading import WeightReader
    from engine.models.registry import build_denoising_graph
    from engine.runtime.policy import LayoutPolicy

    artifact = open_artifact(model)
    layout = LayoutPolicy(compute_dtype="float32", dequantize=True, pretranspose_linear=False)
    return build_denoising_graph(artifact.config, WeightReader(WeightStore(artifact), layout), Composition())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was denoised after a prompt, and what it took."""

    prompt: str
    text: str
    tokens: int
    passes: int


def tell(graph, tokenizer: Tokenizer, tale: str, *, seed: int) -> Answer:
    """Denoise what follows the beginning of `tale`: block after block, until a tale ends or is too long."""
    import mlx.core as mx

    from engine.generation.canvas_block import CanvasBlock, revise
    from engine.generation.denoising_schedule import plan_denoising
    from engine.sampling.keys import KeySequence

    ids = tokenizer.encode(tale).ids[:CUT]
    state, table, keys = graph.prefill(mx.array([ids])), graph.dequant_embed_weight(), KeySequence(seed)
    plan = plan_denoising(None, canvas_length=graph.canvas_length)
    written: list[int] = []
    passes = 0
    for _ in range(MOST_BLOCKS):
        block, ends = CanvasBlock.of_noise(graph.canvas_length, graph.geometry.vocab_size, keys), False
        while not ends:
            revision = revise(block, graph.decoder_logits(block.current, state, block.feedback), plan)
            ends = bool(revision.flags[1].item())
            if not ends:
                block.feedback = graph.soft_embeddings(revision.probabilities, table)
        passes += block.passes
        canvas = revision.tokens[0].tolist()
        written += canvas[: canvas.index(END)] if END in canvas else canvas
        if END in canvas:
            break
        graph.extend_prefill(revision.tokens, state)
    state.close()
    return Answer(prompt=tokenizer.decode(ids), text=tokenizer.decode(written), tokens=len(written), passes=passes)


def held_out_bits(graph, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Bits per byte with which held-out canvases are told from noisy ones."""
    import mlx.core as mx

    rows = encoded(tokenizer, texts)
    lessons = Lessons(
        rows, canvas=graph.canvas_length, vocab_size=graph.geometry.vocab_size, size=1, seed=HELD_OUT_SEED
    )
    nats, nbytes = 0.0, 0
    for row in rows:
        own = row[CUT : CUT + graph.canvas_length]
        state = graph.prefill(mx.array(row[None, :CUT]))
        for share in NOISE_SHARES:
            batch = lessons.batch([row], CUT, np.array([[share]]))
            logits = graph.decoder_logits(mx.array(batch.noisy), state, None)[0, : len(own)]
            surprise = mx.logsumexp(logits, axis=-1) - logits[mx.arange(len(own)), mx.array(own)]
            nats += mx.sum(surprise).item()
            nbytes += len(tokenizer.decode([int(token) for token in own if token != END]).encode())
        state.close()
    return nats / nbytes / math.log(2)


class Letters:
    """Counts of letters after up to `LETTERS` others, and with them the bits of a text (interpolated, Witten-Bell)."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Count `texts`."""
        self._seen: Counter[str] = Counter()
        self._after: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        for text in texts:
            for end in range(len(text)):
                for length in range(min(LETTERS, end) + 1):
                    before, stretch = text[end - length : end], text[end - length : end + 1]
                    self._kinds[before] += self._seen[stretch] == 0
                    self._seen[stretch] += 1
                    self._after[before] += 1

    def bits_per_byte(self, text: str) -> float:
        """How unlikely `text` is; 0 for an empty one."""
        bits = -sum(math.log2(self._chance(text, end)) for end in range(len(text)))
        return bits / len(text.encode()) if text else 0.0

    def _chance(self, text: str, end: int) -> float:
        chance = 1 / 256
        for length in range(min(LETTERS, end) + 1):
            before = text[end - length : end]
            total, kinds = self._after[before], self._kinds[before]
            if total:
                chance = (self._seen[before + text[end]] + kinds * chance) / (total + kinds)
        return chance


def mean_bits(letters: Letters, texts: Sequence[str]) -> float:
    """The mean over `texts`."""
    return sum(map(letters.bits_per_byte, texts)) / len(texts)


if __name__ == "__main__":
    main()
