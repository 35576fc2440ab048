"""The tokenizer of a model as a tokenizer.json, and what a chat template needs of it."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from engine.models.errors import ModelError
from engine.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What travels to whoever turns texts into ids and back."""

    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]  # bos_token, eos_token … as the template names them
    eos_token_ids: tuple[int, ...]


def from_folder(
    tokenizer_json: str, *, settings: Fields, generation: Fields, config: Fields, template: str | None
) -> TokenizerFiles:
    """``settings`` is tokenizer_config.json, ``generation`` generation_config.json; both may be empty."""
    special = {name: text for name, value in settings.items() if name.endswith("_token") and (text := _content(value))}
    ends = next((source for source in (generation, config) if source.has("eos_token_id")), None)
    return TokenizerFiles(
        tokenizer_json=checked(tokenizer_json),
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


def checked(tokenizer_json: str) -> str:
    """The same text; raises ModelError where no tokenizer can be made of it."""
    try:
        tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 -- the library raises bare Exception
        raise ModelError(f"the tokenizer is not usable: {str(error)[:200]}") from None
    return tokenizer_json
