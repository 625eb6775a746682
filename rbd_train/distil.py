"""Distil on-policy: the student writes, and learns to weigh each next token as the teacher does (arXiv 2306.13649).

An option beside sft, through TRL's DistillationTrainer, where student and teacher share a vocabulary; start it from
what sft left. In: `train.jsonl` (Example), of which only the cases are read. Out: `model/`. It keeps no checkpoint:
interrupted, it starts anew.

    rbd distil model=plain model.path=runs/r1/sft/model teacher_path=deepseek-ai/DeepSeek-R1-Distill-Qwen-14B
    rbd distil model=tiny teacher_path=tiny trainer.max_steps=2
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.launched import check_alike, on_one_gpu, prepare_deepspeed, set_precision, sharded
from rbd_train.modelling import encode_context, load_model, load_tokenizer, plain, resolve_model
from rbd_train.prompts.detect import detect_messages
from rbd_train.records import Example
from rbd_train.run import Run, world_size
from rbd_train.settings import ModelConfig, TrainerConfig, accumulation, check_model, check_schedule, check_settings
from rbd_train.store import fingerprint
from rbd_train.training import log_to, own_optimizer
from rbd_train.weights import DETECTORS, model_card, save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class DistilConfig(BaseConfig):
    """Settings of distil."""

    teacher_path: str = ""  # folder or hub name of the teacher; its vocabulary must be the student's
    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # the student (conf/model)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # how to train; without checkpoints or evaluation
    train: str | None = None  # path of the examples; default: the output of stage curate
    max_new_tokens: int = 1024  # tokens that the student writes per case
    temperature: float = 1.0  # of the student's writing
    beta: float = 1.0  # 0: forward KL, 1: reverse KL, between: generalized Jensen-Shannon


@stage("distil", DistilConfig)
def main(cfg: DistilConfig, run: Run) -> float | None:
    """Load both, compare their vocabularies, train, save."""
    check(cfg)
    path = Path(cfg.train) if cfg.train else run.output_of("curate", "train.jsonl")
    examples = run.read(path, Example)
    source, teacher = resolve_model(cfg.model.path), resolve_model(cfg.teacher_path)
    tokenizer = load_tokenizer(source, reasoning=True)
    check_vocabulary(tokenizer, load_tokenizer(teacher, reasoning=True))
    prompts = prompts_of(tokenizer, examples, cfg.trainer.max_length - cfg.max_new_tokens)
    run.say(f"{len(prompts)} of {len(examples)} cases leave room for {cfg.max_new_tokens} new tokens")
    if not prompts:
        raise DataError(f"distil: 0 cases are left at trainer.max_length={cfg.trainer.max_length} tokens; raise it")
    trainer = make_trainer(source, teacher, tokenizer, prompts, cfg, run)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    settings = {"teacher": cfg.teacher_path, "beta": cfg.beta, "seed": cfg.seed, **vars(cfg.trainer)}
    card = model_card(
        DETECTORS["reasoning"], cfg.model.licence, cfg.model.path, run.inputs, settings, f"{len(prompts)} prompts."
    )
    save(trainer, tokenizer, source, cfg.model.path, cfg.model.dtype, card, run)
    if run.main:
        run.outputs["model"] = {"sha256": None, "rows": None}
        run.say(f"{trainer.state.global_step} steps, divergence {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses[-1]


def check(cfg: DistilConfig) -> None:
    """Refuse what can't work, or would do nothing, before anything is loaded.

    Raises:
        UsageError: names the keys and the way out.
    """
    import torch

    if cfg.model.lora_rank or cfg.model.four_bit:
        raise UsageError("distil trains every weight: set model.lora_rank=0 and model.four_bit=false")
    check_model(cfg.model)
    check_schedule(cfg.trainer)
    check_settings(cfg.model, cfg.trainer, "reasoning", torch.cuda.is_available(), sharded())
    unused = [name for name in ("save_every", "eval_share", "padding_free", "liger") if getattr(cfg.trainer, name)]
    if unused:
        given = getattr(cfg.trainer, unused[0])
        raise UsageError(f"distil does nothing with trainer.{unused[0]}={given}; leave it out")
    if cfg.max_new_tokens < 1 or cfg.temperature <= 0:
        raise UsageError(f"max_new_tokens={cfg.max_new_tokens} temperature={cfg.temperature}: both must be more than 0")
    if not 0 <= cfg.beta <= 1:
        raise UsageError(f"beta is {cfg.beta}; it goes from 0, forward KL, to 1, reverse KL")


def check_vocabulary(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
    """Refuse models whose ids mean different tokens.

    Raises:
        UsageError: names the first token that differs.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        apart = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise UsageError(
            f"student and teacher differ in {len(apart)} tokens of their vocabularies, for example {apart[0]!r}; "
            "on-policy distillation compares them token by token: choose a teacher of the same family, or use sft"
        )


def prompts_of(tokenizer: "PreTrainedTokenizerBase", examples: list[Example], room: int) -> list[dict[str, Any]]:
    """Return the contexts that fit, as TRL reads them; control tokens inside judged text are broken."""
    found = []
    for example in examples:
        messages = detect_messages(example.case)
        if len(encode_context(tokenizer, messages)) <= room:
            found.append({"prompt": [{**m, "content": plain(tokenizer, m["content"])} for m in messages]})
    return found


def make_trainer(
    source: str, teacher: str, tokenizer: "PreTrainedTokenizerBase", prompts: list[dict[str, Any]],
    cfg: DistilConfig, run: Run,
) -> Any:  # fmt: skip
    """Set up TRL's DistillationTrainer.

    Raises:
        UsageError: the teacher's output is narrower than the student's.
    """
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    cuda, settings = torch.cuda.is_available(), cfg.trainer
    prepare_deepspeed(cuda)
    args = DistillationConfig(
        output_dir=str(run.folder / "trl"), learning_rate=settings.learning_rate, num_train_epochs=settings.epochs,
        max_steps=settings.max_steps, per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=accumulation(settings.global_batch, settings.micro_batch, world_size()),
        max_completion_length=cfg.max_new_tokens, temperature=cfg.temperature, beta=cfg.beta,
        warmup_steps=settings.warmup_share, lr_scheduler_type=settings.scheduler, weight_decay=settings.weight_decay,
        bf16=set_precision(settings.bf16, cuda), activation_checkpointing=bool(settings.recompute),
        use_cpu=not cuda, seed=cfg.seed, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=cuda,
    )  # fmt: skip
    on_one_gpu(args)
    check_alike(fingerprint([run.inputs, prompts]))
    student: Any = load_model(source, cfg.model.dtype)
    wise = load_model(teacher, cfg.model.dtype)
    if wise.config.vocab_size < student.config.vocab_size:
        raise UsageError(
            f"the teacher's output has {wise.config.vocab_size} entries, the student's {student.config.vocab_size}; "
            "choose a teacher at least as wide"
        )
    # families pad their tables differently (QwenLM/Qwen3#466); ids past the vocabulary mean nothing
    wise.resize_token_embeddings(student.config.vocab_size)
    tokenizer.padding_side = "left"
    optimizer = own_optimizer(student, cfg.model, settings, args.device)
    trainer = DistillationTrainer(
        model=student, teacher_model=wise, args=args, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer, optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(log_to(run))
    return trainer
