"""The tokens file: what it may hold, how a token is looked up, and that nothing secret is ever shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from service.callers import Permission
from service.reading import UnusableFileError
from service.tokens import MAX_TOKENS, followed_tokens, read_tokens

SECRET = "a-secret-of-many-characters"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_an_entry_says_what_its_owner_may_do(tmp_path: Path) -> None:
    text = f"""
        [team-a]
        token = "{SECRET}"
        max_streams = 2
        max_prompt_tokens = 100
        [operator]
        token_sha256 = "{hashlib.sha256(b"another-secret-entirely").hexdigest().upper()}"
        permissions = ["admin", "application"]
    """
    table = read_tokens(write(tmp_path, text))
    team, operator = table.caller_of(SECRET), table.caller_of("another-secret-entirely")
    assert team is not None
    assert operator is not None
    assert (team.name, team.permissions) == ("team-a", {Permission.APPLICATION})
    assert (team.max_streams, team.max_prompt_tokens) == (2, 100)
    assert (operator.name, operator.permissions) == ("operator", set(Permission))
    assert (operator.max_streams, operator.max_prompt_tokens) == (None, None)
    for wrong in ("", SECRET[:-1], SECRET + "x", SECRET.upper(), DIGEST, "team-a", "\ud800"):
        assert table.caller_of(wrong) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must hold from 1 to 1000 tokens"),
        ("[a]\nb =\nc", r"not TOML \(line 2\)"),
        (f'a = "{SECRET}"', "a must be a table"),
        ("[a]", "one of token and token_sha256"),
        (f'[a]\ntoken = "{SECRET}"\ntoken_sha256 = "{DIGEST}"', "one of token and token_sha256"),
        ('[a]\ntoken = "secret"', r"a\.token"),
        (f'[a]\ntoken = "{SECRET} with spaces"', "visible ASCII"),
        (f'[a]\ntoken = "{SECRET}é"', "visible ASCII"),
        ('[a]\ntoken_sha256 = "secret"', "64 hexadecimal digits"),
        (f'[a]\ntoken = "{SECRET}"\npermissions = []', r"a\.permissions"),
        (f'[a]\ntoken = "{SECRET}"\npermissions = ["root"]', "permissions must be of application, admin"),
        (f'[a]\ntoken = "{SECRET}"\nmax_streams = 0', r"a\.max_streams"),
        (f'[a]\ntoken = "{SECRET}"\nmax_streams = "2"', r"a\.max_streams"),
        (f'[a]\ntoken = "{SECRET}"\npermission = "admin"', r"a\.permission: no such key"),
        (f'[a]\ntoken = "{SECRET}"\n[b]\ntoken_sha256 = "{DIGEST}"', "two names have the same token"),
        (f'["a b"]\ntoken = "{SECRET}"', "a name is 1 to 64 letters"),
        (f'[a.b]\ntoken = "{SECRET}"', r"a\.b: no such key"),
    ],
)
def test_a_file_with_a_mistake_is_refused_and_nothing_secret_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UnusableFileError, match=told) as failure:
        read_tokens(write(tmp_path, text))
    for secret in (SECRET, DIGEST, '"secret"', str(tmp_path)):
        assert secret not in str(failure.value)


def test_as_many_tokens_as_are_allowed_are_read(tmp_path: Path) -> None:
    entries = [f'[t{index}]\ntoken = "{SECRET}-{index}"\n' for index in range(MAX_TOKENS + 1)]
    assert len(read_tokens(write(tmp_path, "".join(entries[:-1]))).entries) == MAX_TOKENS
    with pytest.raises(UnusableFileError, match=f"got {MAX_TOKENS + 1}"):
        read_tokens(write(tmp_path, "".join(entries)))


def test_every_token_is_compared_whichever_is_presented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_tokens(write(tmp_path, "".join(f'[t{i}]\ntoken = "{SECRET}-{i}"\n' for i in range(5))))
    compared: list[bytes] = []

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr("service.tokens.hmac.compare_digest", counting)
    for presented in (f"{SECRET}-0", f"{SECRET}-4", "nobody's"):
        compared.clear()
        table.caller_of(presented)
        assert len(compared) == 5


def test_nothing_that_is_printed_of_a_table_is_secret(tmp_path: Path) -> None:
    table = read_tokens(write(tmp_path, f'[a]\ntoken = "{SECRET}"'))
    for shown in (repr(table), str(table), repr(table.caller_of(SECRET))):
        assert SECRET not in shown
        assert DIGEST not in shown
        assert repr(bytes.fromhex(DIGEST)) not in shown


def test_a_changed_file_is_followed_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.reloading.LOOK_SECONDS", 0)
    current = followed_tokens(write(tmp_path, f'[a]\ntoken = "{SECRET}-1"'))
    write(tmp_path, f'[b]\ntoken = "{SECRET}-22"')
    assert current().caller_of(f"{SECRET}-1") is None
    assert current().caller_of(f"{SECRET}-22") is not None
    write(tmp_path, f'[b]\ntoken = "{SECRET}-333" oops')
    assert current().caller_of(f"{SECRET}-22") is not None
    (tmp_path / "tokens.toml").unlink()
    assert current().caller_of(f"{SECRET}-22") is not None
    assert caplog.text.count("the last good one stays") == 2
    assert SECRET not in caplog.text
    write(tmp_path, f'[b]\ntoken = "{SECRET}-4444"')
    assert current().caller_of(f"{SECRET}-22") is None
