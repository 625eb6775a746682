"""One file per prompt: its text, its reply pattern and its parser together. Judged text is untrusted and fenced."""

import re
from collections.abc import Sequence

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
