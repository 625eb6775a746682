"""The records that stages exchange: small, frozen, validated objects (pydantic), one JSON line each.

Unknown keys are refused and no NaN reaches the disk. Choices are 0-based indices into `Item.options` as stored,
whatever order was shown; letters exist only inside prompts.
"""

import hashlib
import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Split = Literal["train", "test"]
Quadrant = Literal["TT", "TF", "FT", "FF"]


class Record(BaseModel):
    """Forbid mutation, unknown keys, NaN and infinity for every record."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Item(Record):
    """What can be judged: a question and its options."""

    id: str
    question: str
    options: tuple[str, ...] = Field(min_length=2)
    gold: int | None = None
    statement: str | None = None
    group: str
    domain: str = ""
    system: str | None = None
    reference: str | None = None
    meta: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _gold_is_an_option(self) -> Self:
        if self.gold is not None and not 0 <= self.gold < len(self.options):
            raise ValueError(f"gold is {self.gold}, but there are {len(self.options)} options (0-based)")
        return self


class Question(Record):
    """What a pair is made from: a question, its right answer with working, the final part of it, a wrong answer."""

    id: str
    group: str
    question: str
    right: str
    final: str
    wrong: str | None = None
    split: Split | None = None
    domain: str = ""
    meta: dict[str, JsonValue] = {}


class BiasPair(Record):
    """A row of D (`plain`) and its twin in D_bias (`biased`)."""

    id: str
    bias: str
    source: str
    split: Split | None = None
    plain: Item
    biased: Item
    provenance: dict[str, JsonValue] = {}


class Outcome(Record):
    """What a judge's reply means: exactly one of a choice, a tie, a score, or unreadable with its reason."""

    kind: Literal["choice", "tie", "score", "unreadable"]
    choice: int | None = None
    score: float | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        expected = {"choice": "choice", "tie": None, "score": "score", "unreadable": "reason"}[self.kind]
        given = {name for name in ("choice", "score", "reason") if getattr(self, name) is not None}
        if given != ({expected} if expected else set()):
            raise ValueError(f"an outcome of kind {self.kind!r} can't hold {sorted(given) or 'nothing'}")
        return self


class Judgement(Record):
    """One decision of a judge on one item in one order; `order[k]` is the stored index of the k-th option shown."""

    item_id: str
    judge: str
    fingerprint: str
    order: tuple[int, ...]
    sample: int = 0
    outcome: Outcome
    reply: str
    probabilities: tuple[float, ...] | None = None

    def right(self, gold: int | None) -> bool | None:
        """Say whether the decision is the gold one; None if it can't be read or there is no gold."""
        if self.outcome.kind == "unreadable" or gold is None:
            return None
        return self.outcome.choice == gold


class BiasRecord(Record):
    """A pair judged in one order (`both` for position); `label` is right on plain and wrong on biased."""

    id: str
    group: str
    bias: str
    split: Split | None = None
    order: Literal["stored", "reversed", "both"]
    pair: BiasPair | None = None
    plain: Judgement | None = None
    biased: Judgement | None = None
    label: bool | None
    imported_from: str | None = None

    @model_validator(mode="after")
    def _measured_or_imported(self) -> Self:
        parts = (self.pair, self.plain, self.biased)
        if self.imported_from is None and any(part is None for part in parts):
            raise ValueError("pair, plain and biased may be missing only where imported_from is set")
        return self

    def quadrant(self) -> Quadrant | None:
        """Name the cell right/wrong on plain x right/wrong on biased (T or F each); None if unknown."""
        if self.pair is None or self.plain is None or self.biased is None:
            return None
        plain, biased = self.plain.right(self.pair.plain.gold), self.biased.right(self.pair.biased.gold)
        if plain is None or biased is None:
            return None
        cells: dict[tuple[bool, bool], Quadrant] = {
            (True, True): "TT", (True, False): "TF", (False, True): "FT", (False, False): "FF",
        }  # fmt: skip
        return cells[plain, biased]


class Definition(Record):
    """A bias as a detector reads it."""

    name: str
    text: str


class View(Record):
    """One decision as it looks from outside: the options in the order shown and which of those was chosen."""

    options: tuple[str, ...]
    statement: str | None = None
    choice: int | None


class Case(Record):
    """All a detector may see of a decision: never the gold answer, never the decision on D (position apart)."""

    id: str
    definitions: tuple[Definition, ...]
    question: str
    views: tuple[View, ...] = Field(min_length=1, max_length=2)
    judge: str


class Trace(Record):
    """A reasoned verdict on a case, by the teacher or a detector; `verdict` is None where `reject` says why."""

    case_id: str
    author: str
    sample: int = 0
    thinking: str | None
    verdict: bool | None
    p_yes: float | None = None
    reply: str
    reject: str | None = None
    provenance: dict[str, JsonValue] = {}


class Example(Record):
    """A case with its label, and the trace that a detector learns from (train) or is compared with (test)."""

    case: Case
    bias: str
    group: str
    label: bool
    quadrant: Quadrant | None = None
    trace: Trace | None = None


class Dropped(Record):
    """A row that curation left out, and why."""

    case_id: str
    bias: str
    group: str
    sample: int | None
    reason: str


class Round(Record):
    """One turn of the debias loop: the judgements that stood, and what the detector said of them."""

    judgements: tuple[Judgement, ...]
    trace: Trace | None


class Revision(Record):
    """One decision's way through the debias loop (arXiv 2505.17100); the last round's judgements stand."""

    id: str
    rounds: tuple[Round, ...] = Field(min_length=1)
    stop: Literal["no_bias", "unreadable", "max_rounds"]
    calls: int


class Operator(Record):
    """How a bias is written into an answer: by a prompt that an engine follows, for the answer on one side."""

    prompt: str = "rewrite"
    version: int = 1
    side: Literal["wrong", "right"] = "wrong"
    author: str = ""


class Evidence(Record):
    """What a validation saw: paired decisions on the same items in the same order, plain against rewritten.

    `effect` is (harm - gain) / n with its interval; `p` is adjusted for candidates and for `looks` at the
    items that chose it.
    """

    judge: str
    n: int
    harm: int
    gain: int
    effect: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    looks: int | None = None
    error_plain: float | None = None
    error_biased: float | None = None
    unreadable: int = 0


class Bias(Record):
    """An entry of the bias library; without an operator it is known, but nothing rewrites answers for it."""

    id: str
    name: str
    definition: str
    origin: str
    operator: Operator | None = None
    evidence: Evidence | None = None


class Candidate(Record):
    """A bias that discovery named, and what became of it; `p` is adjusted for looks and rivals.

    `looks` counts how often the selection items were looked at before that was settled.
    """

    bias: Bias
    round: int
    support: int
    fate: Literal["accepted", "not accepted", "same as a known one", "not tested"]
    reason: str
    p: float | None = None
    looks: int | None = None


class Probe(Record):
    """One item judged plain and with a bias written in, in the same order; None where a decision can't be read."""

    bias: str
    item_id: str
    group: str
    domain: str
    part: str
    fault: str | None = None
    plain: bool | None = None
    biased: bool | None = None
    effect: Literal["harm", "gain", "none"] | None = None


class Placed(Record):
    """Which part of discovery an item was used in: no item serves two purposes."""

    item_id: str
    group: str
    part: str


class Turn(Record):
    """One turn of a conversation, as TRL reads it."""

    role: Literal["system", "user", "assistant"]
    content: str


class Hardened(Record):
    """An item of a hardened set in JudgeBench's columns; `label` is 1 or 2."""

    id: str
    original_id: str
    question: str
    response_A: str
    response_B: str
    label: int
    injected_bias: str
    bias: str
    domain: str
    group: str
    reviews: int = 0


class Reward(Record):
    """The implicit reward of a held-out pair: `margin` is beta x (what chosen gained - what rejected gained), in nats.

    `reference_margin` is the reference's own log-probability of chosen less that of rejected; `log_ratio` how far both
    moved, in nats per token and whichever way (no divergence: the answers are no samples of either model).
    """

    id: str
    bias: str | None
    group: str
    domain: str
    margin: float
    reference_margin: float
    log_ratio: float


class Preference(Record):
    """A preference pair in TRL's conversational form; `bias` is what was written into the rejected answer, if any."""

    id: str
    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    bias: str | None = None
    source: str
    split: Split
    group: str
    domain: str = ""
    provenance: dict[str, JsonValue] = {}


class Step(Record):
    """One token of a choice: where it was predicted, its log-probability (nats) there, and at the score's position."""

    position: int
    logprob: float
    first: float | None = None
    bound: bool = False  # the log-probability is an upper bound: the server didn't list the token


class Position(Record):
    """A place where a token was predicted; `normalisers[k]` is log sum exp(log p / t) at the k-th temperature."""

    normalisers: tuple[float, ...] = ()
    best: float
    thousandth: float | None = None  # log-probability of the 1000th likeliest token


class Readings(Record):
    """What one model says where a score is due: every choice token by token, and its 20 likeliest first tokens."""

    choices: tuple[tuple[Step, ...], ...]
    positions: tuple[Position, ...] = Field(min_length=1)
    top: dict[str, float]


class Graded(Record):
    """A text to be given one score: on one dimension, for a document that others share."""

    id: str
    group: str  # the document: the unit of splits and of cluster intervals
    document: str
    text: str
    dimension: str
    criteria: str = ""
    steps: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()  # what each score means, from the lowest
    reference: str | None = None
    human: float | None = None
    low: int = 1  # the range that people used
    high: int = 5
    author: str = ""


class ScoreRow(Record):
    """What both models say about a text in one range: all a decision needs, so that every setting is arithmetic."""

    item_id: str
    group: str
    dimension: str
    low: int
    high: int
    human: float | None = None
    scores: tuple[int, ...]  # the score that each choice spells
    temperatures: tuple[float, ...]  # of the normalisers
    main: Readings | None
    assistant: Readings | None = None
    fault: str | None = None  # why a model said nothing
    cut: int = 0  # tokens cut off the document


def group_of(question: str) -> str:
    """Hash a question without case, spacing and punctuation, so that its copies fall into the same split."""
    words = re.findall(r"\w+", question.casefold())
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def uniform(*parts: object) -> float:
    """Draw a number in [0, 1) that depends on the parts alone: the same on every machine and in every order."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
