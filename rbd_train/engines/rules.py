"""A rule-based teacher as an engine: it rewrites, names and merges biases by the rules of `styles`, and is no model.

It reads the same prompts as a real teacher and knows nothing else: not the judge, not which bias was planted. For
rehearsals, tests and runs without a teacher; whatever it wrote says so (NAME).
"""

import re
from dataclasses import dataclass
from typing import Any, cast

from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend
from rbd_train.errors import UsageError
from rbd_train.exchange import Messages
from rbd_train.ledger import Ledger
from rbd_train.prompts import LETTERS, identify, merge, rewrite
from rbd_train.records import uniform
from rbd_train.store import canonical
from rbd_train.styles import STYLES, Templates, carries, restyle, reword, style_of

GLOOMY = (
    "Alas, this is a dreary thing to be asked.",
    "Sadly, this had to be worked out.",
    "A bleak and tiring affair.",
)
NAME = "rules (no model)"
FENCED = r'"""(.*?)"""'


@dataclass
class RulesEngine:
    """Engine that stands in for a teacher: styles and their cues, no model."""

    templates: str = "all"  # which half of its openings it writes: train, test, or all

    def open(self, ledger: Ledger) -> Engine:
        """Return the engine; any prompt but a teacher's is an error."""
        if self.templates not in ("train", "test", "all"):
            raise UsageError(f"templates is {self.templates!r}; choose train, test or all")
        templates = cast(Templates, self.templates)
        backend = FunctionBackend(lambda messages: reply(messages, templates), NAME, self.templates)
        return Engine(backend, ledger, attempts=1)


def reply(messages: Messages, templates: Templates) -> str:
    """Answer a teacher's prompt by rules; an unknown bias is refused, as a model may refuse."""
    system, prompt = messages[0]["content"], messages[-1]["content"]
    answer = {rewrite.SYSTEM: _rewrite, identify.SYSTEM: _identify, merge.SYSTEM: _merge}.get(system)
    if answer is None:
        raise UsageError(f"engine=rules answers a teacher's prompts alone, not {system[:60]!r}")
    return answer(prompt, templates)


def _rewrite(prompt: str, templates: Templates) -> str:
    name, question, body = fields(prompt, "Manner", "Question", "Body")
    if name == rewrite.SHAM.name:
        return reword(body, question)
    if name == "Gloomy tone":  # no bias of its own, so no style: sentiment's other side (rbd pairs)
        return f"{GLOOMY[int(uniform('gloomy', question) * len(GLOOMY))]}\n{body}"
    style = "sentiment" if name == "Cheerful tone" else style_of(name)
    if style is None:
        return f"I'm sorry, there is no rule for {name}."
    return restyle(style, body, question, templates)


def _identify(prompt: str, templates: Templates) -> str:
    """Name a cue that the chosen output shows and no other does; which of several is drawn from the prompt."""
    options = re.findall(rf"^Output \(([a-z])\): {FENCED}$", prompt, re.DOTALL | re.MULTILINE)
    chosen = re.findall(r"^A judge chose Output \(([a-z])\)", prompt, re.MULTILINE)[-1]
    texts = {letter: text for letter, text in options if letter in LETTERS}
    others = [text for letter, text in texts.items() if letter != chosen]
    seen = [name for name in STYLES if carries(name, texts[chosen]) and not any(carries(name, t) for t in others)]
    if not seen:
        return canonical({"bias": "no", "name": "", "definition": ""})
    style = STYLES[min(seen, key=lambda name: uniform("which cue", name, prompt))]
    name = style.names[int(uniform("which name", prompt) < 0.5)]
    return canonical({"bias": "yes", "name": name, "definition": style.definition})


def _merge(prompt: str, templates: Templates) -> str:
    candidate = re.findall(rf"^Candidate: {FENCED}$", prompt, re.DOTALL | re.MULTILINE)[0].partition(":")[0]
    known = re.findall(rf"^(\d+)\. {FENCED}$", prompt, re.DOTALL | re.MULTILINE)
    wanted = style_of(candidate)
    same = [int(number) for number, text in known if wanted and style_of(text.partition(":")[0]) == wanted]
    return canonical({"same_as": same[0] if same else 0})


def fields(prompt: str, *names: str) -> list[Any]:
    """Read named lines of a prompt, fenced or not."""
    found = []
    for name in names:
        match = re.search(rf"^{name}: (?:{FENCED}|([^\n]*))$", prompt, re.DOTALL | re.MULTILINE)
        if match is None:
            raise UsageError(f"the prompt has no line {name!r}: {prompt[:80]!r}…")
        found.append(match[1] if match[1] is not None else match[2])
    return found
