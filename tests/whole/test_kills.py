"""Servers that are killed at random moments, started again, and streams that never notice: the short form.

The long one is `python -m benchmarks.resuming`.
"""

import pytest

from benchmarks.resuming.kills import Server, under_fire
from tests.engine import tiny_model

KILLS = 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("storage", ["plain", "affine8-start100"])
async def test_streams_of_every_kind_survive_kills_at_any_moment(tmp_path, storage):
    folder = tmp_path / "tiny"
    tiny_model.write(folder, max_position_embeddings=8192, head_dim=64)
    server = Server(str(folder), tmp_path / "state", ["--kv-storage", storage, "--row-tile-tokens", "8"])
    report = await under_fire(
        server, kills=KILLS, seed=5, vocabulary=tiny_model.VOCAB, prompt_tokens=60, max_tokens=450
    )
    assert report.kills >= KILLS
    assert report.resumptions > 0
    assert report.different == []
    assert report.lost_or_doubled == []
