"""One configuration object: flags before variables before the file before defaults, and nothing unknown."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic
import pytest

from service.configuration import SettingsError, flag_of, load_settings
from service.settings import ServerSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLX_STREAM_")]:
        monkeypatch.delenv(name)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(text)
    return path


def test_defaults_need_a_model_alone() -> None:
    settings = load_settings({"model": "m"}, None)
    assert settings.listen == "127.0.0.1:50051"
    assert not settings.insecure
    assert settings.max_rows == 32


def test_flags_come_before_variables_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'model = "file"\nlisten = "127.0.0.1:1"\nmax_rows = 3\n')
    monkeypatch.setenv("MLX_STREAM_LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("MLX_STREAM_MODEL", "variable")
    settings = load_settings({"model": "flag"}, file)
    assert (settings.model, settings.listen, settings.max_rows) == ("flag", "127.0.0.1:2", 3)


@pytest.mark.parametrize("value", [True, " 8", "8_0", "0x8", "\uff18"])
def test_what_only_looks_like_a_number_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="--max-rows: must be a number"):
        load_settings({"model": "m", "max_rows": value}, None)
    with pytest.raises(SettingsError, match="--keepalive-seconds: must be a number"):
        load_settings({"model": "m", "keepalive_seconds": value}, None)


def test_numbers_of_variables_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STREAM_MAX_ROWS", "8")
    monkeypatch.setenv("MLX_STREAM_KEEPALIVE_SECONDS", "2.5e1")
    settings = load_settings({"model": "m"}, None)
    assert (settings.max_rows, settings.keepalive_seconds) == (8, 25.0)


def test_a_path_that_is_empty_is_refused_and_a_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="state_dir: must not be empty"):
        load_settings({"model": "m"}, write(tmp_path, 'state_dir = ""\n'))
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = load_settings({"model": "m", "adapters": ["a=~/a"]}, write(tmp_path, 'state_dir = "~/x"\n'))
    assert settings.state_dir == tmp_path / "x"
    assert settings.adapters == (("a", tmp_path / "a"),)


@pytest.mark.parametrize("endpoint", ["http://user:secret@h:1", "http://h:1?key=secret", "http://h:1#secret"])
def test_an_endpoint_holds_no_secret_and_is_not_repeated(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint") as refused:
        load_settings({"model": "m", "otlp_endpoint": endpoint}, None)
    assert "secret@" not in str(refused.value)
    assert "=secret" not in str(refused.value)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STREAM_MAX_ROWS", "")
    assert load_settings({"model": "m"}, None).max_rows == 32


@pytest.mark.parametrize("name", ["modle", "adapter", "token"])
def test_a_key_that_nobody_knows_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: no such setting"):
        load_settings({"model": "m"}, write(tmp_path, f'{name} = "x"\n'))
    with pytest.raises(SettingsError, match=f"{name}: no such setting"):
        load_settings({"model": "m", name: "x"}, None)
    monkeypatch.setenv(f"MLX_STREAM_{name.upper()}", "x")
    with pytest.raises(SettingsError, match=f"MLX_STREAM_{name.upper()}: no such setting"):
        load_settings({"model": "m"}, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("max_rows", 0),
        ("max_rows", "many"),
        ("max_queue", 0),
        ("prefill_step_tokens", 0),
        ("row_tile_tokens", 0),
        ("prefix_cache_bytes", -1),
        ("prefix_cache_disk_bytes", 1000),
        ("kv_storage", "affine5"),
        ("kv_storage", ""),
        ("adapters", ("a",)),
        ("adapters", ("a=",)),
        ("adapters", ("=folder",)),
        ("adapters", ("a+b=folder",)),
        ("adapters", ("a=x", "a=y")),
        ("adapters", 3),
        ("adapters", [3]),
        ("device", "tpu"),
        ("dtype", "int4"),
        ("log_level", "loud"),
        ("shutdown_grace_seconds", float("nan")),
        ("health_stall_seconds", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SettingsError) as failure:
        load_settings({"model": "m", key: value}, None)
    assert str(failure.value).startswith(f"{flag_of(key)}: ")
    assert "\n" not in str(failure.value)


def test_adapters_are_named_folders_from_flags_a_variable_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (("a", Path("x=1")), ("b.c", Path("/y")))
    assert load_settings({"model": "m"}, None).engine_settings().adapters == ()
    flags = {"model": "m", "adapters": ("a=x=1", "b.c=/y")}
    assert load_settings(flags, None).engine_settings().adapters == wanted
    file = write(tmp_path, 'adapters = ["a=x=1", "b.c=/y"]\n')
    assert load_settings({"model": "m"}, file).engine_settings().adapters == wanted
    monkeypatch.setenv("MLX_STREAM_ADAPTERS", "a=x=1,b.c=/y")
    assert load_settings({"model": "m"}, None).engine_settings().adapters == wanted


def test_a_missing_model_is_named() -> None:
    with pytest.raises(SettingsError, match="model: must be given"):
        load_settings({}, None)


def test_a_script_takes_the_place_of_a_model() -> None:
    assert load_settings({"engine": "script:a/b.json"}, None).script_file == Path("a/b.json")
    assert load_settings({"model": "m"}, None).script_file is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"engine": "script:"}, "engine: must be mlx or script:FILE"),
        ({"engine": "other", "model": "m"}, "engine: must be mlx or script:FILE"),
        ({"engine": "script:x", "model": "m"}, "model: a script names its own model"),
        ({"engine": "mlx"}, "model: must be given"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_settings(flags, None)


@pytest.mark.parametrize(("name", "value"), [("max_rows", "abc"), ("device", "tpu"), ("shutdown_grace_seconds", "-1")])
def test_a_bad_value_of_a_variable_is_refused_under_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"MLX_STREAM_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"^MLX_STREAM_{name.upper()}: "):
        load_settings({"model": "m"}, None)
    with pytest.raises(SettingsError, match=f"^{flag_of(name)}: "):
        load_settings({"model": "m", name: "bad"}, None)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('max_rows = "x"', "max_rows: must be a number, got 'x'"),
        ("max_rows = 1.5", "max_rows: must be a whole number"),
        ("insecure = 3", "insecure: must be true or false"),
        ("model = 3", "model: must be text"),
        ("max_row = 3", "max_row: no such setting"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_the_files_name_and_in_our_words(
    tmp_path: Path, line: str, problem: str
) -> None:
    file = write(tmp_path, f"{line}\n")
    flags = {} if line.startswith("model") else {"model": "m"}
    with pytest.raises(SettingsError) as refused:
        load_settings(flags, file)
    assert str(refused.value) == f"{file}: {problem}"


@pytest.mark.parametrize("text", ["model = ", "\x00", "[[["])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="not TOML"):
        load_settings({}, write(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_settings({"model": "m"}, tmp_path / "none.toml")


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(SettingsError) as failure:
            load_settings({"model": "m"}, path)
        assert str(failure.value) == f"{path}: not a regular file"


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "m"\n' + "#" * (1024 * 1024 - 12))
    assert load_settings({}, path).model == "m"
    with path.open("a") as file:
        file.write("#")
    with pytest.raises(SettingsError) as failure:
        load_settings({}, path)
    assert str(failure.value) == f"{path}: larger than 1048576 bytes"


def test_a_prefix_folder_needs_memory_and_its_size_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^--prefix-cache-dir: cannot be used while prefix_cache_bytes is 0$"):
        load_settings({"model": "m", "prefix_cache_bytes": 0, "prefix_cache_dir": tmp_path}, None)
    with pytest.raises(SettingsError, match=r"^--prefix-cache-disk-bytes: bounds nothing without prefix_cache_dir$"):
        load_settings({"model": "m", "prefix_cache_disk_bytes": 10}, None)
    flags = {"model": "m", "prefix_cache_dir": tmp_path, "prefix_cache_disk_bytes": 10}
    assert load_settings(flags, None).engine_settings().prefix_cache_disk_bytes == 10


def test_settings_are_frozen() -> None:
    settings = load_settings({"model": "m"}, None)
    with pytest.raises(pydantic.ValidationError):
        settings.model = "other"  # type: ignore[misc]


def test_auto_leaves_the_choice_to_the_engine() -> None:
    engine = load_settings({"model": "m", "device": "cpu", "state_dir": "s"}, None).engine_settings()
    assert (engine.model, engine.device, engine.dtype, engine.blas) == ("m", "cpu", None, None)
    assert engine.state_dir == Path("s")


def test_every_engine_setting_is_ours_to_set() -> None:
    flags = {"model": "m", "row_tile_tokens": 8, "kv_storage": "affine8-g32-start100"}
    engine = load_settings(flags, None).engine_settings()
    assert (engine.row_tile_tokens, engine.kv_storage) == (8, "affine8-g32-start100")
    assert set(type(engine).__slots__) <= set(ServerSettings.model_fields)
