"""The sequence-classification baseline: a head on the context that says Yes or No, and no reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rbd_train.biases import Definitions
from rbd_train.detector import Detector, check_trained_for
from rbd_train.errors import UsageError
from rbd_train.ledger import Ledger
from rbd_train.modelling import encode_context, load_model, load_tokenizer, pad_id, resolve_model
from rbd_train.prompts.detect import detect_messages
from rbd_train.records import Case, Trace


@dataclass
class ClassifierConfig:
    """Detector that is a classifier, as `rbd sft objective=classifier` trains one."""

    model: str  # folder
    name: str = "classifier"  # author written into its traces
    definitions: str = "all"  # all, subset or known: which definitions its context lists
    batch_size: int = 16  # rows per forward pass

    def open(self, ledger: Ledger) -> Detector:
        """Prepare; it computes what it says anew each time, so the ledger holds nothing of it."""
        if self.definitions not in ("all", "subset", "known"):
            raise UsageError(f"detector.definitions is {self.definitions!r}; choose all, subset or known")
        check_trained_for(self.model, "classifier")
        return ClassifierDetector(
            resolve_model(self.model), self.name, cast(Definitions, self.definitions), self.batch_size
        )


class ClassifierDetector:
    """A detector whose traces hold a verdict and P(Yes), and no thinking."""

    thinks = False

    def __init__(self, model: str, name: str, definitions: Definitions, batch_size: int) -> None:
        """Name the model; it is loaded at the first case."""
        self.model, self.name, self.definitions, self.batch_size = model, name, definitions, batch_size
        self._module: Any = None

    def detect(self, cases: Sequence[Case]) -> list[Trace]:
        """Return one trace per case."""
        import torch
        from transformers import AutoConfig

        tokenizer = load_tokenizer(self.model, reasoning=False)
        if self._module is None:
            kinds = AutoConfig.from_pretrained(self.model, trust_remote_code=False).architectures or []
            if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
                raise UsageError(
                    f"{self.model} is {', '.join(kinds)}: it has no classifier's head, so a random one would be drawn"
                )
            self._module = load_model(self.model, "float32", num_labels=2, pad_token_id=pad_id(tokenizer))
            self._module.train(False)
        encoded = [encode_context(tokenizer, detect_messages(case)) for case in cases]
        chances: dict[int, float] = {}
        order = sorted(range(len(cases)), key=lambda i: len(encoded[i]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            width = max(len(encoded[i]) for i in rows)
            ids = torch.tensor([encoded[i] + [pad_id(tokenizer)] * (width - len(encoded[i])) for i in rows])
            mask = torch.tensor([[1] * len(encoded[i]) + [0] * (width - len(encoded[i])) for i in rows])
            with torch.inference_mode():
                scores = self._module(input_ids=ids, attention_mask=mask).logits.float().softmax(-1)
            chances |= {i: float(row[1]) for i, row in zip(rows, scores, strict=True)}
        return [
            Trace(
                case_id=case.id, author=self.name, thinking=None, verdict=chances[i] > 0.5, p_yes=chances[i], reply=""
            )
            for i, case in enumerate(cases)
        ]

    def calls(self) -> dict[str, int]:
        """Count the calls made so far: none that the ledger keeps."""
        return {}

    def close(self) -> None:
        """Drop the model."""
        self._module = None
