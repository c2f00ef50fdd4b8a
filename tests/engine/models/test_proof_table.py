"""The page on models says what the tests prove, no more and no less."""

from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.gguf_architectures import ARCHITECTURES
from tests.engine.models import proof_table, test_gguf_families, tiny_diffusion, tiny_families


def test_the_page_is_what_the_tests_cases_give():
    """If it is not: `python -m tests.engine.models.proof_table`."""
    assert proof_table.PAGE.read_text() == proof_table.page()


def test_every_gguf_architecture_is_proven():
    assert test_gguf_families.MODELS.keys() == ARCHITECTURES.keys()


def test_every_denoising_family_is_on_the_page_and_proven():
    denoising = [name for name, family in FAMILIES.items() if family.method == "denoising"]
    assert denoising == ["diffusion_gemma"]
    assert all(f"`{name}`" in proof_table.DENOISING for name in denoising)
    assert tiny_diffusion.SHAPES.keys() == set(proof_table.denoising_cases())


def test_every_family_has_three_cases_at_least():
    autoregressive = {name for name, family in FAMILIES.items() if family.method == "autoregressive"}
    assert {(ALIASES | FAMILIES)[name].name for name in tiny_families.FAMILIES} == autoregressive
    assert min(len(family.cases) for family in tiny_families.FAMILIES.values()) >= 3
