"""TRL's SFTTrainer and transformers' Trainer, with what training at scale needs besides.

Rows come in an order that depends on seed and global batch alone, so that losses don't change with micro-batch,
accumulation or the number of processes; checkpoints appear whole or not at all; SIGTERM and Ctrl-C stop after the step
in hand; a held-out loss is one mean over its tokens.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

from rbd_train.checkpoints import check_loads, discard_older, saving, seal
from rbd_train.errors import DataError, UsageError
from rbd_train.launched import sharded
from rbd_train.masters import follow_masters, merge
from rbd_train.throughput import Throughput


class RowOrder(torch.utils.data.Sampler[int]):
    """Shuffle rows by seed and epoch, and fill the last global batch, so that every step has as many rows."""

    def __init__(
        self, lengths: Sequence[int], global_batch: int, grouped: bool, seed: int, epoch: Callable[[], int]
    ) -> None:
        """Order rows of these lengths (tokens); `epoch` is asked at the start of each pass."""
        self.lengths, self.global_batch, self.grouped, self.seed, self.epoch = (
            list(lengths), global_batch, grouped, seed, epoch,
        )  # fmt: skip

    def __len__(self) -> int:
        """Count the rows of a pass, the filling included."""
        return -(-len(self.lengths) // self.global_batch) * self.global_batch

    def __iter__(self) -> Iterator[int]:
        """Yield row numbers, the filling repeating the pass's first rows, longest first within each global batch.

        So micro-batches of one step hold rows of like length and pad little, whichever rows the step has.
        """
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
        if self.grouped:
            order = get_length_grouped_indices(self.lengths, self.global_batch, generator=draw)  # type: ignore[no-untyped-call]
        else:
            order = torch.randperm(len(self.lengths), generator=draw).tolist()
        for start in range(0, len(self), self.global_batch):
            step = [int(order[place % len(order)]) for place in range(start, start + self.global_batch)]
            yield from sorted(step, key=lambda row: -self.lengths[row])


class Steady:
    """What both trainers share; goes before one of them in the bases."""

    stopping: "Stopping"
    saved_step = -1  # the last one that a checkpoint was written after
    unsaved = ""  # why the checkpoint after the last step could not be written
    _part: Path | None = None
    _checked = False
    _held: list[torch.Tensor]

    def prepare_run(self: Any, global_batch: int, grouped: bool, facts: dict[str, Any]) -> None:
        """Take what transformers' arguments have no place for; `facts` go into each checkpoint."""
        self.global_batch, self.grouped, self.facts = global_batch, grouped, facts
        self.throughput = Throughput(self.model, self.args.device)

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> RowOrder:
        lengths = [len(ids) for ids in self.train_dataset["input_ids"]]
        return RowOrder(lengths, self.global_batch, self.grouped, self.args.seed, lambda: int(self.state.epoch or 0))

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Count what goes in, and train on it."""
        self.throughput.note(inputs)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc,no-any-return]

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Load weights and optimizer, and say which checkpoint it is that can't be loaded.

        Raises:
            DataError: names the checkpoint and the way out.
        """
        try:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        except Exception as error:
            if not resume_from_checkpoint or isinstance(error, DataError | UsageError):
                raise
            told = str(error).strip().split("\n", 1)[0][:200]
            raise DataError(
                f"{resume_from_checkpoint} can't be loaded ({type(error).__name__}: {told}); if it is damaged, remove "
                "it: the same command continues from an earlier one, or starts anew"
            ) from error

    def prediction_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Measure a held-out batch alone, whatever the other ranks hold; keep its summed loss and count its tokens."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs).detach()
        count = (inputs["labels"] != -100).sum().double()
        # a batch of filling alone has no mean
        self._held.append(torch.stack([torch.where(count > 0, loss.double() * count, 0.0), count]))
        return loss, None, None

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the mean over all tokens (a classifier's: rows), however they fell into batches and ranks (A47)."""
        self._held = []
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        held = torch.stack(self._held).sum(0)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(held)
        output.metrics["eval_loss"] = float(held[0] / held[1])
        return output

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: checkpoints need no card, and the final one is written by `weights.save`."""

    def _get_output_dir(self: Any, trial: Any) -> str:
        return str(self._part) if self._part else str(super()._get_output_dir(trial))  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any = None) -> None:
        """Write a checkpoint; where the one after the last step can't be written, the weights alone may still fit."""
        try:
            self._write_checkpoint(model, trial)
        except DataError as error:
            if self.state.global_step < self.state.max_steps or self.accelerator.num_processes > 1:
                raise
            self.unsaved = str(error)

    def _write_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Write a checkpoint beside the others, and let it take its name when every rank is done."""
        folder = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder / "part", ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._part = folder / "part"
        with saving(folder, self.state.global_step):
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._part = None
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                if not self._checked:  # once: what was written can be read
                    check_loads(folder / "part" / name)
                    self._checked = True
                seal(folder / "part" / name, {"step": self.state.global_step, **self.facts})
                shutil.rmtree(folder / name, ignore_errors=True)
                os.replace(folder / "part" / name, folder / name)
                discard_older(folder, name)
        self.accelerator.wait_for_everyone()
        self.saved_step = self.state.global_step


class Distiller(Steady, SFTTrainer):  # type: ignore[misc]
    """Train on completion tokens: reasoning and verdict, or the verdict alone."""

    collator = DataCollatorForLanguageModeling


class Classifier(Steady, Trainer):  # type: ignore[misc]
    """Train a two-label head on the context: the sequence-classification baseline."""

    @staticmethod
    def collator(pad: int) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        """Return a function that pads contexts on the right and keeps one label per row (No 0, Yes 1)."""

        def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            width = max(len(row["input_ids"]) for row in rows)
            ids = [row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in rows]
            mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
            return {
                "input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask),
                "labels": torch.tensor([row["labels"][0] for row in rows]),
            }  # fmt: skip

        return collate

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean cross-entropy of the step's rows; `num_items_in_batch` counts those of all processes."""
        out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        total = torch.nn.functional.cross_entropy(out.logits.float(), inputs["labels"], reduction="sum")
        if num_items_in_batch is None:
            loss = total / (inputs["labels"] != -100).sum().clamp(min=1)
        else:
            loss = total / num_items_in_batch * self.accelerator.num_processes  # DDP and ZeRO average over ranks
        return (loss, out) if return_outputs else loss


class StoppedInEvaluation(Exception):
    """Leave an evaluation: the step before it is done, so a checkpoint can be written at once."""


class AlreadyTrained(Exception):
    """Leave training at its start: the checkpoint is of the last step, and transformers would take one more."""


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Stop after the step in hand when SIGTERM or Ctrl-C came, or the launching process left its stop file."""

    def __init__(self, file: Path) -> None:
        """Watch a file, and both signals from now on."""
        self.file, self.signalled, self.interrupted, self.stopped = file, False, False, False
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _note(self, number: int, frame: Any) -> None:
        # a launcher may pass one Ctrl-C on that the terminal has sent to its workers too
        if number == signal.SIGINT and self.signalled and "LOCAL_RANK" not in os.environ:
            raise KeyboardInterrupt
        self.signalled, self.interrupted = True, self.interrupted or number == signal.SIGINT

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def asked(self, device: torch.device) -> bool:
        """Tell whether any rank was asked to stop; all ranks get one answer."""
        mine = self.signalled or self.file.exists()
        if distributed.is_available() and distributed.is_initialized():
            flag = torch.tensor(int(mine), device=device)
            distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
            return bool(flag.item())
        return mine

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave where nothing is left to train."""
        if state.global_step >= state.max_steps:
            raise AlreadyTrained

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop where asked to."""
        if self.asked(args.device):
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave an evaluation where asked to."""
        if self.asked(args.device):
            self.stopped = True
            raise StoppedInEvaluation


def train(trainer: Any, checkpoint: str | None) -> None:
    """Train to the end, or to a checkpoint where `trainer.stopping.stopped` says so.

    After the last step a checkpoint is written in any case, so that no later fault loses it, and the loss on what is
    held back is measured.
    """
    trainer.throughput.started = time.perf_counter()
    try:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except AlreadyTrained:
            trainer.saved_step = trainer.state.global_step
        trainer.throughput.ended = time.perf_counter()
        if trainer.stopping.stopped:
            return
        if trainer.saved_step != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model)
        moved = sharded().startswith("zero") and follow_masters(trainer.accelerator.unwrap_model(trainer.model))
        history = trainer.state.log_history
        measured = any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history)
        if trainer.eval_dataset is not None and (moved or not measured):
            trainer.evaluate()
    except StoppedInEvaluation:
        trainer.throughput.ended = time.perf_counter()
        if trainer.saved_step != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model)
    finally:
        trainer.stopping.restore()


def merged(kind: Any, source: str, dtype: str, adapter: Path) -> Any:
    """Load the base again in this process alone, and add the adapters' products to its weights."""
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # else the base would be sharded over ranks that aren't here
    extra = {"num_labels": 2, "id2label": {0: "No", 1: "Yes"}} if "SequenceClassification" in kind.__name__ else {}
    base = kind.from_pretrained(
        source, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True, **extra
    )
    return merge(PeftModel.from_pretrained(base, str(adapter)))
