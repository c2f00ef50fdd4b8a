"""The page on models says what the tests prove, no more and no less."""

from engine.artifacts.families import ALIASES, FAMILIES
from engine.artifacts.gguf_architectures import ARCHITECTURES
from tests.engine.models import proof_table, test_gguf_families, tiny_families


def test_the_page_is_what_the_tests_cases_give():
    """If it is not: `python -m tests.engine.models.proof_table`."""
    assert proof_table.PAGE.read_text() == proof_table.page()


def test_every_gguf_architecture_is_proven():
    assert test_gguf_families.MODELS.keys() == ARCHITECTURES.keys()


def test_every_family_has_three_cases_at_least():
    assert {(ALIASES | FAMILIES)[name].name for name in tiny_families.FAMILIES} == FAMILIES.keys()
    assert min(len(family.cases) for family in tiny_families.FAMILIES.values()) >= 3
