"""Whole generations against mlx-vlm's, on tiny random models: ids, ends, counts and passes, to the token.

Random weights have flat scores, of which nothing is ever sure; so the tables are scaled, and each group checks that
what it is to prove has really happened. Both sides use the library's own exponential: ours moves scores by a bit, which
over many passes is an id where two scores are as close.
"""

from dataclasses import dataclass

import pytest

from engine.contracts.option_groups import DenoisingOptions
from engine.generation.bindings.denoising import bind_denoising_model
from engine.generation.denoising import dispatch_denoising_unit
from engine.generation.denoising_schedule import plan_denoising
from tests.engine.generation import denoising_oracle
from tests.engine.generation.denoising_oracle import Told
from tests.engine.generation.scripted_denoiser import make_row
from tests.engine.models import tiny_diffusion

END = 1
SEEDS = range(17)
STABLE = {"stability_threshold": 1, "confidence_threshold": 1.0}


@dataclass(frozen=True)
class Case:
    """One request: the caller's own `DenoisingOptions`, and where mlx-vlm takes the same from."""

    seed: int
    max_tokens: int
    sampler: str = "confidence-threshold"
    threshold: float = 0.9
    entropy_bound: float = 0.1
    stable: bool = False
    passes: int = 5
    least: int = 4

    @property
    def prompt(self):
        return tiny_diffusion.ids(self.seed, 3 + self.seed % 20)

    @property
    def ours(self):
        return DenoisingOptions(
            max_denoising_steps=self.passes,
            min_canvas_length=self.least,
            sampler=self.sampler,
            threshold=self.threshold,
            entropy_bound=self.entropy_bound,
            **(STABLE if self.stable else {}),
        )

    def oracle(self, model):
        return denoising_oracle.generate(
            model, self.prompt, seed=self.seed, ends={END}, max_tokens=self.max_tokens,
            stopping=STABLE if self.stable else None,
            bounds={"sampler_config": {"entropy_bound": self.entropy_bound}},
            max_denoising_steps=self.passes, diffusion_min_canvas_length=self.least,
            diffusion_sampler=self.sampler, diffusion_threshold=self.threshold,
        )  # fmt: skip

    def run(self, binding):
        plan = plan_denoising(self.ours, canvas_length=binding.geometry.canvas_length)
        row, _ = make_row(self.prompt, max_tokens=self.max_tokens, eos_token_ids=(END,), seed=self.seed, denoising={})
        row.plan = plan
        row.admit([])
        tokens, finished = [], None
        while finished is None:
            events, finished = row.receive(dispatch_denoising_unit(binding, row).read())
            tokens += [token.token for event in events for token in getattr(event, "tokens", ()) if event]
        row.close()
        stats = finished.stats
        examined = stats.generated_tokens + (finished.finish_reason.value == "stop")
        done = stats.denoising
        return Told(tuple(tokens), finished.finish_reason.value, examined, done.steps, done.canvas_tokens, done.blocks)


GROUPS = {
    "confident, one block": [Case(seed, max_tokens=12, threshold=0.9) for seed in SEEDS],
    "confident, several blocks": [Case(seed, max_tokens=40, threshold=(0.3, 0.6, 0.9)[seed % 3]) for seed in SEEDS],
    "by entropy, one block": [Case(seed, max_tokens=12, sampler="entropy-bound") for seed in SEEDS],
    "by entropy, several blocks": [
        Case(seed, max_tokens=40, sampler="entropy-bound", entropy_bound=(0.1, 2.0)[seed % 2]) for seed in SEEDS
    ],
    "confident, stable stop": [Case(seed, max_tokens=33, threshold=1.0, stable=True, passes=8) for seed in SEEDS],
    "by entropy, stable stop": [
        Case(seed, max_tokens=33, sampler="entropy-bound", entropy_bound=8.0, stable=True, passes=8) for seed in SEEDS
    ],
}
WEIGHTS = ("dense", "4-bit")


@pytest.fixture(scope="module", params=WEIGHTS)
def pair(request, tmp_path_factory):
    """mlx-vlm's model, and ours of the same files; with 4 bits both compute in float32."""
    folder = tmp_path_factory.mktemp("parity") / "tiny"
    if request.param == "dense":
        model = tiny_diffusion.build(scale=6.0)
        tiny_diffusion.save(folder, model)
        return model, bind_denoising_model(tiny_diffusion.graph(folder, library_arithmetic=True))
    model = tiny_diffusion.build(scale=6.0, **tiny_diffusion.WIDE)
    quantization = tiny_diffusion.quantize(model)
    tiny_diffusion.save(folder, model, quantization=quantization)
    return model, bind_denoising_model(tiny_diffusion.graph(folder, dequantize=False, library_arithmetic=True))


@pytest.mark.parametrize("group", GROUPS)
def test_generations_equal_mlx_vlm_s(pair, group):
    model, binding = pair
    told = {case: case.oracle(model) for case in GROUPS[group]}
    assert [case for case, wanted in told.items() if case.run(binding) != wanted] == []
    require_what_is_to_be_proven(group, told)


def require_what_is_to_be_proven(group, told):
    """Ends and budgets, more blocks than one, and blocks that end before their last pass, where a group says so."""
    ends = {wanted.reason for wanted in told.values()}
    early = [case for case, wanted in told.items() if wanted.passes < case.passes * wanted.blocks]
    assert ends == {"stop", "length"}
    assert (max(wanted.blocks for wanted in told.values()) > 1) == ("one block" not in group)
    if group in ("by entropy, one block", "by entropy, several blocks"):
        assert not early, "only a stable canvas ends a block of this sampler"
    else:
        assert 3 * len(early) > len(told)
    if group.startswith("confident"):
        assert len({wanted.passes for wanted in told.values()}) > 2, "acceptance must depend on the case"


def test_there_are_as_many_cases_as_promised():
    assert len(WEIGHTS) * len({(group, case) for group, cases in GROUPS.items() for case in cases}) >= 200
