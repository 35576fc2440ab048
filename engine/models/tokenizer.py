"""The tokenizer of a model as a tokenizer.json, and what a chat template needs of it.

A GGUF file holds vocabulary, merges and the name of a pre-tokenizer; the rest of tokenizer.json is put together here.
The splits are llama.cpp's (`llm_tokenizer_bpe` in src/llama-vocab.cpp), which are those the models were trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import tokenizers

from engine.models.errors import ModelError
from engine.models.fields import Fields

_NORMAL: Final = 1  # token types of GGUF
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_DIGIT: Final = {"type": "Digits", "individual_digits": True}
_GPT2: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# By the name in tokenizer.ggml.pre: what cuts a text into the pieces that merges may not cross.
_PRE_TOKENIZERS: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    **dict.fromkeys(("default", "gpt-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_split(_LLAMA3), _BYTES)),
}
_IGNORE_MERGES: Final = ("llama-bpe", "llama3", "llama-v3")  # a piece that is a token as a whole stays one
_SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What travels to whoever turns texts into ids and back."""

    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]  # bos_token, eos_token … as the template names them
    eos_token_ids: tuple[int, ...]


def from_gguf(fields: Fields) -> TokenizerFiles:
    tokens = fields.texts("tokenizer.ggml.tokens")
    special = {
        name: tokens[_token_id(fields, f"tokenizer.ggml.{key}_token_id", tokens)]
        for name, key in _SPECIAL.items()
        if fields.has(f"tokenizer.ggml.{key}_token_id")
    }
    ends = [key for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if fields.has(key)]
    return TokenizerFiles(
        tokenizer_json=_checked(json.dumps(_byte_level_bpe(fields, tokens), ensure_ascii=False)),
        chat_template=fields.text("tokenizer.chat_template", ""),
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(_token_id(fields, key, tokens) for key in ends)),
    )


def _token_id(fields: Fields, key: str, tokens: Sequence[str]) -> int:
    number = fields.integer(key, least=0)
    if number >= len(tokens):
        raise ModelError(f"{key} is {number}, but the vocabulary has {len(tokens)} tokens")
    return number


def _byte_level_bpe(fields: Fields, tokens: Sequence[str]) -> dict[str, object]:
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"tokenizer {kind[:40]!r} of GGUF is not supported (gpt2 is); a Hugging Face folder would do")
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {pre[:40]!r} is not supported; supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("the vocabulary holds the same token twice")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(fields, tokens),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_PRE_TOKENIZERS[pre])},
        "post_processor": _post_processor(fields, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": vocabulary,
            "merges": [_pair(merge) for merge in fields.texts("tokenizer.ggml.merges")],
        },
    }


def _pair(merge: str) -> list[str]:
    parts = merge.split(" ")
    if len(parts) != 2:
        raise ModelError(f"merge {merge[:40]!r} is not two tokens with a space between")
    return parts


def _added_tokens(fields: Fields, tokens: Sequence[str]) -> list[dict[str, object]]:
    """Tokens found in a text before it is cut: control tokens, which decoding may leave out, and user-defined ones."""
    key = "tokenizer.ggml.token_type"
    kinds = fields.integers(key) if fields.has(key) else [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"the vocabulary has {len(tokens)} tokens but {len(kinds)} token types")
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(fields: Fields, tokens: Sequence[str]) -> dict[str, object] | None:
    """Nothing, or the beginning-of-text token in front where the file asks for it."""
    if not fields.flag("tokenizer.ggml.add_bos_token", default=False):
        return None
    number = _token_id(fields, "tokenizer.ggml.bos_token_id", tokens)
    bos = {"SpecialToken": {"id": tokens[number], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}},
    }


def from_folder(
    tokenizer_json: str, *, settings: Fields, generation: Fields, config: Fields, template: str | None
) -> TokenizerFiles:
    """``settings`` is tokenizer_config.json, ``generation`` generation_config.json; both may be empty."""
    special = {name: text for name, value in settings.items() if name.endswith("_token") and (text := _content(value))}
    ends = next((source for source in (generation, config) if source.has("eos_token_id")), None)
    return TokenizerFiles(
        tokenizer_json=_checked(tokenizer_json),
        chat_template=template if template is not None else _template(settings),
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(ends.integers("eos_token_id"))) if ends else (),
    )


def _content(value: object) -> str | None:
    """A special token stands as its text, or as a mapping with its text and properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template(settings: Fields) -> str:
    """One template, or several with names of which "default" is ours."""
    value = settings.raw("chat_template")
    if isinstance(value, list):
        named = [Fields(item, where="chat_template") for item in value if isinstance(item, dict)]
        return next((item.text("template") for item in named if item.raw("name") == "default"), "")
    return value if isinstance(value, str) else ""


def _checked(tokenizer_json: str) -> str:
    try:
        tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 -- the library raises bare Exception
        raise ModelError(f"the tokenizer is not usable: {str(error)[:200]}") from None
    return tokenizer_json
