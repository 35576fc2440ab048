"""The sampler: exact distributions, noise that depends on nothing but its key, filters as the field defines them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils._python_dispatch import TorchDispatchMode

from engine.adjust import adjust
from engine.draws import Draw
from engine.logprobs import Watch
from engine.sampler import draw, kept, uniforms

VOCABULARY = 1000


def logits_of(rows, *, vocabulary=VOCABULARY, spread=3.0, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def drawn(logits, draws):
    return draw(logits.clone(), draws).tolist()


def kept_by_transformers(logits, one):
    """The tokens that `transformers`' own chain of processors leaves."""
    chain = [transformers.TemperatureLogitsWarper(one.temperature)]
    if one.top_k:
        chain.append(transformers.TopKLogitsWarper(one.top_k))
    if one.top_p < 1:
        chain.append(transformers.TopPLogitsWarper(one.top_p))
    if one.min_p:
        chain.append(transformers.MinPLogitsWarper(one.min_p))
    scores = logits.unsqueeze(0)
    for step in chain:
        scores = step(torch.zeros(1, 1, dtype=torch.int64), scores)
    return scores[0] > -math.inf


FILTERS = {
    "nothing": Draw(temperature=1.0),
    "cold": Draw(temperature=0.2),
    "hot": Draw(temperature=5.0),
    "top-k": Draw(temperature=1.0, top_k=7),
    "top-k of one": Draw(temperature=1.0, top_k=1),
    "top-k of more than there are": Draw(temperature=1.0, top_k=5000),
    "top-k beyond the first look": Draw(temperature=1.0, top_k=700),
    "top-p": Draw(temperature=1.0, top_p=0.8),
    "top-p of nearly nothing": Draw(temperature=1.0, top_p=1e-6),
    "top-p of nearly all": Draw(temperature=1.0, top_p=0.9999),
    "top-p beyond the first look": Draw(temperature=9.0, top_p=0.95),
    "min-p": Draw(temperature=1.0, min_p=0.05),
    "min-p of all": Draw(temperature=1.0, min_p=1.0),
    "top-k then top-p": Draw(temperature=1.3, top_k=20, top_p=0.7),
    "everything": Draw(temperature=0.7, top_k=50, top_p=0.9, min_p=0.1),
}


SEEN = (5, 7, 7, 900, 5, 3, 3, 3, 999)  # the last five are the completion
ADJUSTMENTS = {
    "repetition": Draw(temperature=0.0, repetition=1.7, seen=SEEN, position=5),
    "repetition below one": Draw(temperature=0.0, repetition=0.6, seen=SEEN, position=5),
    "presence": Draw(temperature=0.0, presence=1.5, seen=SEEN, position=5),
    "frequency": Draw(temperature=0.0, frequency=-0.7, seen=SEEN, position=5),
    "presence and frequency": Draw(temperature=0.0, presence=-0.25, frequency=0.5, seen=SEEN, position=5),
    "bias": Draw(temperature=0.0, bias=((3, 4.5), (8, -100.0), (900, 1.0))),
    "bans": Draw(temperature=0.0, banned=(1, 2, 900)),
    "a mask": Draw(temperature=0.0, allowed=bytes(n % 251 for n in range(125))),
    "all of them": Draw(
        temperature=0.0,
        repetition=1.3,
        presence=0.5,
        frequency=0.25,
        bias=((7, 3.0), (4, -1.0)),
        banned=(0,),
        seen=SEEN,
        position=5,
        allowed=b"\xfe" + b"\xff" * 124,
    ),
    "penalties before the first token": Draw(temperature=0.0, presence=1.0, frequency=1.0, repetition=2.0),
    "penalties of the prompt alone": Draw(temperature=0.0, presence=1.0, frequency=1.0, seen=SEEN, position=0),
}


def adjusted_by_the_book(row, one):
    """Token by token, with `transformers`' own processors where it has one."""
    scores = row.unsqueeze(0).float()
    ids = torch.tensor([list(one.seen)], dtype=torch.int64)
    if one.bias:
        given = [[[token], bias] for token, bias in one.bias]
        scores = transformers.SequenceBiasLogitsProcessor(given)(torch.tensor([[0]]), scores)
    if one.repetition != 1 and one.seen:
        scores = transformers.RepetitionPenaltyLogitsProcessor(one.repetition)(ids, scores)
    scores = scores[0].clone()
    completion = list(one.seen[len(one.seen) - one.position :])
    for token in set(completion):  # OpenAI: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
        scores[token] -= completion.count(token) * one.frequency + one.presence
    for token in range(len(scores)):
        barred = one.allowed is not None and not one.allowed[token // 8] >> token % 8 & 1
        if barred or token in one.banned:
            scores[token] = -math.inf
    return scores


@pytest.mark.parametrize("one", ADJUSTMENTS.values(), ids=ADJUSTMENTS.keys())
def test_adjusted_logits_are_those_of_transformers_and_of_openais_formula(one):
    for row in logits_of(5):
        torch.testing.assert_close(adjust(row.unsqueeze(0).clone(), [one])[0], adjusted_by_the_book(row, one))


def test_rows_are_adjusted_apart_and_the_others_keep_their_values():
    draws = [mixed for one in ADJUSTMENTS.values() for mixed in (one, Draw(temperature=0.0))]
    logits = logits_of(len(draws))
    found = adjust(logits.clone(), draws)
    for number, one in enumerate(draws):
        torch.testing.assert_close(found[number], adjusted_by_the_book(logits[number], one))
        assert one.adjusts or torch.equal(found[number], logits[number])


def test_penalties_are_reckoned_in_full_precision():
    row = logits_of(1).to(torch.bfloat16)
    one = ADJUSTMENTS["all of them"]
    torch.testing.assert_close(adjust(row.clone(), [one])[0], adjusted_by_the_book(row[0], one))


class Counted(TorchDispatchMode):
    """What torch was asked to do, and how many values each call touched."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), found.numel() if isinstance(found, torch.Tensor) else 0))
        return found


def test_rows_that_ask_for_nothing_cost_nothing():
    logits = logits_of(8)
    with Counted() as plain:
        assert Watch.of(logits, [Draw(temperature=0.0)] * 8) is None
        draw(logits.clone(), [Draw(temperature=0.0)] * 8)
    assert [name for name, _ in plain.calls] == ["aten::clone", "aten::argmax"]
    penalised = dataclasses.replace(ADJUSTMENTS["all of them"], allowed=None)
    with Counted() as mixed:
        adjust(logits, [penalised, *[Draw(temperature=0.0)] * 7])
    places = max(len(SEEN), len(penalised.bias), len(penalised.banned))
    written = [count for name, count in mixed.calls if "index_put" not in name and count > places]
    assert written == [], "nothing as long as the vocabulary is touched, and no other row"
    assert sum("index_put" in name for name, _ in mixed.calls) == 4


def test_told_logprobs_are_the_models_own_whatever_is_asked_of_the_draw():
    draws = [dataclasses.replace(one, temperature=2.0, logprobs=n % 4) for n, one in enumerate(ADJUSTMENTS.values())]
    draws.insert(3, Draw(temperature=1.0))
    logits = logits_of(len(draws))
    expected = torch.log_softmax(logits.double(), -1)
    watch = Watch.of(logits, draws)
    tokens = draw(logits.clone(), draws)
    told = watch.tell(tokens)
    assert sorted(told) == [n for n, one in enumerate(draws) if one.logprobs is not None]
    for number, logprob in told.items():
        best = expected[number].topk(draws[number].logprobs)
        assert logprob.logprob == pytest.approx(float(expected[number, tokens[number]]), abs=1e-5)
        assert logprob.ids == best.indices.tolist()
        assert logprob.logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_told_logprobs_are_no_more_than_there_are_tokens():
    logits = logits_of(1, vocabulary=6)
    told = Watch.of(logits, [Draw(temperature=0.0, logprobs=20)]).tell(logits.argmax(-1))
    assert sorted(told[0].ids) == list(range(6))
    assert sum(math.exp(value) for value in told[0].logprobs) == pytest.approx(1)


@pytest.mark.parametrize("one", FILTERS.values(), ids=FILTERS.keys())
def test_kept_tokens_are_those_that_transformers_keeps(one):
    for row in logits_of(20):
        weights, _ = kept(row.unsqueeze(0).clone(), [one])
        above_underflow = (row - row.max()) / one.temperature > -80
        assert torch.equal((weights[0] > 0) & above_underflow, kept_by_transformers(row, one) & above_underflow)
        assert not weights[0][~kept_by_transformers(row, one)].any()


@pytest.mark.parametrize("one", FILTERS.values(), ids=FILTERS.keys())
def test_draws_follow_the_exact_distribution(one):
    """Chi-square over 20,000 draws with a seed each, within three deviations of what chance gives."""
    row, count = logits_of(1, vocabulary=30, spread=1.5)[0], 20_000
    scores = (row.double() / one.temperature).masked_fill(~kept_by_transformers(row, one), -math.inf)
    expected = torch.softmax(scores, -1) * count
    tokens = draw(row.repeat(count, 1), [dataclasses.replace(one, seed=seed) for seed in range(count)])
    observed = torch.bincount(tokens, minlength=len(row)).double()
    assert not observed[expected == 0].any()
    often = expected >= 50
    statistic = ((observed - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum())
    assert statistic <= freedom + 3 * math.sqrt(2 * freedom)


def test_every_row_has_its_own_way():
    """A batch of all filters at once, greedy rows between, equals each row alone; so does any order of it."""
    draws = [dataclasses.replace(one, seed=n, position=n) for n, one in enumerate(FILTERS.values())]
    draws += [dataclasses.replace(one, seed=n, temperature=n % 3 / 2) for n, one in enumerate(ADJUSTMENTS.values())]
    draws = [mixed for one in draws for mixed in (one, Draw(temperature=0.0, seed=5))]
    logits = logits_of(len(draws))
    together = drawn(logits, draws)
    assert together == [drawn(row.unsqueeze(0), [one])[0] for row, one in zip(logits, draws, strict=True)]
    order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(1))
    assert drawn(logits[order], [draws[i] for i in order]) == [together[i] for i in order]
    assert together[1::2] == logits[1::2].argmax(-1).tolist()


def test_noise_is_that_of_splitmix64():
    """Against the reference in Python integers, whose first outputs from state 0 are published."""

    def mixed(state):
        state &= 2**64 - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return state ^ state >> 31

    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 3, 8191), (-5, 0, 7), (2**80 + 1, 0, 0)]
    expected = []
    for key in keys:
        state = 0
        for number in key:
            state = mixed(state + (number + 1) * 0x9E3779B97F4A7C15)
        expected.append((state >> 11) * 2**-53)
    draws = [Draw(temperature=1.0, seed=seed, choice=choice, position=position) for seed, choice, position in keys]
    assert uniforms(draws).tolist() == expected
    assert expected[6] == expected[1]  # seeds count modulo 2**64
    assert len(set(expected)) == len(keys) - 1


@pytest.mark.parametrize("key", ["seed", "choice", "position"])
def test_noise_is_even_and_unrelated_along_each_part_of_its_key(key):
    numbers = uniforms([Draw(temperature=1.0, **{key: n}) for n in range(100_000)])
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 3 * math.sqrt(2 * 99)
    centred = numbers - 0.5
    for lag in (1, 2, 64):
        correlation = (centred[:-lag] * centred[lag:]).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(len(numbers))


def test_a_temperature_of_almost_nothing_is_greedy_and_one_without_end_is_even():
    row = logits_of(1)[0]
    for temperature in (0.0, 1e-320, 1e-9, 1e-6):
        assert drawn(row.unsqueeze(0), [Draw(temperature=temperature, seed=3)]) == [int(row.argmax())]
    weights, _ = kept(row.unsqueeze(0).clone(), [Draw(temperature=1e30)])
    assert weights.min() > 0.999


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [1e-5, 0.01, 1.0, 1e5, 1e30])
def test_extreme_values_give_a_token_with_a_weight_of_its_own(scale, temperature):
    logits = logits_of(4) * scale
    logits[0, 5:] = -math.inf
    logits[1] = 0.0
    for change in ({}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": 1e-12}, {"min_p": 0.5}):
        draws = [Draw(temperature=temperature, seed=seed, **change) for seed in range(4)]
        weights, _ = kept(logits.clone(), draws)
        assert torch.isfinite(weights).all()
        tokens = draw(logits.clone(), draws)
        assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_tokens_with_equal_logits_are_kept_or_left_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for change in ({"top_k": 2}, {"top_p": 0.5}):
        weights, _ = kept(logits.clone(), [Draw(temperature=1.0, **change)])
        assert (weights[0] > 0).tolist() == [True, True, True, True, False]


def test_banned_tokens_never_come():
    logits = logits_of(3)
    best = logits.argmax(-1).tolist()
    second = logits.topk(2, -1).indices[:, 1].tolist()
    draws = [Draw(temperature=0.0, banned=(best[0],)), Draw(temperature=0.0), Draw(temperature=1e-4, banned=(best[2],))]
    assert drawn(logits, draws) == [second[0], best[1], second[2]]


def test_no_rows_give_no_tokens():
    assert draw(torch.empty(0, VOCABULARY), []).tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    values=some.lists(some.floats(-50, 50, width=32), min_size=2, max_size=40),
    temperature=some.floats(1e-4, 100),
    top_k=some.integers(0, 50),
    top_p=some.floats(1e-9, 1.0),
    min_p=some.floats(0.0, 1.0),
)
def test_whatever_the_settings_a_kept_token_comes(values, temperature, top_k, top_p, min_p):
    logits = torch.tensor([values])
    one = Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=len(values))
    weights, lowest = kept(logits.clone(), [one])
    (token,) = drawn(logits, [one])
    assert weights[0, token] > 0
    assert weights[0].max() == 1
    assert lowest[0] <= 0
