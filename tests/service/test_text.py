"""Ids to text: no broken character, no stop string, nothing lost; and prompts as transformers renders them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.completion import Completion
from service.text import StopStrings, TemplateRefusedError, Text
from tests.service.scripted import END, TEMPLATE, TOKENIZER, ids_of

TEXT = Text(TOKENIZER.to_str(), TEMPLATE, {"eos_token": "<|im_end|>"})
BROKEN = "\ufffd"
words = st.text(st.characters(exclude_characters=BROKEN, exclude_categories=["Cs"]), max_size=40)


def pieces(ids, stops=(), *, min_tokens=0):
    completion = Completion(TEXT, stops, min_tokens=min_tokens)
    found = []
    for token in ids:
        completion.push([token])
        if piece := completion.take():
            found.append(piece)
    completion.finish()
    if piece := completion.take():
        found.append(piece)
    return completion, found


@given(words)
def test_text_comes_out_whole_and_no_piece_is_a_broken_character(text):
    completion, found = pieces([*ids_of(text), END])
    assert "".join(piece.text for piece in found) == text
    assert all(BROKEN not in piece.text for piece in found)
    assert completion.kept is None


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_never_show_as_half_a_character_at_the_end_of_a_piece(ids):
    _, found = pieces(ids)
    assert all(not piece.text.endswith(BROKEN) for piece in found)


@given(words, st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string_wherever_tokens_are_cut(text, stops):
    whole = text + "ba€b" + text
    completion, found = pieces(ids_of(whole), stops)
    shown = "".join(piece.text for piece in found)
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
    if not ends:
        assert shown == whole
        assert completion.kept is None
    else:
        assert all(stop not in shown for stop in stops)
        assert whole.startswith(shown)
        assert completion.kept == len(whole[: min(ends)].encode())


@given(words)
def test_tokens_are_counted_once_their_text_is_shown(text):
    _, found = pieces(ids_of(text))
    shown = ""
    for piece in found:
        shown += piece.text
        assert piece.tokens == len(shown.encode())


def test_a_possible_stop_string_is_held_back_and_then_given_out():
    stops = StopStrings(["</end>"])
    assert stops.push("a</e") == ("a", False)
    assert stops.push("x") == ("</ex", False)
    assert stops.push("</en") == ("", False)
    assert stops.flush() == "</en"


def test_a_stop_string_does_not_count_before_min_tokens():
    completion, found = pieces(ids_of("a.b.c.d"), ["."], min_tokens=5)
    assert "".join(piece.text for piece in found) == "a.b.c"
    assert completion.kept == 6


def test_a_conversation_gets_the_ids_that_transformers_gives_it(tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|im_end|>")
    theirs.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "Be brief. <|im_end|>"}, {"role": "user", "content": "Grüße, \n 世界 🌍"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TEXT.encode_chat(messages, most=1000) == list(expected)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_or_misbehaves_says_nothing_of_the_messages(template):
    text = Text(TOKENIZER.to_str(), template, {})
    with pytest.raises(TemplateRefusedError) as caught:
        text.encode_chat([{"role": "user", "content": "CANARY"}], most=1000)
    assert "CANARY" not in str(caught.value)


def test_generation_blocks_and_loop_controls_of_templates_are_understood():
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    text = Text(TOKENIZER.to_str(), template, {})
    ids = text.encode_chat([{"role": "user", "content": word} for word in ("one", "two")], most=99)
    assert text.decode(ids) == "one"


def test_a_tokenizer_that_is_none_is_a_value_error():
    with pytest.raises(ValueError, match="tokenizer"):
        Text("{}", "", {})
