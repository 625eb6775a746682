"""What may not be trained on although it agrees with its label: leaks, near-twins, contaminated questions, surplus."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from rbd_train.records import Example, Trace, uniform

LEAK = re.compile(
    r"ground[- ]truth|\bgold(?:en)? (?:answer|label|choice)|"
    r"\b(?:given|provided|reference|true|correct) label\b|answer key",
    re.IGNORECASE,
)
# what a trace is said to cover (arXiv 2505.17100): a possible bias, the options compared, the judge's capability
PARTS = {
    "a bias": re.compile(r"\bbias", re.IGNORECASE),
    "the options": re.compile(r"\b(?:outputs?|options?|choices?|answers?|responses?)\b", re.IGNORECASE),
    "the judge": re.compile(r"\b(?:judge|evaluator|model|llm|gpt|claude|llama|deepseek)", re.IGNORECASE),
}
PERMUTATIONS = 128  # of a MinHash
MARGIN = 0.3  # below the threshold, where banding still finds nearly every pair


def leak(trace: Trace) -> str:
    """Say that a trace speaks of a label that its author can't know; empty if it doesn't."""
    return "speaks of the ground truth" if LEAK.search(trace.thinking or "") else ""


def missing_part(trace: Trace) -> str:
    """Say which of the three parts a trace lacks; empty if it has all."""
    lacking = [name for name, pattern in PARTS.items() if not pattern.search(trace.thinking or "")]
    return f"lacks {lacking[0]}" if lacking else ""


def words(text: str) -> list[str]:
    """Return a text's words without case and punctuation; a Chinese character is a word."""
    return re.findall(r"[\u4e00-\u9fff]|[^\W_]+", text.casefold())


def contaminated(questions: Mapping[str, str], held_out: Collection[str], n: int) -> set[str]:
    """Return the keys of the questions that share a run of n words with a held-out question.

    A shorter question that is copied whole is in the group of the other already (`records.group_of`).
    """
    known = {run for text in held_out if len(words(text)) >= n for run in _runs(text, n)}
    return {key for key, text in questions.items() if not known.isdisjoint(_runs(text, n))}


def near_twins(texts: Mapping[str, str], threshold: float) -> dict[str, str]:
    """Return, for each text that nearly repeats an earlier one, the key of that one.

    Candidates come from MinHash with banding (datasketch) over runs of three words; each is then compared exactly, so
    that the threshold is the Jaccard similarity itself and no estimate of it.
    """
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=max(0.1, threshold - MARGIN), num_perm=PERMUTATIONS)
    runs = {key: _runs(text, 3) for key, text in texts.items()}
    twins: dict[str, str] = {}
    for key, own in runs.items():
        sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch([run.encode() for run in sorted(own)])
        alike = [other for other in index.query(sketch) if _jaccard(own, runs[other]) >= threshold]
        if alike:
            twins[key] = min(alike)
        else:
            index.insert(key, sketch)
    return twins


def surplus(examples: Sequence[Example]) -> set[tuple[str, int]]:
    """Return (case, sample) of what is too much of one label within its bias, drawn by the case's id."""
    by_bias: dict[str, dict[bool, list[tuple[str, int]]]] = defaultdict(lambda: {True: [], False: []})
    for example in examples:
        by_bias[example.bias][example.label].append((example.case.id, example.trace.sample if example.trace else 0))
    left: set[tuple[str, int]] = set()
    for sides in by_bias.values():
        size = min(len(side) for side in sides.values())
        for side in sides.values():
            left.update(sorted(side, key=lambda key: uniform("balance", *key))[size:])
    return left


def _runs(text: str, n: int) -> set[str]:
    found = words(text)
    return {" ".join(found[k : k + n]) for k in range(max(1, len(found) - n + 1))} - {""}


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))
