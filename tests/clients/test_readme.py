"""What the READMEs promise of options, this build keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.contracts.errors import UnsupportedOptionError
from engine.generation.planning import refuse_unavailable
from mlxstream.requests import filled
from mlxstream.v1.options_pb2 import GenerateOptions
from service.decode_options import decode_options

ROOT = Path(__file__).resolve().parents[2]
ASKED = {
    "xtc_special_tokens": [1],
    "eos_token_ids": [1],
    "stop_sequences": ["x"],
    "hlg": {"oetf": True},
    "curve": [(0, 0), (100, 100)],
    "logit_bias": {1: 1.0},
    "adapters": ["a"],
    "json_schema": {},
    "json_object": True,
    "regex": "a",
    "grammar": "root ::= 'a'",
    "choice": ["a"],
    "cache_session_id": "a",
    "cache": {"bypass": True},
    "speculation": {"draft_tokens": 1},
    "fill": "echo",
    "denoising": {"threshold": 0.5},
    "xtc_threshold": 0.1,
    "repetition_penalty": 1.1,
}


def is_honoured(name: str) -> bool:
    """Whether the engine takes the option when it is asked to do something."""
    try:
        refuse_unavailable(decode_options(filled(GenerateOptions(), {name: ASKED.get(name, 1)}, "option")))
    except UnsupportedOptionError:
        return False
    return True


def test_the_readme_lists_exactly_the_options_that_this_build_refuses() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = re.search(r"This build refuses (.*?)\.\n", text, re.DOTALL)
    assert sentence is not None
    refused = {name for name in GenerateOptions.DESCRIPTOR.fields_by_name if not is_honoured(name)}
    assert set(re.findall(r"`(\w+)`", sentence.group(1))) == refused


@pytest.mark.parametrize("readme", ["README.md", "clients/python/README.md"])
def test_no_example_uses_an_option_that_is_refused(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    used = set(re.findall(r"(\w+)=", text)) & set(GenerateOptions.DESCRIPTOR.fields_by_name)
    assert used
    assert [name for name in used if not is_honoured(name)] == []
