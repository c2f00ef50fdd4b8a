"""`mlx-stream models`: what a user sees, and one clear line when it cannot be done."""

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner

from engine.contracts.errors import NotFoundError
from engine.execution import catalogue
from engine.execution.catalogue import CatalogueEntry, ModelLocation, PullProgress
from service.cli.models import models
from tests.engine import tiny_model


def run(*arguments):
    return CliRunner().invoke(models, arguments)


def test_the_list_shows_names_sizes_and_what_is_here(monkeypatch, tmp_path):
    entries = [
        CatalogueEntry(name="tiny", source="alias", size_bytes=98_362_432, summary="A model", license="Apache-2.0"),
        CatalogueEntry(name="org/name", source="hub", size_bytes=2_000_000, path=tmp_path),
    ]
    monkeypatch.setattr(catalogue, "list_models", lambda: entries)
    result = run("list")
    header, alias, cached = (line.split() for line in result.output.splitlines())
    assert header[:4] == ["NAME", "SIZE", "HERE", "LICENSE"]
    assert alias == ["tiny", "98", "MB", "no", "Apache-2.0", "A", "model"]
    assert cached == ["org/name", "2", "MB", "yes"]
    assert result.exit_code == 0


def test_a_list_that_is_piped_has_one_whole_line_for_each_model(monkeypatch):
    summary = "a model of which there is very much to say " * 5
    entry = CatalogueEntry(name="tiny", source="alias", size_bytes=1, summary=summary.strip(), license="MIT")
    short = CatalogueEntry(name="b", source="alias", size_bytes=1)
    monkeypatch.setattr(catalogue, "list_models", lambda: [entry, short])
    _, row, other = run("list").output.splitlines()
    assert row.endswith(summary.strip())
    assert other == other.rstrip()


def test_the_help_page_cuts_no_summary():
    _, commands = run("--help").output.split("Commands:")
    assert "..." not in commands


def test_a_pull_says_where_the_model_is_and_keeps_its_progress_off_standard_output(monkeypatch, tmp_path):
    def pull(reference, progress):
        for stage in ("waiting", "downloading", "unpacking"):
            progress(PullProgress(stage=stage, done_bytes=1, total_bytes=98_000_000))
            progress(PullProgress(stage=stage, done_bytes=2, total_bytes=98_000_000))
        return ModelLocation(name=reference, path=tmp_path / "tiny.gguf")

    monkeypatch.setattr(catalogue, "pull", pull)
    result = run("pull", "tiny")
    assert result.stdout == f"tiny is in {tmp_path / 'tiny.gguf'}\n"
    assert result.stderr.splitlines() == [
        "tiny: waiting for another pull",
        "tiny: downloading (98 MB)",
        "tiny: unpacking and checking",
    ]
    assert result.exit_code == 0


def test_a_pull_that_cannot_be_done_is_one_line_and_a_failing_exit(monkeypatch):
    def pull(reference, progress):
        raise NotFoundError("model", reference, known=["tiny"])

    monkeypatch.setattr(catalogue, "pull", pull)
    result = run("pull", "[bold]x")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == "Error: no model named '[bold]x'; known: tiny"


@pytest.mark.parametrize("arguments", [["pull"], ["pull", "a", "b"], ["push", "a"]])
def test_wrong_usage_is_explained(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_an_estimate_is_made_from_headers(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=512)
    result = run("estimate", str(tmp_path / "tiny"), "--context", "300", "--rows", "4", "--device", "cpu")
    lines = dict(line.split("  ", 1) for line in result.output.splitlines())
    assert lines["fits"].strip() == "yes"
    assert lines["longest context"].strip() == "512 tokens"
    assert {"weights", "keys and values", "workspace", "together", "free"} < set(lines)
    assert lines["asked for"].strip() == "4 generations of 300 tokens"
    assert lines["together"].endswith(" that may be used")
    fewer = run("estimate", str(tmp_path / "tiny"), "--device", "cpu")
    assert fewer.exit_code == 0, "the default is no longer than the model"
    assert "1 generation of 512 tokens" in fewer.output
    for context in ("513", "99999999999999999999"):
        result = run("estimate", str(tmp_path / "tiny"), "--context", context, "--device", "cpu")
        assert result.exit_code == 1
        assert result.output == "Error: --context: at most 512, as much as the model holds\n"
    result = run("estimate", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert "dtype" in run("estimate", str(tmp_path / "tiny"), "--dtype", "int4").output


def test_an_estimate_knows_how_keys_and_values_are_stored(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=512, head_dim=64)

    def told(*arguments):
        result = run("estimate", str(tmp_path / "tiny"), "--rows", "99", "--device", "cpu", *arguments)
        return dict(line.split("  ", 1) for line in result.output.splitlines())["keys and values"].split()

    plain, quantized = told(), told("--kv-storage", "affine4")
    assert plain[1] == quantized[1] == "MB"
    assert 0 < float(quantized[0]) < float(plain[0])
    assert "kv_storage" in run("estimate", str(tmp_path / "tiny"), "--kv-storage", "q").output.replace("-", "_")


def test_an_inspection_is_a_page_for_people(tmp_path):
    tiny_model.write(tmp_path / "m")
    result = run("inspect", str(tmp_path / "m"))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "m"
    told = dict(line.split(None, 1) for line in lines[1 : lines.index("")])
    assert told["family"].strip() == "llama (a folder)"
    assert told["layers"].strip() == "2 (2 full)"
    assert told["chat"].strip() == "has a template"
    assert any(line.split()[:2] == ["mlp.up_proj", "F32"] for line in lines)


def test_an_inspection_is_json_for_tools(tmp_path):
    tiny_model.write(tmp_path / "m")
    result = run("inspect", str(tmp_path / "m"), "--json")
    report = json.loads(result.stdout)
    assert report["geometry"]["layers"] == 2
    assert report["text"]["has_chat_template"] is True
    assert report["storage"]["forms"][0]["form"] == "F32"
    assert result.exit_code == 0


def test_a_model_that_cannot_be_served_is_explained_with_a_failing_exit(tmp_path):
    tiny_model.write(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").unlink()
    result = run("inspect", str(tmp_path / "m"))
    assert result.exit_code == 1
    assert "cannot be served: " in result.stdout
    assert "tokenizer.json" in result.stdout
    (tmp_path / "m/config.json").write_text("{")
    result = run("inspect", str(tmp_path / "m"))
    assert result.exit_code == 1
    assert result.stdout.split("\n")[:2] == ["m", "cannot be served: m/config.json: is not JSON"]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "too short for a header"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pytorch_model.bin: PyTorch files are not read",
        ),
    ],
)
def test_a_broken_model_is_an_object_with_its_reasons_too(tmp_path, break_it, reason):
    tiny_model.write(tmp_path / "m")
    break_it(tmp_path / "m")
    result = run("inspect", str(tmp_path / "m"), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["name"] == "m"
    assert len(report["problems"]) == 1
    assert reason in report["problems"][0]


def test_a_model_that_is_not_there_is_an_object_too(tmp_path):
    result = run("inspect", str(tmp_path / "nothing"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == ["nothing: no such file or folder"]


def test_what_files_say_cannot_drive_the_terminal(tmp_path):
    tiny_model.write(tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    tensors = mx.load(str(path)) | {"\x1b[2Jevil [bold]x": mx.zeros((2, 2))}
    mx.eval(tensors)
    mx.save_safetensors(str(path), tensors)
    result = run("inspect", str(tmp_path / "m"))
    assert "\x1b" not in result.stdout
    assert "evil [bold]x" in result.stdout
    assert result.exit_code == 1
