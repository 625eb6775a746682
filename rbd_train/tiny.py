"""A tiny random model (2 layers, byte vocabulary, made here in a second) to try every command on any machine."""

import os
import tempfile
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(folder: Path) -> Path:
    """Make the model in a folder, whole or not at all; a second call finds it there."""
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(wrapped), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192,
            eos_token_id=wrapped.eos_token_id, pad_token_id=wrapped.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    torch.random.set_rng_state(state)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        model.save_pretrained(made)
        wrapped.save_pretrained(made)
        try:
            os.replace(made, folder)
        except OSError:  # another process was faster: its model is the same
            if not (folder / "model.safetensors").is_file():
                raise
    return folder
