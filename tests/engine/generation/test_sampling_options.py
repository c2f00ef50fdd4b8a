"""Options of the sampler in whole steps: ahead of the host, in company, after a restart, the ids are the same."""

import pytest

from engine.contracts.results import SampledToken
from engine.generation.autoregressive import dispatch_packed_step
from tests.engine.generation.test_autoregressive import ahead, committed, row, waiting
from tests.engine.models import tiny_llama

LOUD = {"repetition_penalty": 1.7, "presence_penalty": 2.0, "frequency_penalty": 1.5}
KINDS = {
    "greedy": {},
    "bias": {"logit_bias": ((5, 9.0), (6, -30.0))},
    "repetition": {"repetition_penalty": 3.0},
    "presence, window of four": {"presence_penalty": 9.0, "presence_context_size": 4},
    "frequency, whole history": {"frequency_penalty": 2.0, "frequency_context_size": 10_000},
    "every processor": LOUD | {"logit_bias": ((1, 2.0), (90, -2.0)), "repetition_context_size": 3},
    "every processor, drawn": LOUD | {"temperature": 0.9, "top_p": 0.8, "presence_context_size": 2},
    "drawn": {"temperature": 0.8},
}


def company(binding, **changes):
    return [
        row(binding.make_cache(), tiny_llama.random_prompt(seed, 3 + 2 * seed), **(kind | {"seed": seed} | changes))
        for seed, kind in enumerate(KINDS.values())
    ]


@pytest.fixture(scope="module")
def binding(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.write(folder, scale=4.0, tie_word_embeddings=False)
    return tiny_llama.bind(folder)


@pytest.fixture(scope="module")
def alone(binding):
    """The ids of each row by itself, one step after the other."""
    return [waiting(binding, [one])[0] for one in company(binding)]


def test_a_row_gives_the_same_ids_alone_and_in_company(binding, alone):
    assert waiting(binding, company(binding)) == alone
    assert waiting(binding, company(binding)[::-1]) == alone[::-1]


def test_steps_ahead_of_the_host_see_the_same_history(binding, alone):
    found, overlapped = ahead(binding, company(binding))
    assert found == alone
    assert overlapped > 5 * len(KINDS)


def test_each_kind_of_row_differs_from_the_plain_one(binding, alone):
    plain = [waiting(binding, [one])[0] for one in _plain(binding)]
    differing = [name for name, ids, other in zip(KINDS, alone, plain, strict=True) if ids != other]
    assert differing == [name for name in KINDS if name != "greedy"]


def _plain(binding):
    return [
        row(binding.make_cache(), tiny_llama.random_prompt(seed, 3 + 2 * seed), seed=seed) for seed in range(len(KINDS))
    ]


@pytest.mark.parametrize("at", [1, 4])
def test_a_restart_forgets_nothing_of_the_history(binding, alone, at):
    rows, ids = company(binding), {}
    while any(one.next_index < at for one in rows):
        waiting_rows = [one for one in rows if one.next_index < at]
        committed(waiting_rows, dispatch_packed_step(binding, waiting_rows).read(), ids)
    for one in rows:
        one.restart(binding.make_cache())
    rest = waiting(binding, rows)
    assert [ids[one] + more for one, more in zip(rows, rest, strict=True)] == alone


def test_a_repeated_token_is_penalised_from_the_very_next_step(binding):
    """With a crushing penalty no id of the window ever comes back."""
    made = row(binding.make_cache(), [1, 2, 3], presence_penalty=1e6, presence_context_size=1000, max_tokens=40)
    found, _ = ahead(binding, [made])
    assert len(set(found[0]) | {1, 2, 3}) == 43


def test_a_row_that_fails_in_its_processor_fails_alone(binding, alone):
    rows = company(binding)
    bad = row(binding.make_cache(), [4, 5, 6])
    bad._recipe.bias_ids = "not an array"
    with pytest.raises(TypeError):
        waiting(binding, [*rows, bad])
    for one in rows:
        one.restart(binding.make_cache())
    assert waiting(binding, rows) == alone


def test_windows_hold_the_newest_tokens_of_prompt_and_completion(binding):
    made = row(binding.make_cache(), [1, 2, 3, 4], presence_penalty=1.0, presence_context_size=3)
    assert made.next_draw(None).history == [2, 3, 4]
    for token in (7, 8):
        made.commit(SampledToken(token))
    assert made.next_draw(None).history == [4, 7, 8]
    assert made.next_draw(5).unread == 5
    made.commit(SampledToken(9))
    assert made.next_draw(None).history == [7, 8, 9]
    everything = row(binding.make_cache(), [1, 2], presence_penalty=1.0, presence_context_size=50)
    everything.commit(SampledToken(3))
    assert everything.next_draw(None).history == [1, 2, 3]
    assert row(binding.make_cache(), [1, 2]).next_draw(None).history == []
