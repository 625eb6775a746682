"""The cue of each known bias, read off the shown options alone: what a content-blind rule can follow."""

import re
from collections.abc import Sequence

CHEERFUL = frozenset(
    """absolutely amazing amazingly awesome beautiful beautifully best blissful bright brilliant brilliantly
    celebrate charming cheerful cheerfully confident confidently delight delighted delightful delightfully
    dazzling easily elegant enchanting enjoy enjoying excellent excited excitedly exciting excitingly fabulous
    fantastic fascinating fortunately friendly fun glad gladly glorious good gorgeous grand great happily happy
    harmonious heartwarming hooray hopeful incredible incredibly inspiring joy joyful joyfully joyous lively
    love lovely lucky luckily magical magnificent marvelous marvelously nice perfect perfectly pleasant pleased
    proud proudly radiant remarkable remarkably splendid sparkling stunning superb terrific thankfully thrilled
    thrilling triumphant vibrant warm welcome wonderful wonderfully wow yay""".split()  # noqa: SIM905
)
GLOOMY = frozenset(
    """alas awful bad barely bleak boring depressing disappointing disappointingly disappointment dismal dreadful
    dreary dull gloomy grim grimly harsh horrible inadequate lackluster merely mediocre miserable miserably
    mundane pathetic pathetically pitiful poor poorly regrettably regretfully sad sadly sigh sorry terrible
    tedious tragic tragically unfortunate unfortunately unhappily uninspiring unpleasant weary worse worst
    wretched""".split()  # noqa: SIM905
)
_STATEMENT = re.compile(r"Output\s*\(\s*([a-z])\s*\)", re.IGNORECASE)


def longer(options: Sequence[str]) -> int | None:
    """Return the position of the longest option; None for equal lengths."""
    return _only_maximum([len(option) for option in options])


def crowd(statement: str | None) -> int | None:
    """Return the position that a majority statement names; None without one."""
    match = _STATEMENT.search(statement or "")
    return ord(match.group(1).lower()) - ord("a") if match else None


def mood(text: str) -> int:
    """Count cheerful words and exclamation marks, less gloomy words."""
    words = re.findall(r"[a-z]+", text.casefold())
    return sum(w in CHEERFUL for w in words) - sum(w in GLOOMY for w in words) + text.count("!")


def cheerful(options: Sequence[str]) -> int | None:
    """Return the position of the most cheerful option; None where none stands out."""
    return _only_maximum([mood(option) for option in options])


def _only_maximum(values: Sequence[int]) -> int | None:
    best = max(values)
    return values.index(best) if list(values).count(best) == 1 else None
