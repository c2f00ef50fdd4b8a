"""Hugging Face repositories: only what we read is fetched, into the standard cache, and found there again offline."""

import logging

import pytest
from huggingface_hub import constants

from engine.artifacts import hub
from engine.artifacts.artifact import open_artifact
from engine.artifacts.pulling import no_progress
from engine.contracts.errors import MissingArtifactError, NotFoundError
from tests.engine.artifacts.loopback import COMMIT, hub_of, serving
from tests.engine.artifacts.tiny_files import write_folder

REPOSITORY = "org/tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def site(tmp_path):
    """A hub that has a model folder, with more beside it than anybody should fetch."""
    folder = write_folder(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {
        "pytorch_model.bin": b"pickle",
        "original/model.safetensors": b"copy",
        "consolidated.safetensors": b"copy",
    }
    with serving(hub_of(REPOSITORY, files)) as served:
        yield served


def test_a_repository_becomes_a_folder_of_the_files_that_we_read(cache, site):
    seen = []
    folder = hub.download_snapshot(REPOSITORY, None, seen.append, endpoint=site.address)
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "model.safetensors"]
    assert folder.is_relative_to(cache)
    assert open_artifact(folder).config.hidden_size == 64
    assert all(0 <= report.done_bytes <= report.total_bytes for report in seen)


def test_a_cached_repository_is_found_without_a_network(cache, site):
    assert hub.cached_snapshot(REPOSITORY) is None
    folder = hub.download_snapshot(REPOSITORY, None, no_progress, endpoint=site.address)
    assert hub.cached_snapshot(REPOSITORY) == folder
    assert hub.cached_snapshot(REPOSITORY, COMMIT) == folder
    assert hub.cached_snapshot(REPOSITORY, "other") is None
    assert hub.cached_repositories() == {REPOSITORY: folder}


def test_a_snapshot_that_lacks_a_file_does_not_count_as_here(cache, site):
    folder = hub.download_snapshot(REPOSITORY, None, no_progress, endpoint=site.address)
    (folder / "model.safetensors").unlink()
    assert hub.cached_snapshot(REPOSITORY) is None


def test_what_is_here_serves_when_the_hub_is_gone(cache, site):
    folder = hub.download_snapshot(REPOSITORY, None, no_progress, endpoint=site.address)
    assert hub.download_snapshot(REPOSITORY, None, no_progress, endpoint="http://127.0.0.1:9") == folder


def test_an_unknown_repository_is_not_found(cache, site):
    with pytest.raises(NotFoundError, match=r"^no model named 'org/other'$"):
        hub.download_snapshot("org/other", None, no_progress, endpoint=site.address)


def test_a_hub_that_cannot_be_reached_is_one_clear_line_and_one_in_the_log(cache, caplog):
    caplog.set_level(logging.WARNING, "engine")
    with pytest.raises(MissingArtifactError, match=r"^org/tiny: could not be fetched: the hub cannot be reached"):
        hub.download_snapshot(REPOSITORY, None, no_progress, endpoint="http://127.0.0.1:9")
    assert [record.name for record in caplog.records] == ["engine.artifacts.hub"]


def test_the_log_names_what_stopped_a_fetch_and_none_of_its_words(cache, caplog, monkeypatch):
    def refused(*_arguments, **_options):
        raise PermissionError(13, "denied", "/srv/models/hub")

    monkeypatch.setattr(hub, "snapshot_download", refused)
    with pytest.raises(MissingArtifactError) as failure:
        hub.download_snapshot(REPOSITORY, None, no_progress)
    assert "PermissionError" in caplog.text
    assert "/srv" not in caplog.text + str(failure.value)


def test_an_empty_cache_lists_nothing(cache):
    assert hub.cached_repositories() == {}
