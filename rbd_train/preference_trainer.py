"""TRL's DPOTrainer on rows that are rendered already, with reference log-probabilities that are kept by key.

With `ref_model=None` TRL takes the reference from the weights in memory (they are computed before training starts), so
the step-0 loss is ln 2 exactly; a stored value is used only where data, template, weights and precision are the same
(A49).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl.models.utils import prepare_deepspeed
from trl.trainer.dpo_trainer import DPOTrainer

from rbd_train.errors import DataError
from rbd_train.store import write_json
from rbd_train.trainer import RowOrder, Steady

LN2 = 0.693147


class Tokens(NamedTuple):
    """Tokens, and their log-probabilities under one model."""

    ids: list[int]
    log_probs: list[float]


class PairTrainer(Steady, DPOTrainer):  # type: ignore[misc]
    """Skip TRL's own rendering, and keep reference log-probabilities in a file named by their key."""

    def __init__(self, reference: Path, **settings: Any) -> None:
        """Set up; `reference` is where the reference log-probabilities are, or will be."""
        self.reference = reference
        super().__init__(**settings)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        stored = json.loads(self.reference.read_text()) if self.reference.is_file() else None
        self.accelerator.wait_for_everyone()  # nobody writes before all have looked
        if stored is None:
            # not TRL's own pass: its result is a file that each rank looks for under a temporary name of its own
            # (datasets names so what was made in memory). Fresh adapters change nothing, so the model is the reference
            sums = self.log_probs(dataset.to_list(), batch_size)
            stored = dict(zip(REFERENCE, map(list, zip(*sums, strict=True)), strict=True))
            if self.accelerator.is_main_process:
                write_json(self.reference, stored)
        for key in REFERENCE:
            dataset = dataset.add_column(key, stored[key])
        return dataset

    @torch.no_grad()
    def log_probs(self, rows: Sequence[dict[str, Any]], batch: int) -> list[tuple[float, float]]:
        """Return each row's summed log-probabilities (chosen, rejected) under the model as it is now.

        Every process takes each n-th batch, the last ones repeated so that all make as many passes; rows come back by
        their number, so that a repeated one counts once (A47).
        """
        module: Any = self.model
        module.eval()
        world, mine = self.accelerator.num_processes, self.accelerator.process_index
        batches = equal_batches([sum(len(row[key]) for key in IDS) for row in rows], batch, world)
        model = self._callable()
        found = []
        for part in batches[mine::world]:
            inputs = self._prepare_inputs(self.data_collator([rows[k] for k in part]))
            chosen, rejected = self.pair_sums(model, inputs)
            found += [(k, c, r) for k, c, r in zip(part, chosen.tolist(), rejected.tolist(), strict=True)]
        return once_each(gather_object(found), len(rows))

    @torch.no_grad()
    def next_tokens(self, rows: Sequence[dict[str, Any]], drawn: Sequence[Tokens] | None = None) -> list[Tokens]:
        """Return a token for each position of a row's two answers, with its log-probability under the model as it is.

        Args:
            rows: what is read up to each position.
            drawn: the tokens to score; by default one is drawn at each position from the model's own law.
        """
        module: Any = self.model
        module.eval()
        world, mine = self.accelerator.num_processes, self.accelerator.process_index
        batches = equal_batches([sum(len(row[key]) for key in IDS) for row in rows], 1, world)
        model = self._callable()
        found = []
        for (k,) in batches[mine::world]:  # one pair at a time: here all logits of its answers are in memory
            inputs = self._prepare_inputs(self.data_collator([rows[k]]))
            given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            with self.accelerator.autocast():
                logits = model(**given, use_cache=False).logits[:, :-1]
            law = logits[inputs["completion_mask"][:, 1:].bool()].float().log_softmax(-1)  # (answer tokens, vocabulary)
            if drawn is None:
                tokens = torch.multinomial(law.exp(), 1, generator=torch.Generator(law.device).manual_seed(k))
            else:
                tokens = torch.tensor(drawn[k].ids, device=law.device)[:, None]
            found.append((k, Tokens(tokens[:, 0].tolist(), law.gather(1, tokens)[:, 0].tolist())))
        by_row = dict(gather_object(found))
        return [by_row[k] for k in range(len(rows))]

    def _callable(self: Any) -> Any:
        """Return what can be called: under DeepSpeed an engine, since ZeRO-3's own parameters are shards."""
        if not self.is_deepspeed_enabled or self.model_wrapped is not self.model:
            return self.model_wrapped if self.is_deepspeed_enabled else self.model
        if self._precompute_engine is None:
            self._precompute_engine = prepare_deepspeed(self.model, self.accelerator)
        return self._precompute_engine

    def pair_sums(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return summed log-probabilities of chosen and rejected, each of shape (pairs,)."""
        given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        with self.accelerator.autocast():
            found = model(**given, use_cache=False, labels=labels, fused_lm_head=True).log_probs
        return found.sum(1).chunk(2)

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> RowOrder:
        lengths = [len(p) + max(len(c), len(r)) for p, c, r in zip(*(self.train_dataset[k] for k in IDS), strict=True)]
        return RowOrder(lengths, self.global_batch, self.grouped, self.args.seed, lambda: int(self.state.epoch or 0))


class CpuPairTrainer(PairTrainer):
    """Score completion tokens alone, and nothing but their log-probabilities: for one process on a CPU."""

    def pair_sums(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return summed log-probabilities of chosen and rejected, each of shape (pairs,)."""
        module = model.get_base_model() if hasattr(model, "peft_config") else model
        with self.accelerator.autocast():
            hidden = module.base_model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
            ).last_hidden_state[:, :-1]
            mask = inputs["completion_mask"][:, 1:].bool()
            logits = module.get_output_embeddings()(hidden[mask])  # (completion tokens, vocabulary)
        losses = torch.nn.functional.cross_entropy(logits.float(), inputs["input_ids"][:, 1:][mask], reduction="none")
        rows = mask.nonzero()[:, 0]
        return torch.zeros(len(mask), dtype=losses.dtype).index_add(0, rows, -losses).chunk(2)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return the DPO loss, -log sigmoid(beta (margin - reference margin)), averaged over pairs."""
        chosen, rejected = self.pair_sums(model, inputs)
        gains = chosen - inputs["ref_chosen_logps"], rejected - inputs["ref_rejected_logps"]
        margins = self.beta * (gains[0] - gains[1])
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        told = {
            "rewards/chosen": self.beta * gains[0], "rewards/rejected": self.beta * gains[1],
            "rewards/margins": margins,
            "rewards/accuracies": (margins > 0).float(), "logps/chosen": chosen, "logps/rejected": rejected,
        }  # fmt: skip
        for key, value in told.items():
            self._metrics["train" if model.training else "eval"][key].append(value.detach().mean().item())
        return (loss, {"loss": loss}) if return_outputs else loss


class CheckStart(TrainerCallback):  # type: ignore[misc]
    """Stop at the first step whose loss isn't ln 2: the policy would not start at its reference."""

    def __init__(self, tolerance: float) -> None:
        """Allow this much."""
        self.tolerance, self.pending = tolerance, True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Check the first loss that is logged: it is computed before the first update.

        Raises:
            DataError: it isn't ln 2.
        """
        if not self.pending or "loss" not in (logs or {}):
            return
        self.pending = False
        if state.global_step > args.logging_steps:  # a resumed run has left its start behind
            return
        found = (logs or {})["loss"]
        if abs(found - LN2) > self.tolerance:
            raise DataError(
                f"dpo: the step-0 loss is {found:.4f}, not ln 2 = {LN2:.4f} (within {self.tolerance}): the reference "
                "log-probabilities are not those of the model that is trained; remove <root>/reference"
            )


def equal_batches(lengths: Sequence[int], batch: int, processes: int) -> list[list[int]]:
    """Batch row numbers, longest first; the last batch is repeated until every process has as many (A41)."""
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    return batches + batches[-1:] * (-len(batches) % processes)


def once_each(found: Sequence[tuple[int, float, float]], count: int) -> list[tuple[float, float]]:
    """Put gathered rows (number, chosen, rejected) in order, a repeated one once."""
    by_row = {k: (chosen, rejected) for k, chosen, rejected in found}
    return [by_row[k] for k in range(count)]


IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
