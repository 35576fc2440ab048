"""A tokenizer.json put together from the metadata of a GGUF file, which holds little more than vocabulary and merges.

The splits of byte-level tokenizers are llama.cpp's (`llm_tokenizer_bpe` in src/llama-vocab.cpp), which are those the
models were trained with. SentencePiece vocabularies are turned into merges as `transformers` does, by their scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.tokenizer import TokenizerFiles, checked

_NORMAL: Final = 1  # token types of GGUF
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_SPACE: Final = "\u2581"  # how SentencePiece writes one
_LONGEST_PIECE: Final = 256  # of a SentencePiece vocabulary, in characters; far above any

_DIGIT: Final = {"type": "Digits", "individual_digits": True}
_GPT2: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace("{1,3}", "")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# By the name in tokenizer.ggml.pre: what cuts a text into the pieces that merges may not cross.
_PRE_TOKENIZERS: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    **dict.fromkeys(("default", "gpt-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (_split(_LLAMA3), _BYTES)),
    "qwen2": (_split(_QWEN2), _BYTES),
    "tekken": (_split(_TEKKEN), _BYTES),
}
# A piece that is a token as a whole stays one.
_IGNORE_MERGES: Final = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
_SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def from_gguf(fields: Fields) -> TokenizerFiles:
    tokens = fields.texts("tokenizer.ggml.tokens")
    special = {
        name: tokens[_token_id(fields, f"tokenizer.ggml.{key}_token_id", tokens)]
        for name, key in _SPECIAL.items()
        if fields.has(f"tokenizer.ggml.{key}_token_id")
    }
    kind = fields.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ModelError(
            f"tokenizer {kind[:40]!r} of GGUF is not supported, {' and '.join(_KINDS)} are; a Hugging Face folder does"
        )
    whole = {"version": "1.0", "truncation": None, "padding": None} | _KINDS[kind](fields, tokens)
    ends = [key for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if fields.has(key)]
    return TokenizerFiles(
        tokenizer_json=checked(json.dumps(whole, ensure_ascii=False)),
        chat_template=fields.text("tokenizer.chat_template", ""),
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(_token_id(fields, key, tokens) for key in ends)),
    )


def _token_id(fields: Fields, key: str, tokens: Sequence[str]) -> int:
    number = fields.integer(key, least=0)
    if number >= len(tokens):
        raise ModelError(f"{key} is {number}, but the vocabulary has {len(tokens)} tokens")
    return number


def _byte_level(fields: Fields, tokens: Sequence[str]) -> dict[str, object]:
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {pre[:40]!r} is not supported; supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return {
        "added_tokens": _added_tokens(fields, tokens),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_PRE_TOKENIZERS[pre])},
        "post_processor": _post_processor(fields, tokens, default=False),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(
            tokens,
            [_pair(merge) for merge in fields.texts("tokenizer.ggml.merges")],
            ignore_merges=pre in _IGNORE_MERGES,
        ),
    }


def _sentence_piece(fields: Fields, tokens: Sequence[str]) -> dict[str, object]:
    """Llama 2 and Mistral begin a text with a space that was not there; Gemma does not.

    Gemma also differs in two ways that its files do not tell: they spell runs of spaces as spaces, and not the scores
    but the order of the tokens is that of their merges.
    """
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    scores: Sequence[float] = [-float(number) for number in range(len(tokens))]
    if prefix:
        scores = fields.reals("tokenizer.ggml.scores")
    else:
        tokens = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    if len(scores) != len(tokens):
        raise ModelError(f"the vocabulary has {len(tokens)} tokens but {len(scores)} scores")
    unknown_id = "tokenizer.ggml.unknown_token_id"
    unknown = tokens[_token_id(fields, unknown_id, tokens)] if fields.has(unknown_id) else None
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "added_tokens": [token for token in _added_tokens(fields, tokens) if str(token["content"]).strip(_SPACE)],
        "normalizer": None if prefix else {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
        if prefix
        else None,
        "post_processor": _post_processor(fields, tokens, default=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(tokens, _merges(tokens, scores))
        | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


_KINDS: Final[Mapping[str, Callable[[Fields, Sequence[str]], dict[str, object]]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], *, ignore_merges: bool = False) -> dict[str, object]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("the vocabulary holds the same token twice")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first."""
    known = set(tokens)
    found = [
        (score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        if len(token) <= _LONGEST_PIECE
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


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
            "special": kind != _USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(fields: Fields, tokens: Sequence[str], *, default: bool) -> dict[str, object] | None:
    """Nothing, or the beginning-of-text token in front where the file asks for it."""
    if not fields.flag("tokenizer.ggml.add_bos_token", default=default):
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
