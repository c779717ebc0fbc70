"""Secrets in command lines and configurations: none is recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cirron.session import masking

WITH_SECRETS = [
    (["--api-key=abc", "--lr=0.1"], ["--api-key=***", "--lr=0.1"]),
    (["--api-key", "abc", "--lr", "0.1"], ["--api-key", "***", "--lr", "0.1"]),
    (["--api_key", "abc=="], ["--api_key", "***"]),
    (["--password", "1234"], ["--password", "***"]),
    (["--password", "-x1"], ["--password", "***"]),
    (["--tokens", "a", "b", "-n", "c"], ["--tokens", "***", "***", "-n", "c"]),
    (["WANDB_API_KEY=abc"], ["WANDB_API_KEY=***"]),
    (["+logger.auth=abc"], ["+logger.auth=***"]),
    (["--session-cookie=a; b"], ["--session-cookie=***"]),
    (["--config", '{"api_key": "a b", "lr": 1}'], ["--config", '{"api_key": "***", "lr": 1}']),
    (["--header", "Authorization: Bearer abc"], ["--header", "Authorization: ***"]),
    (["--header=X: Bearer abcdefgh12"], ["--header=X: Bearer ***"]),
    (["postgres://me:pw@db/x"], ["postgres://***@db/x"]),
    (["--url=https://me:p@ss/w@host/x"], ["--url=https://***@host/x"]),
    (["https://token@host/x?sig=1&access_token=abc&n=2"], None),
    (["https://host/c?sv=1&sig=aB%2F&n=2"], ["https://host/c?sv=1&sig=***&n=2"]),
    (["--slack-webhook", "https://host/services/T0/abc"], ["--slack-webhook", "***"]),
    (["hf_abcdefgh1234567890"], ["***"]),
    (["--model=sk-proj-1234567890abcdef"], ["--model=***"]),
    (["ghp_abcdefgh1234567890123", "x"], ["***", "x"]),
    (["AKIAIOSFODNN7EXAMPLE"], ["***"]),
    (["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.abc_-"], ["***"]),
    (["-----BEGIN RSA PRIVATE KEY-----\nabc\n"], ["***"]),
]


@pytest.mark.parametrize(("given", "expected"), WITH_SECRETS)
def test_secrets_are_hidden(given: list[str], expected: list[str] | None) -> None:
    """A value is hidden by its name, as part of a URL, or by its form."""
    if expected is None:
        expected = ["https://***@host/x?sig=1&access_token=***&n=2"]

    assert expected == masking.arguments(given)


@pytest.mark.parametrize(
    "given",
    [
        ["--lr", "0.1", "data/train.csv"],
        ["--tokenizer", "bert-base-uncased"],
        ["--max-tokens", "512", "--num_key_value_heads=8", "--max_tokens=3e9"],
        ["--author", "me", "--keywords", "a"],
        ["--use-auth", "--lr", "1"],
        ["--passes", "3"],
        ["--token"],
        ["--password="],
        ["--model", "sk-learn-logistic-regression"],
        ["https://host:8080/path?page=2", "s3://bucket/a/b"],
        ["--commit", "0123456789abcdef0123456789abcdef01234567"],
        [],
    ],
)
def test_what_is_no_secret_stays(given: list[str]) -> None:
    """Hyperparameters, names and addresses are what one wants to see."""
    assert given == masking.arguments(given)


def test_nested_secrets_are_masked() -> None:
    """Names inside names count, and those of everything above."""
    given: dict[str, Any] = {
        "lr": 0.1,
        "wandb": {"api_key": "x", "project": "p"},
        "auth": {"user": "me", "values": ["x", {"y": "z"}]},
        "pins": [{"password": 1234}],
        "url": "redis://:pw@host",
        "max_tokens": 512,
        "token": None,
        "use_auth": True,
    }

    assert {
        "lr": 0.1,
        "wandb": {"api_key": "***", "project": "p"},
        "auth": {"user": "***", "values": ["***", {"y": "***"}]},
        "pins": [{"password": "***"}],
        "url": "redis://***@host",
        "max_tokens": 512,
        "token": None,
        "use_auth": True,
    } == masking.tree(given)


@pytest.mark.parametrize(
    "part", ["key", "://", "a=", "x", "eyJ", "Bearer ", '"key":"', "A.k-", "@"]
)
def test_long_texts_take_no_time(part: str) -> None:
    """No text makes it search for long: the time grows with the length, not with its square."""
    text = part * (16_384 // len(part))
    began = time.thread_time()
    masking.mask_text(text)

    assert time.thread_time() - began < 1
