"""What a user may write for a model, and where it leads: never outside, never to the network unless asked."""

import hashlib
import subprocess
import sys

import pytest
from huggingface_hub import constants

from engine.artifacts import catalogue, hub, packaged
from engine.artifacts.artifact import open_artifact
from engine.artifacts.catalogue import list_models, pull, resolve
from engine.artifacts.packaged import PACKAGED_MODELS
from engine.contracts.errors import EngineError, MissingArtifactError, NotFoundError
from tests.engine.artifacts.tiny_files import write_folder, write_gguf

ALIAS = "smollm2-135m"


@pytest.fixture(autouse=True)
def nothing_fetches(tmp_path, monkeypatch):
    """No test here may start pip or ask the hub, and the hub's cache is empty."""

    def refuse(*arguments, **options):
        raise AssertionError("something was fetched")

    monkeypatch.setattr(packaged, "_run_pip", refuse)
    monkeypatch.setattr(hub, "download_snapshot", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def place_alias(folder):
    """A file that looks pulled."""
    (model,) = PACKAGED_MODELS
    path = folder / model.alias / model.file
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.size_bytes)
    return path


def test_an_alias_leads_to_its_pulled_file(tmp_path):
    path = place_alias(tmp_path)
    location = resolve(ALIAS, folder=tmp_path)
    assert (location.name, location.path) == (ALIAS, path)
    assert pull(ALIAS, folder=tmp_path) == location


def test_an_alias_that_was_not_pulled_says_how_to_pull_it(tmp_path):
    with pytest.raises(
        MissingArtifactError, match=rf"^{ALIAS}: is not on this machine; `mlx-stream models pull {ALIAS}`"
    ):
        resolve(ALIAS, folder=tmp_path)


def test_folders_and_files_are_used_as_they_are(tmp_path, monkeypatch):
    folder, file = write_folder(tmp_path / "model"), write_gguf(tmp_path / "tiny.Q4_1.gguf")
    monkeypatch.chdir(tmp_path)
    for reference in (str(folder), "model", "./model", "model/"):
        assert (resolve(reference).name, resolve(reference).path) == ("model", folder)
        assert pull(reference) == resolve(reference)
    assert (resolve("tiny.Q4_1.gguf").name, resolve("tiny.Q4_1.gguf").path) == ("tiny.Q4_1", file)
    monkeypatch.chdir(folder)
    assert resolve(".").name == "model"


def test_an_alias_wins_over_a_folder_of_its_name_and_a_folder_over_a_repository(tmp_path, monkeypatch):
    write_folder(tmp_path / ALIAS)
    write_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingArtifactError, match="is not on this machine"):
        resolve(ALIAS, folder=tmp_path / "empty")
    assert resolve(f"./{ALIAS}").path == tmp_path / ALIAS
    assert resolve("org/name").path == tmp_path / "org" / "name"


@pytest.mark.parametrize("reference", ["./gone", "/gone/model", "gone.gguf", "../gone", "~/gone-model"])
def test_a_path_that_leads_nowhere_is_missed_by_its_last_part(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingArtifactError, match=r"^(gone|model|gone\.gguf|gone-model): no such file or folder$"):
        resolve(reference)


NAMES = [
    "",
    "\0",
    "a\0b",
    "Smollm2-135m",
    "SMOLLM2-135M",
    "smollm2",
    "..\\x",
    "%2e%2e/",
    "a/../../b",
    "a/..",
    "x" * 5000,
]
NAMES += [
    "org/name/more",
    "org/na me",
    "org/",
    "/",
    "https://example.test/org/name",
    "~nobody-at-all/x",
    "ž/ž",
    "org/name@",
]


@pytest.mark.parametrize("reference", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("find", [resolve, pull])
def test_a_name_that_means_nothing_opens_and_fetches_nothing(tmp_path, monkeypatch, reference, find):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError) as caught:
        open_artifact(find(reference).path)
    assert str(tmp_path) not in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("reference", ["", "smollm2", "SMOLLM2-135M", "a\0b", "x" * 5000])
def test_an_unknown_name_lists_the_aliases(reference):
    with pytest.raises(NotFoundError, match=f"; known: {ALIAS}$"):
        resolve(reference)


def test_a_repository_is_looked_up_in_the_cache_with_its_revision(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "cached_snapshot", lambda *arguments: asked.append(arguments) or tmp_path)
    assert resolve("org/name").path == tmp_path
    assert resolve("org/name@v1.0").name == "org/name"
    assert asked == [("org/name", None), ("org/name", "v1.0")]


def test_a_repository_that_is_not_here_says_how_to_pull_it():
    with pytest.raises(
        MissingArtifactError, match=r"^org/name: is not on this machine; `mlx-stream models pull org/name`"
    ):
        resolve("org/name")


def test_the_list_has_every_alias_and_every_cached_model_that_can_be_served(tmp_path, monkeypatch):
    good, bad = write_folder(tmp_path / "good"), write_folder(tmp_path / "bad", config={"model_type": "other"})
    monkeypatch.setattr(hub, "cached_repositories", lambda: {"org/good": good, "org/bad": bad})
    alias, cached = list_models(folder=tmp_path / "models")
    assert (alias.name, alias.license, alias.path) == (ALIAS, "Apache-2.0", None)
    assert (cached.name, cached.source, cached.path) == ("org/good", "hub", good)
    place_alias(tmp_path / "models")
    assert list_models(folder=tmp_path / "models")[0].path is not None


def test_models_are_kept_in_the_user_s_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    assert catalogue.models_folder() == tmp_path / "mlx-stream" / "models"


def test_finding_a_model_imports_neither_mlx_nor_the_hub_s_client():
    code = (
        "import sys; from engine.execution import catalogue\n"
        "try: catalogue.resolve('no such model')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print([name for name in ('mlx', 'mlx.core', 'huggingface_hub', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["NotFoundError", "[]"]


def test_the_demo_model_is_the_pinned_one_and_as_described(demo_model_path):
    (model,) = PACKAGED_MODELS
    with demo_model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    artifact = open_artifact(demo_model_path)
    config = artifact.config
    assert (artifact.parameters, artifact.stored_quantization) == (134_515_008, "Q4_1")
    assert sorted({header.dtype for header in artifact.tensors.values()}) == ["F32", "Q4_1", "Q8_0"]
    assert (config.layers, config.heads, config.kv_heads, config.context_length) == (30, 9, 3, 8192)
    assert (config.layer_ropes[0].theta, config.layer_ropes[0].traditional, config.tie_word_embeddings) == (
        100_000.0,
        True,
        True,
    )
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
