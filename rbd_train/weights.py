"""The final weights: saved whole or not at all, read back and compared, merged where adapters were trained."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.checkpoints import newest_whole
from rbd_train.errors import DataError
from rbd_train.run import Run
from rbd_train.store import write_json, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PICKLED = ("training_args.bin", "README.md")  # a pickle, and a library's card that says nothing


def save(
    trainer: Any, tokenizer: "PreTrainedTokenizerBase", source: str, base: str, dtype: str, card: str, run: Run
) -> None:  # fmt: skip
    """Save weights, tokenizer and card in `model/`; every rank takes part, since ZeRO-3 gathers shards (A42).

    `source` is where the base was loaded from, `base` how it was named.

    Adapters are saved in `model/adapter/` beside the merged model, so that every server and engine can read `model/`.

    Raises:
        DataError: a tensor read back differs from the one in memory, or the disk is full.
    """
    from rbd_train.trainer import merged

    part = run.folder / "model.part"
    if run.main:
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    adapters = hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config")
    with whole(part, Path(trainer.args.output_dir)):
        trainer.save_model(str(part / "adapter" if adapters else part))
        trainer.accelerator.wait_for_everyone()
        check_saved(trainer, part / "adapter" if adapters else part)
        if not run.main:
            return
        if adapters:
            kind = trainer.accelerator.unwrap_model(trainer.model).get_base_model().__class__
            model = merged(kind, source, dtype, part / "adapter")
            model.save_pretrained(part)
            check_merged(model, part)
            tidy_adapter(part / "adapter", base)
        tokenizer.save_pretrained(part)
        for leftover in PICKLED:
            (part / leftover).unlink(missing_ok=True)
        (part / "README.md").write_text(card, encoding="utf-8")
        for path in part.rglob("*"):  # safetensors leaves 0600, which a server under another user can't read
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.rmtree(run.folder / "model", ignore_errors=True)
        os.replace(part, run.folder / "model")


def tidy_adapter(folder: Path, base: str) -> None:
    """Keep the adapter's tensors and settings, which name the base as the user did, not by a path of this machine."""
    for path in folder.iterdir():
        if path.is_dir():  # TRL's copy of fresh adapters, as dpo's reference
            shutil.rmtree(path)
        elif path.name not in ("adapter_config.json", "adapter_model.safetensors"):
            path.unlink()
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    write_json(folder / "adapter_config.json", {**settings, "base_model_name_or_path": name_of(base)})


def name_of(base: str) -> str:
    """Return a model's name without the machine's path to it."""
    return Path(base).name if Path(base).is_absolute() else base


@contextlib.contextmanager
def whole(part: Path, checkpoints: Path) -> Iterator[None]:
    """Leave nothing behind where a write fails, and say what still stands.

    Raises:
        DataError: the disk is full, or a quota is reached.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        told = str(error).split("\n", 1)[0][:200]
        kept = newest_whole(checkpoints).folder
        still = (
            f"{kept} is whole: make room, and the same command continues from it" if kept else "no checkpoint is left"
        )
        raise DataError(f"{part.parent}: the trained weights can't be written ({told}); {still}") from error


def check_saved(trainer: Any, folder: Path) -> None:
    """Compare every saved tensor with the trained parameter; a shard that was saved alone has size 0 (A42).

    Raises:
        DataError: a tensor is missing, of another shape or of other values.
    """
    module = trainer.accelerator.unwrap_model(trainer.model)
    main = trainer.accelerator.is_main_process
    found = stored_tensors(folder) if main else {}
    fault = ""
    for name, parameter in module.named_parameters():
        adapter = hasattr(module, "peft_config")
        if adapter and not parameter.requires_grad:
            continue
        with gathered(parameter) as live:
            if not main or fault:
                continue  # the other ranks only gather
            stored = name.replace(".default.", ".").replace(".modules_to_save", "") if adapter else name
            fault = difference(found, stored, live)
    if fault:
        raise DataError(f"{folder}: {fault}; not saved whole")


def check_merged(model: Any, folder: Path) -> None:
    """Compare what was saved of a merged model with it.

    Raises:
        DataError: a tensor is missing, of another shape or of other values.
    """
    found = stored_tensors(folder)
    faults = (difference(found, name, parameter.detach()) for name, parameter in model.named_parameters())
    fault = next((fault for fault in faults if fault), "")
    if fault:
        raise DataError(f"{folder}: {fault}; not saved whole")


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return, by a tensor's name, the open file that holds it."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        handle: Any = safe_open(file, framework="pt")
        found |= {name: handle for name in handle.keys()}  # noqa: SIM118
    return found


def difference(found: Mapping[str, Any], name: str, live: Any) -> str:
    """Say how a stored tensor differs from the one in memory; empty where it doesn't."""
    if name not in found:
        return f"tensor {name} is missing"
    if not live.isfinite().all():
        return f"tensor {name} is not finite: training has diverged; lower trainer.learning_rate"
    saved = found[name].get_tensor(name)
    if saved.shape != live.shape or not saved.to(live.dtype).equal(live.to(saved.dtype).to(live.dtype)):
        return f"tensor {name} {tuple(saved.shape)} differs from the trained {tuple(live.shape)}"
    return ""


@contextlib.contextmanager
def gathered(parameter: Any) -> Iterator[Any]:
    """Yield a whole parameter on the CPU: gathered where ZeRO-3 or FSDP hold a shard."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach().cpu()
    else:
        whole_one = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        yield whole_one.detach().cpu()


class Kind(NamedTuple):
    """What a stage makes, as its model card says it: a title, the hub's tags, how it came about, and what it does."""

    title: str
    tags: tuple[str, ...]
    made: str
    use: str


_TAGS = ("bias-detection", "llm-as-a-judge")
DETECTORS = {  # by the objective that they were trained with
    "reasoning": Kind(
        "A reasoning-based bias detector", (*_TAGS, "distillation"), "Distilled",
        "It reads a judge's decision, reasons, and says Yes or No: was it biased?",
    ),
    "label": Kind(
        "A bias detector without reasoning", _TAGS, "Trained",
        "It reads a judge's decision and says Yes or No at once: was it biased?",
    ),
    "classifier": Kind(
        "A bias classifier", _TAGS, "Trained",
        "It reads a judge's decision and gives two labels' scores: was it biased?",
    ),
}  # fmt: skip
SCORES_PENDING = "None yet: `rbd detection` writes them here, beside the content-blind rules."


def model_card(
    kind: Kind, licence: str | None, base: str, inputs: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any],
    rows: str, scores: str = SCORES_PENDING,
) -> str:  # fmt: skip
    """Write a model card: what was trained on what, how, and the scores, or where they will stand."""
    base = name_of(base)
    told = "\n".join(f"- `{Path(path).name}`: sha256 `{entry['sha256']}`" for path, entry in inputs.items())
    keys = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return f"""---
base_model: {base}
license: {licence or "other"}
library_name: transformers
tags: [{", ".join(kind.tags)}]
---
# {kind.title}

{kind.made} by rbd_train from `{base}` (licence of the base: {licence or "not known; see the base model"}).
{kind.use}

## Data

{told}

{rows}

## Settings

| key | value |
|---|---|
{keys}

## Scores

{scores.strip()}
"""


def add_scores(folder: Path, tables: str) -> None:
    """Put a detection's tables into the card of the model that was measured, in place of those of an earlier one."""
    card = folder / "README.md"
    if card.is_file() and (folder / "config.json").is_file():
        head, found, _ = card.read_text(encoding="utf-8").partition("## Scores\n")
        if found:
            write_whole(card, f"{head}{found}\n{tables.strip()}\n")
