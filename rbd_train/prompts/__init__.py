"""One file per prompt: its text, its reply pattern and its parser together. Judged text is untrusted and fenced."""

import json
import re
from collections.abc import Sequence
from typing import Any

from rbd_train.records import Item

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
