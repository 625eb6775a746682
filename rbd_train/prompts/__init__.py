"""One file per prompt: its text, its reply pattern and its parser together. Judged text is untrusted and fenced."""

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rbd_train.errors import UsageError
from rbd_train.records import Item
from rbd_train.store import read_text

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def fence(text: str) -> str:
    """Put untrusted text between triple quotes, which it can't close."""
    return '"""' + text.replace('"""', "'''").strip() + '"""'


def label(position: int) -> str:
    """Name the option at a position as prompts do."""
    return f"Output ({LETTERS[position]})"


def shown_statement(item: Item, order: Sequence[int]) -> str:
    """Show a statement with `[[option:1]]` (a stored index) turned into the label under which it is shown."""
    return re.sub(r"\[\[option:(\d+)\]\]", lambda m: label(list(order).index(int(m[1]))), item.statement or "")


def json_object(text: str) -> dict[str, Any] | None:
    """Return the last outermost JSON object in a reply, after its thinking; None without one."""
    reply = text.rpartition("</think>")[2]
    found, start, decoder = None, reply.find("{"), json.JSONDecoder()
    while start >= 0:
        try:
            value, end = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found = value if isinstance(value, dict) else found
        start = reply.find("{", end)
    return found


def own_template(path: str, fields: Sequence[str], needed: Sequence[str]) -> str:
    """Read a prompt of one's own: a text with `$name` placeholders, filled in once.

    Raises:
        UsageError: a placeholder that isn't there, or one that is missing.
    """
    text = read_text(Path(path))
    template = string.Template(text)
    if not template.is_valid():
        raise UsageError(f"prompt {path}: a $ that starts no placeholder; write $$ for a dollar sign")
    named = set(template.get_identifiers())
    wrong, missing = sorted(named - set(fields)), sorted(set(needed) - named)
    if wrong or missing:
        what = f"unknown placeholder ${wrong[0]}" if wrong else f"placeholder ${missing[0]} is missing"
        raise UsageError(f"prompt {path}: {what}; a prompt may hold {', '.join('$' + name for name in fields)}")
    return text
