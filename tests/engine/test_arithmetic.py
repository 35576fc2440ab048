"""Weights in fewer bits: the products are those of a plain reference of the same arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.config import ConfigError, WorkerConfig
from engine.kernels import int4, int8
from engine.kernels.arithmetic import Arithmetic
from engine.kernels.device import DeviceError
from engine.kernels.linear import HalfLinear, Int4Linear, Int8Linear, make_head, make_linear
from engine.models import load
from engine.models.ggml import GgmlType, dequantise, four_bit_groups
from engine.runner import TorchRunner
from service.cli.processes import WEIGHTS
from tests.engine import tiny
from tests.engine.test_gguf import random_blocks

FEWER = [Arithmetic.FP16, Arithmetic.INT8, Arithmetic.INT4]
SHAPES = [(960, 576), (576, 1536), (96, 40), (5, 7)]


def matrix(outputs, inputs, seed=0):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def hostile(outputs, inputs):
    """Neighbours at both ends of the range, where sixteen bits would not hold two products."""
    weight = torch.full((outputs, inputs), 2.0)
    weight[1::2] = -2.0
    weight[2::5] = matrix(len(weight[2::5]), inputs) ** 3
    weight[3] = 0
    return weight


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("make", [matrix, hostile])
@pytest.mark.parametrize("count", [1, 2, 17, 130])
def test_an_int8_product_is_that_of_the_integers(outputs, inputs, make, count):
    """Of activations that rounding leaves as they are: so many steps, in a unit of each row's own, mixed back."""
    weight, by = make(outputs, inputs), int8.mixing(inputs)
    whole = torch.randint(-int8.STEPS, int8.STEPS + 1, (count, inputs), generator=torch.Generator().manual_seed(1))
    whole[:, 0] = int8.STEPS
    whole[count // 2] = int8.STEPS
    units = torch.logspace(-3, 3, count).unsqueeze(1)
    steps, scale = int8.quantised(int8.mixed(weight, by))
    wanted = (whole @ steps.long().T).double() * scale * units
    found = Int8Linear(weight)(int8.mixed(whole.float(), by.T) * units).double()
    found, wanted = found / units, wanted / units
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("make", [matrix, hostile])
def test_no_two_neighbours_overflow_sixteen_bits(make):
    for by in (torch.eye(1), int8.mixing(576)):
        steps, _ = int8.quantised(int8.mixed(make(64, 576), by))
        pairs = steps.long().unflatten(1, (-1, 2))
        assert (pairs.clamp_min(0).sum(-1) * (int8.ZERO + int8.STEPS)).max() < 2**15
        assert (pairs.clamp_max(0).sum(-1) * (int8.ZERO + int8.STEPS)).min() >= -(2**15)
        assert steps.abs().max() > 60


def test_mixing_keeps_the_product_and_levels_a_channel_that_stands_out():
    weight, rows = matrix(64, 576), matrix(9, 576, seed=1)
    rows[:, 77] *= 100
    by = int8.mixing(576)
    torch.testing.assert_close(
        int8.mixed(rows, by) @ int8.mixed(weight, by).T, rows @ weight.T, rtol=1e-4, atol=1e-3 * rows.abs().max().item()
    )
    assert int8.mixed(rows, by).abs().max() < rows.abs().max() / 4
    exact = rows @ weight.T
    unit = rows.abs().amax(1, keepdim=True) / int8.STEPS
    plain = (rows / unit).round() * unit @ weight.T
    assert (Int8Linear(weight)(rows) - exact).norm() < (plain - exact).norm() / 3


@pytest.mark.parametrize("arithmetic", FEWER)
def test_a_row_alone_is_what_it_is_among_others(arithmetic):
    """Integers: one rounding step of an activation at most, where its mixing was summed in another order."""
    linear = make_linear(matrix(960, 576), arithmetic=arithmetic)
    rows = matrix(128, 576, seed=1)
    rows[64:] *= 1000
    together = linear(rows)
    for first, count in ((0, 1), (3, 2), (10, 7), (31, 33), (90, 16)):
        alone = linear(rows[first : first + count])
        largest = together[first : first + count].abs().max().item()
        bound = 0.01 if arithmetic is Arithmetic.INT8 else 1e-5
        torch.testing.assert_close(alone, together[first : first + count], rtol=0, atol=bound * largest)


@pytest.mark.parametrize("arithmetic", FEWER)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bias_and_residual_are_added_once(arithmetic, outputs, inputs):
    weight, bias = matrix(outputs, inputs), matrix(1, outputs, seed=2)[0]
    rows, other = matrix(6, inputs, seed=1), matrix(6, outputs, seed=3)
    kept = other.clone()
    plain, biased = make_linear(weight, arithmetic=arithmetic), make_linear(weight, bias, arithmetic)
    torch.testing.assert_close(biased(rows), plain(rows) + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain.add_to(other, rows), plain(rows) + other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(biased.add_to(other, rows), plain(rows) + bias + other, rtol=1e-4, atol=1e-4)
    assert torch.equal(other, kept)


@pytest.mark.parametrize("arithmetic", FEWER)
def test_rows_of_zeros_and_tiny_rows_come_out_finite(arithmetic):
    linear = make_linear(matrix(64, 64), arithmetic=arithmetic)
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 64))
    assert linear(torch.full((2, 64), 1e-37)).isfinite().all()


def test_fp16_multiplies_by_the_weights_rounded_to_it():
    weight, rows = matrix(96, 576), matrix(5, 576, seed=1)
    weight[0, 0] = 1e6  # more than float16 holds
    rounded = weight.clamp(-65504, 65504).half().float()
    wanted = rows @ rounded.T
    torch.testing.assert_close(HalfLinear(weight)(rows), wanted, rtol=1e-5, atol=1e-3)


def test_int4_is_within_half_a_step_of_the_weights():
    weight = matrix(96, 576)
    groups = int4.groups_from(weight)
    assert groups.shape == (96, 18, 20)
    values = weight.unflatten(1, (-1, 32))
    half_step = (values.amax(-1) - values.amin(-1)) / 30
    off = (int4.unpacked(groups) - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    assert (off <= half_step * 1.02 + 2e-3).all()  # scale and offset are float16
    rows = matrix(5, 576, seed=1)
    torch.testing.assert_close(Int4Linear(groups)(rows), rows @ int4.unpacked(groups).T, rtol=1e-4, atol=1e-4)


def test_groups_of_one_value_keep_it():
    weight = torch.tensor([[0.0] * 32, [0.25] * 32, [-3.0] * 32])
    assert torch.equal(int4.unpacked(int4.groups_from(weight)), weight)


@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K], ids=lambda kind: kind.name)
def test_four_bit_blocks_of_gguf_keep_their_numbers(kind):
    blocks = torch.from_numpy(random_blocks(kind, 24).reshape(-1))
    elements = 24 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))][0]
    shape = (3, elements // 3)
    wanted = dequantise(blocks, kind, shape=shape, tensor="t")
    found = int4.unpacked(four_bit_groups(blocks, kind, shape=shape))
    # Others: scale · q and the offset are summed with one rounding less. Q4_K: scale and offset are rounded to float16.
    bound = 2e-3 if kind is GgmlType.Q4_K else 1e-6
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound * wanted.abs().max().item())


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q6_K, GgmlType.F16], ids=lambda kind: kind.name)
def test_other_blocks_are_no_groups(kind):
    blocks = torch.from_numpy(random_blocks(kind, 24).reshape(-1))
    assert four_bit_groups(blocks, kind, shape=(3, -1)) is None


def test_few_bits_stop_before_the_head():
    weight = matrix(64, 64)
    assert isinstance(make_head(weight, Arithmetic.INT8), HalfLinear)
    assert isinstance(make_head(weight, Arithmetic.INT4), HalfLinear)
    assert type(make_head(weight)) is type(make_linear(weight))


def logits(model, tokens):
    return TorchRunner(model, device="cpu", num_blocks=8, block_size=16).logits(tokens)


def calm():
    """Not so large weights that every rounding is amplified."""
    return tiny.llama(initializer_range=0.05)


@pytest.mark.parametrize("source", ["gguf", "folder"])
@pytest.mark.parametrize(("arithmetic", "bound"), list(zip(FEWER, (0.002, 0.05, 0.2), strict=True)))
def test_a_model_of_either_kind_of_file_answers_nearly_alike(source, arithmetic, bound, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf") if source == "gguf" else tiny.write_folder(tmp_path / "m", calm())
    exact, found = load(str(path), device="cpu"), load(str(path), device="cpu", arithmetic=arithmetic)
    wanted = logits(exact, [5, 9, 77, 31, 8])
    off = (logits(found, [5, 9, 77, 31, 8]) - wanted).norm() / wanted.norm()
    assert 0 < off < bound


def test_other_numbers_have_another_revision(tmp_path):
    path = str(tiny.write_gguf(tmp_path / "m.gguf"))
    found = {each: load(path, device="cpu", arithmetic=each).revision for each in Arithmetic}
    assert found[Arithmetic.AUTO] == found[Arithmetic.FP32]
    assert len(set(found.values())) == 4


def test_what_a_device_cannot_do_is_refused(tmp_path):
    path = str(tiny.write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(DeviceError, match=r"float32, not torch\.bfloat16"):
        load(path, device="cpu", dtype=torch.bfloat16, arithmetic=Arithmetic.INT8)


def test_a_torch_without_fbgemm_says_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "is_there", lambda: False)
    path = str(tiny.write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(DeviceError, match="x86-64 only; use auto or fp32"):
        load(path, device="cpu", arithmetic=Arithmetic.INT4)
    load(path, device="cpu", arithmetic=Arithmetic.FP32)


def test_the_setting_is_read_and_refused_by_name():
    needed = {"PENNYWEIGHT_REDIS_URL": "redis://h", "PENNYWEIGHT_MODEL": "m"}
    assert WorkerConfig.from_environment(needed).weights is Arithmetic.AUTO
    assert WorkerConfig.from_environment(needed | {"PENNYWEIGHT_WEIGHTS": "int8"}).weights is Arithmetic.INT8
    with pytest.raises(ConfigError, match="WEIGHTS must be one of auto, fp32, fp16, int8, int4, not 'int2'"):
        WorkerConfig.from_environment(needed | {"PENNYWEIGHT_WEIGHTS": "int2"})
    assert list(WEIGHTS.choices) == list(Arithmetic)


def test_smollm2_in_four_bits_is_the_file_itself(smollm2, smollm2_gguf):
    """Its weights are Q4_1: nothing is lost but the order of sums, and half a rounding in the head."""
    tokens = list(np.random.default_rng(1).integers(0, 40_000, 48))
    wanted = logits(smollm2, tokens)
    found = logits(load(str(smollm2_gguf), device="cpu", arithmetic=Arithmetic.INT4), tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02)
    assert torch.equal(found.argmax(1), wanted.argmax(1))


def test_smollm2_in_eight_bits_stays_close(smollm2, smollm2_gguf):
    tokens = list(range(100, 148))
    wanted = logits(smollm2, tokens).log_softmax(-1)
    found = logits(load(str(smollm2_gguf), device="cpu", arithmetic=Arithmetic.INT8), tokens).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(1).mean().item()
    assert 0 < divergence < 0.03
