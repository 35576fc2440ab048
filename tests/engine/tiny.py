"""Models small enough to be made in a test: as a GGUF file, and as a folder that `transformers` writes."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 32, 4, 2, 2, 64


def byte_tokens() -> list[str]:
    """The 256 letters that byte-level tokenizers write bytes with, in their own order."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    return ["<|end|>", "<|start|>", *byte_tokens(), "he", "ll", "hell", "hello", "Ġhello"]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]


def metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3] + [1] * (len(vocabulary()) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    width, kv_width = HIDDEN, HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(vocabulary()), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (width, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv_width, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv_width, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, width),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, MLP),
        }
    return {name: random.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()}


def write_gguf(path: Path, *, change=None, weights: dict[str, np.ndarray] | None = None, architecture="llama") -> Path:
    """``change`` may add or overwrite metadata on the writer before the file is written."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata(writer)
    if change is not None:
        change(writer)
    for name, tensor in (weights if weights is not None else tensors()).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # in GGUF, where it is not the family's name


def write_gguf_of(path: Path, model: transformers.PreTrainedModel) -> Path:
    """The same model as llama.cpp's convert_hf_to_gguf.py writes it, in float32."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = tensor
        if architecture in ("llama", "smollm3") and heads:
            stored = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = tensor + 1
        weights[names.get_name(name, try_suffixes=(".weight", ".bias"))] = stored.numpy()
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 1, 2 * HEADS / HIDDEN))
        weights["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    return write_gguf(path, change=lambda writer: _describe(writer, config), weights=weights, architecture=architecture)


def _describe(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    ropes = config.rope_parameters
    rope, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention")
    overwrite(writer, f"{writer.arch}.block_count", config.num_hidden_layers, gguf.GGUFValueType.UINT32)
    overwrite(writer, f"{writer.arch}.attention.head_count_kv", config.num_key_value_heads, gguf.GGUFValueType.UINT32)
    overwrite(writer, f"{writer.arch}.rope.freq_base", rope["rope_theta"], gguf.GGUFValueType.FLOAT32)
    overwrite(
        writer, f"{writer.arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps, gguf.GGUFValueType.FLOAT32
    )
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if local:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if cap := getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(cap)
    if cap := getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(cap)


def overwrite(writer: gguf.GGUFWriter, key: str, value: object, kind: gguf.GGUFValueType) -> None:
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind)


def tokenizer_json() -> str:
    """Byte level, without merges."""
    model = tokenizers.models.BPE(vocab={token: n for n, token in enumerate(vocabulary())}, merges=[])
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    return built.to_str()


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = 12
FAMILIES = {
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "smollm3": {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}
ORIGINAL_CONTEXT = {"llama": 16, "gemma3_text": 128 // 8}  # where rope is stretched


def llama(**changes: object) -> transformers.PreTrainedModel:
    return of_family("llama", **changes)


def of_family(family: str, **changes: object) -> transformers.PreTrainedModel:
    """A model with random weights, large enough that logits lie apart. Norms and biases are random too."""
    torch.manual_seed(3)
    settings = {
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 2.0**-20,  # the same number in float32, as GGUF has it
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(family, **settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    centre = 0.0 if family.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(centre - 0.5, centre + 0.5)
        elif name.endswith("bias"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def write_folder(folder: Path, model: transformers.PreTrainedModel | None = None) -> Path:
    model = model or llama()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    special = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
