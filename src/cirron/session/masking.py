"""Hides secrets in command lines and configurations before they are recorded.

A value is hidden when its name says that it is a secret (`--api-key X`, `API_KEY=X`,
`{"token": "X"}`), when it is the user and password of a URL, or when it has the form of a
well-known kind of key. It hides too much rather than too little: `--key val_loss` is hidden too.
"""

from __future__ import annotations

import re
from typing import Any

MASK = "***"

# Parts of names whose value is a secret whatever it is.
SECRET = (
    "secret|passw|passphrase|credential|cookie|bearer|"  # noqa: S105  names, not one of them
    r"api_?-?key|access_?-?key|private_?-?key|(?<![a-z])(?:pass|pwd|sas)(?![a-z])"
)
# Parts of names whose value is one unless it is a number: `--max-tokens 512` is a size. Tokenizers,
# authors, key points and keywords are no secrets.
LIKELY = (
    r"token(?!i[sz])|auth(?!or(?!i))|key(?!point|word|frame|board|stone)|signature|session_?-?id|"
    r"webhook|(?<![a-z])sig(?![a-z])"
)

_SECRET = re.compile(SECRET, re.IGNORECASE)
_LIKELY = re.compile(LIKELY, re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[\d_]*\.?\d*(?:e[+-]?\d+)?|true|false|none|null", re.IGNORECASE)

# `name=value` and `name: value` anywhere in a text: in JSON, in a query, in a header.
_PAIR = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*(?:{SECRET}|{LIKELY}))([\w.-]++)(["']?\s*[:=]\s*)"""
    r"""("[^"]*"?|'[^']*'?|(?:Bearer|Basic|Token)\s+\S+|[^\s"'&,;}\])]+)""",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)(?:[^\s:/@]*:\S{0,300}|[^\s/@]+)@")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    # AWS; JSON Web Tokens; and the prefixes of Hugging Face, OpenAI, Anthropic, Stripe, GitHub,
    # GitLab, Slack, Google, npm, PyPI, NVIDIA, Replicate, Groq and W&B.
    r"A(?:KIA|SIA)[A-Z0-9]{12,}|eyJ[\w-]{8,}[\w.-]*|"
    r"(?:hf_|api_org_|sk-|[rs]k_(?:live|test)_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|AIza|ya29\.|"
    r"npm_|pypi-|nvapi-|r8_|gsk_|wandb_v1_)(?=[\w-]*\d)[\w.-]{12,})"
)


def arguments(given: list[str]) -> list[str]:
    """A command line without its secrets. All values of an option that may have one are hidden."""
    found: list[str] = []
    secret = ""  # the option whose values these are, if they are to be hidden
    is_first = False
    for text in given:
        name, equals, value = text.partition("=")
        if secret and not text.startswith("--" if is_first else "-"):
            found.append(masked(secret, text))
            is_first = False
        elif equals and not re.search(r"[\s:/?{]", name):
            secret = ""
            found.append(f"{name}={masked(name, value)}")
        else:
            is_first = text.startswith("-") and is_secret(text)
            secret = text if is_first else ""
            found.append(mask_text(text))
    return found


def tree(given: Any, name: str = "") -> Any:
    """A configuration of plain dicts, lists and scalars without its secrets.

    A name holds for all that is inside: everything in `auth` may be a secret.
    """
    if isinstance(given, dict):
        return {key: tree(value, f"{name}.{key}") for key, value in given.items()}
    if isinstance(given, list):
        return [tree(item, name) for item in given]
    return masked(name, given)


def masked(name: str, value: Any) -> Any:
    """The value of that name, hidden if it is a secret."""
    if value is None or isinstance(value, bool) or value == "":
        return value
    if hides(name, str(value)):
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Whether a name says that its value is a secret, or may be one."""
    return bool(_SECRET.search(name) or _LIKELY.search(name))


def hides(name: str, value: str) -> bool:
    """Whether the value of that name is a secret."""
    return bool(_SECRET.search(name)) or (is_secret(name) and not _NUMBER.fullmatch(value))


def mask_text(text: str) -> str:
    """A text without the secrets that show by their form, or by a name inside the text."""
    text = _PEM.sub(MASK, text)
    text = _USER.sub(f"{MASK}@", text)
    text = _PAIR.sub(_pair, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _KNOWN.sub(MASK, text)


def _pair(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    if not hides(name, value.strip("\"'")):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{MASK}{quote}"
