"""Detectors: a prompt around an engine. The teacher is a detector whose engine is DeepSeek-R1."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rbd_train.biases import Definitions
from rbd_train.engine import Engine
from rbd_train.errors import UsageError
from rbd_train.exchange import Message, Sampling
from rbd_train.ledger import Ledger
from rbd_train.prompts.detect import choose_shots, detect_messages, read_trace, shot_messages
from rbd_train.records import Case, Example, Trace
from rbd_train.store import read_rows


class Detector(Protocol):
    """Reads cases and writes traces; `definitions` says which definitions its prompts list."""

    name: str
    definitions: Definitions

    def detect(self, cases: Sequence[Case]) -> list[Trace]:
        """Return the traces of each case, case by case."""

    def calls(self) -> dict[str, int]:
        """Count the calls made so far."""

    def close(self) -> None:
        """Free what the detector holds."""


class EngineDetector:
    """A detector that asks an engine, `samples` times per case."""

    def __init__(
        self, engine: Engine, name: str, sampling: Sampling, definitions: Definitions = "all", samples: int = 1,
        shots: Sequence[Message] = (), thinks: bool = True,
    ) -> None:  # fmt: skip
        """Wrap an engine; `shots` are turns that stand before the case."""
        self.shots, self.thinks = list(shots), thinks
        self.engine, self.name, self.sampling = engine, name, sampling
        self.definitions, self.samples = definitions, samples

    def detect(self, cases: Sequence[Case]) -> list[Trace]:
        """Return `samples` traces per case, readable or rejected with a reason."""
        prompts = [[system, *self.shots, asked] for system, asked in map(detect_messages, cases)]
        samplings = [self.sampling.model_copy(update={"sample": sample}) for sample in range(self.samples)]
        replies = self.engine.generate(prompts, samplings)
        traces = []
        for index, case in enumerate(cases):
            for sample in range(self.samples):
                reply = replies[sample * len(cases) + index]
                thinking, verdict, reject = read_trace(reply, self.thinks)
                traces.append(
                    Trace(
                        case_id=case.id, author=self.name, sample=sample, thinking=thinking, verdict=verdict,
                        p_yes=_p_yes(reply.watched), reply=reply.text, reject=reject,
                        provenance={
                            "engine": dict(self.engine.identity), "sampling": self.sampling.model_dump(mode="json"),
                            "reasoning_field": reply.reasoning_field, "finish_reason": reply.finish_reason,
                        },
                    )
                )  # fmt: skip
        return traces

    def calls(self) -> dict[str, int]:
        """Count the calls made so far."""
        return dict(self.engine.calls)

    def close(self) -> None:
        """Free the engine."""
        self.engine.backend.close()


class TemplateTeacher:
    """A teacher that is a function of the case as shown, for generated questions; its records say so."""

    definitions: Definitions = "all"

    def __init__(self, solve: Callable[[Case], tuple[str, bool] | None], name: str) -> None:
        """Wrap a function from a case to thinking and verdict, or None where it can't work the question out."""
        self.solve, self.name = solve, name

    def detect(self, cases: Sequence[Case]) -> list[Trace]:
        """Return one trace per case."""
        traces = []
        for case in cases:
            solved = self.solve(case)
            provenance: dict[str, Any] = {"template": True}
            if solved is None:
                traces.append(
                    Trace(
                        case_id=case.id, author=self.name, thinking=None, verdict=None, reply="",
                        reject="not_solved", provenance=provenance,
                    )
                )  # fmt: skip
                continue
            thinking, verdict = solved
            reply = f"{thinking}\n</think>\n\n{'Yes' if verdict else 'No'}"
            traces.append(
                Trace(
                    case_id=case.id, author=self.name, thinking=thinking, verdict=verdict, reply=reply,
                    provenance=provenance,
                )
            )  # fmt: skip
        return traces

    def calls(self) -> dict[str, int]:
        """Count the calls made so far: none."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


def standing(samples: Sequence[Trace]) -> Trace:
    """Return the trace that stands for several samples of one case: the first readable one of the majority.

    A draw counts as Yes; the first sample stands where none can be read.
    """
    votes = [trace.verdict for trace in samples if trace.verdict is not None]
    majority = 2 * sum(votes) >= len(votes) if votes else None
    return next(trace for trace in samples if trace.verdict == majority)


@dataclass
class DetectorConfig:
    """Detector (or teacher) that asks an engine."""

    engine: Any  # slot of conf/engine
    name: str = "detector"  # author written into its traces
    max_new_tokens: int = 2048  # tokens of thinking and verdict; what is cut there is rejected
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1  # traces per case
    definitions: str = "all"  # all, subset or known: which definitions its prompt lists
    shots: int = 0  # solved training cases shown before the one that is asked about
    shots_from: str | None = None  # path of the examples (train.jsonl) that shots are taken from
    shot_reasoning: bool = True  # show their reasoning too, not the label alone
    thinks: bool = True  # false for one trained with objective=label, whose reply is the verdict alone

    def open(self, ledger: Ledger) -> Detector:
        """Open the detector's engine."""
        if self.definitions not in ("all", "subset", "known"):
            raise UsageError(f"detector.definitions is {self.definitions!r}; choose all, subset or known")
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"detector.{name} is {getattr(self, name)}; it must be at least 1")
        sampling = Sampling(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, watch=("Yes", "No")
        )
        check_trained_for(getattr(self.engine, "model", None), "reasoning" if self.thinks else "label")
        definitions = cast(Definitions, self.definitions)
        shots: list[Message] = []
        if self.shots:
            if self.shots_from is None:
                raise UsageError(f"detector.shots is {self.shots}; name the solved cases with detector.shots_from=FILE")
            chosen = choose_shots(read_rows(Path(self.shots_from), Example), self.shots)
            shots = shot_messages(chosen, self.shot_reasoning)
        engine = self.engine.open(ledger)
        return EngineDetector(engine, self.name, sampling, definitions, self.samples, shots, self.thinks)


def check_trained_for(model: str | None, objective: str) -> None:
    """Refuse a model whose card says that it was trained with another objective: its replies would mean nothing.

    Raises:
        UsageError: names the objective and the detector that reads it.
    """
    if not model or not (card := Path(model) / "README.md").is_file():
        return
    said = re.search(r"^\| objective \| (\w+) \|$", card.read_text(encoding="utf-8"), re.MULTILINE)
    readers = {"reasoning": "trained", "label": "label", "classifier": "classifier"}
    if said and said[1] in readers and said[1] != objective:
        raise UsageError(
            f"{model} was trained with objective={said[1]}, and this detector reads objective={objective}: "
            f"use detector={readers[said[1]]}, or name another model"
        )


def _p_yes(watched: dict[str, float] | None) -> float | None:
    """Return P(Yes) against No at the verdict's token."""
    if not watched or set(watched) != {"Yes", "No"}:
        return None
    return 1 / (1 + math.exp(min(700.0, watched["No"] - watched["Yes"])))
