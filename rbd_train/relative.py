"""Make a smaller relative of a model, to contrast it with: drop layers, then heal by a short distillation.

In: texts (JSON lines with a question or text, Newsroom's file); no label is read. Out: `model/` (safetensors, the same
tokenizer). Killed, the same command continues from the last checkpoint.

    rbd relative 'texts=[gsm8k/test.jsonl,newsroom.json]'
    rbd relative model.path=Qwen/Qwen2.5-7B-Instruct layers=14 'texts=[questions.jsonl]'
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.launched import check_alike
from rbd_train.modelling import encode_context, load_model, load_tokenizer, pad_id, resolve_model
from rbd_train.run import Run, Table
from rbd_train.settings import ModelConfig
from rbd_train.sources.direct import NewsroomSource
from rbd_train.sources.jsonl import rows_of, text_field
from rbd_train.store import fingerprint, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIELDS = ("question", "text", "document")  # of a JSON line: the first that is there


@dataclass
class RelativeConfig(BaseConfig):
    """Settings of relative."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # what to make smaller (conf/model)
    texts: list[str] = field(default_factory=list)  # files to distil on: JSON lines, or Newsroom's JSON
    layers: int | None = None  # layers kept, the first and the last among them; null: half
    steps: int = 300  # optimizer steps
    batch: int = 4  # texts per step
    length: int = 256  # tokens of a text; the rest is left out
    learning_rate: float = 3e-4  # peak
    save_every: int = 25  # steps between checkpoints that a killed run continues from


@stage("relative", RelativeConfig)
def main(cfg: RelativeConfig, run: Run) -> float | None:
    """Cut, distil, save."""
    if not cfg.texts:
        raise UsageError("texts is empty; name files to distil on, for example texts=[questions.jsonl]")
    source = resolve_model(cfg.model.path)
    tokenizer = load_tokenizer(source, reasoning=False)
    texts = [text for path in cfg.texts for text in texts_of(Path(path), run)]
    rows = [encode_context(tokenizer, [{"role": "user", "content": text}])[: cfg.length] for text in texts]
    teacher = load_model(source, cfg.model.dtype)
    teacher.train(False)
    total = teacher.config.num_hidden_layers
    kept = kept_layers(total, cfg.layers or max(2, total // 2))
    student = without_layers(load_model(source, cfg.model.dtype), kept)
    key = fingerprint([run.inputs, kept, vars(cfg.model), cfg.steps, cfg.seed])
    checkpoints = run.folder / f"checkpoints-{key}"
    trainer = distiller(teacher, student, tokenizer, rows, cfg, checkpoints, run)
    trainer.train(resume_from_checkpoint=last_whole(checkpoints))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    save(student, tokenizer, run)
    run.leftovers.append(checkpoints)
    run.table(
        Table(
            name="relative", title="A smaller relative", columns=("layers", "kept", "parameters (M)", "of", "texts",
            "steps", "divergence at first", "at last"),
            rows=((total, len(kept), student.num_parameters() / 1e6, teacher.num_parameters() / 1e6, len(rows),
                   cfg.steps, losses[0], losses[-1]),),
            note="Divergence: Kullback-Leibler, nats per token, of the texts distilled on.",
        )
    )  # fmt: skip
    return float(losses[-1])


def texts_of(path: Path, run: Run) -> list[str]:
    """Read a file's texts, each once."""
    if path.suffix == ".json" and isinstance(json.loads(read_text(path)), dict):
        found = [item.document for item in NewsroomSource(path=str(path)).load(0).graded]
    else:
        found = [text_field(row, next((f for f in FIELDS if f in row), "text"), where) for where, row in rows_of(path)]
    unique = list(dict.fromkeys(found))
    run.note_input(path, len(unique))
    return unique


def kept_layers(total: int, kept: int) -> list[int]:
    """Choose layers evenly, the first and the last among them.

    Raises:
        UsageError: not fewer than there are, or fewer than two.
    """
    if not 2 <= kept < total:
        raise UsageError(f"layers is {kept}; keep at least 2 and fewer than the model's {total}")
    return [round(k * (total - 1) / (kept - 1)) for k in range(kept)]


def without_layers(model: "PreTrainedModel", kept: Sequence[int]) -> "PreTrainedModel":
    """Drop the other layers, and number the kept ones anew.

    Raises:
        DataError: the model keeps its layers elsewhere than most.
    """
    from torch.nn import ModuleList

    base: Any = model.base_model
    if not hasattr(base, "layers"):
        raise DataError(f"{type(model).__name__} keeps its layers elsewhere; name a published smaller model instead")
    base.layers = ModuleList([base.layers[k] for k in kept])
    for number, layer in enumerate(base.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[k] for k in kept]
    return model


def distiller(
    teacher: "PreTrainedModel", student: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[list[int]], cfg: RelativeConfig, checkpoints: Path, run: Run,
) -> Any:  # fmt: skip
    """Set up transformers' trainer with the divergence from the teacher as its loss."""
    import torch
    from datasets import Dataset
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    class Distiller(Trainer):
        """Minimise KL(teacher || student) over every token that is no padding."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            """Return the mean over tokens; logits have shape (batch, tokens, vocabulary)."""
            mask = inputs["attention_mask"].bool()
            with torch.no_grad():
                wanted = teacher(**inputs).logits[mask].float().log_softmax(-1)
            said = model(**inputs).logits[mask].float().log_softmax(-1)
            loss = torch.nn.functional.kl_div(said, wanted, log_target=True, reduction="batchmean")
            return (loss, {"loss": loss}) if return_outputs else loss

    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(checkpoints), max_steps=cfg.steps, per_device_train_batch_size=cfg.batch,
        learning_rate=cfg.learning_rate, warmup_steps=0.1, lr_scheduler_type="cosine", weight_decay=0.0,
        bf16=True, use_cpu=not cuda, seed=cfg.seed, data_seed=cfg.seed, report_to="none", logging_steps=1,
        save_strategy="steps", save_steps=cfg.save_every, save_total_limit=1, dataloader_pin_memory=cuda,
        disable_tqdm=not (run.main and sys.stderr.isatty()),
    )  # fmt: skip
    tokenizer.pad_token_id = pad_id(tokenizer)
    trainer = Distiller(
        model=student, args=args, train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    check_alike(checkpoints.name)
    teacher.to(trainer.args.device)  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)
    return trainer


def last_whole(folder: Path) -> str | None:
    """Return the newest checkpoint that was written to its end: trainer_state.json is the last file of one."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", run: Run) -> None:
    """Save the relative, whole or not at all."""
    if not run.main:
        return
    part = run.folder / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(run.folder / "model", ignore_errors=True)
    os.replace(part, run.folder / "model")
    run.outputs["model"] = {"sha256": None, "rows": None}
    run.say(f"relative: {run.folder / 'model'}")
