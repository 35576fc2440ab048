"""Logprobs, penalties and bias through the running system, by the official client, against `transformers`' logits."""

import pytest
import torch

from tests.scenarios.conftest import System

TOLERANCE = 2e-3  # natural logarithms; two float32 forwards that add up in another order
MESSAGES = [{"role": "user", "content": "Name three colours of the sea."}]
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "extra_body": {"repetition_penalty": 1.1}}


def id_of(tokenizer) -> dict[str, int]:
    return {tokenizer.decode([token]): token for token in range(len(tokenizer))}


def logprobs_by_transformers(reference, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[tokens of the completion, vocabulary]"""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)


def test_chat_logprobs_are_those_of_transformers(system: System, transformers_smollm2):
    reference, tokenizer = transformers_smollm2
    asked = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0.7, "seed": 5, "logprobs": True, "top_logprobs": 5}
    client = system.client()
    answer = client.chat.completions.create(model=system.model, **asked, **PENALTIES).choices[0]
    content = answer.logprobs.content
    assert bytes(byte for one in content for byte in one.bytes).decode() == answer.message.content
    assert "".join(one.token for one in content) == answer.message.content

    ids = id_of(tokenizer)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    expected = logprobs_by_transformers(reference, prompt, [ids[one.token] for one in content])
    for row, one in zip(expected, content, strict=True):
        assert one.logprob == pytest.approx(float(row[ids[one.token]]), abs=TOLERANCE)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)

    stream = client.chat.completions.create(model=system.model, stream=True, **asked, **PENALTIES)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    again = [one for part in parts if part for one in part.content]
    assert [one.token for one in again] == [one.token for one in content]
    assert [one.logprob for one in again] == pytest.approx([one.logprob for one in content], abs=TOLERANCE)


def test_a_bias_changes_what_is_drawn_and_not_what_is_told(system: System, transformers_smollm2):
    reference, tokenizer = transformers_smollm2
    prompt = "The capital of France is"
    asked = {"model": system.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    client, ids = system.client(), id_of(tokenizer)
    free = client.completions.create(**asked).choices[0]
    barred = client.completions.create(**asked, logit_bias={str(ids[free.logprobs.tokens[0]]): -100}).choices[0]
    assert barred.logprobs.tokens[0] != free.logprobs.tokens[0]
    assert barred.logprobs.top_logprobs[0][free.logprobs.tokens[0]] == max(barred.logprobs.top_logprobs[0].values())
    for answer in (free, barred):
        told = answer.logprobs
        assert "".join(told.tokens) == answer.text
        assert all(answer.text.startswith(*pair) for pair in zip(told.tokens, told.text_offset, strict=True))
        completion = [ids[token] for token in told.tokens]
        expected = logprobs_by_transformers(reference, tokenizer(prompt)["input_ids"], completion)
        drawn = expected.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()
        assert told.token_logprobs == pytest.approx(drawn, abs=TOLERANCE)
        for row, best in zip(expected, told.top_logprobs, strict=True):
            assert sorted(best.values())[-3:] == pytest.approx(sorted(row.topk(3).values.tolist()), abs=TOLERANCE)
