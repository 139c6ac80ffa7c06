"""Rounding to bfloat16 by chance, in torch's own operations: these run everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from shardstep.stepping.kernel.stochastic import MASK, Noise, mix, round_to_bfloat16

COUNT = 1 << 16
SIGMAS = 5  # a sample's mean is further off than this once in two million times; the samples are the same in every run


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run():
    torch.manual_seed(0)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Between neighbours in bfloat16."""
    return torch.exp2((torch.frexp(values).exponent - 8).float())


def test_a_number_that_bfloat16_has_stays():
    values = torch.randn(COUNT).bfloat16().float()
    assert torch.equal(round_to_bfloat16(values, Noise(1, 2, 3)).float(), values)


def test_rounds_to_one_of_the_two_neighbours_and_the_mean_is_the_number():
    """Three quarters of the way from 1 to the next, 1 + 2^-7: three of four go up, and the variance is 3/16 of a
    step.
    """
    values = torch.full((COUNT,), 1 + 0.75 * 2**-7)
    up = (round_to_bfloat16(values, Noise(7, 1, 0)).float() - 1) * 2**7
    assert set(up.tolist()) == {0.0, 1.0}
    deviation = math.sqrt(0.75 * 0.25 / COUNT)
    assert abs(up.mean().item() - 0.75) < SIGMAS * deviation
    assert abs(up.var().item() - 0.75 * 0.25) < SIGMAS * deviation


def test_unbiased_for_numbers_of_all_sizes_and_both_signs():
    values = torch.randn(COUNT) * torch.exp2(torch.randint(-20, 20, (COUNT,)).float())
    errors = torch.stack([(round_to_bfloat16(values, Noise(0, t, 1)).float() - values) / ulp(values) for t in range(8)])
    assert errors.abs().max() < 1
    assert abs(errors.mean().item()) < SIGMAS * math.sqrt(1 / 6 / errors.numel())  # mean of f (1 - f) over all f


def test_noise_is_even_and_knows_neither_its_neighbour_nor_other_steps_parameters_and_seeds():
    def centred(noise: Noise, start: int = 0) -> torch.Tensor:
        return (noise.bits(start, start + COUNT).double() + 0.5) / 2**16 - 0.5

    one = centred(Noise(5, 10, 2))
    assert abs(one.mean().item()) < SIGMAS / math.sqrt(12 * COUNT)
    assert abs(one.var().item() - 1 / 12) < SIGMAS * math.sqrt(1 / 180 / COUNT)  # of a square of an even number
    others = [centred(Noise(5, 10, 2), start=1), centred(Noise(5, 10, 2), start=1 << 32)]
    others += [
        centred(Noise(5, 11, 2)),
        centred(Noise(5, 10, 3)),
        centred(Noise(6, 10, 2)),
        centred(Noise(5 + 2**32, 10, 2)),
    ]
    for other in others:
        assert abs((one * other).mean().item()) < SIGMAS / 12 / math.sqrt(COUNT)


def test_all_sixteen_bits_are_even():
    bits = Noise(0, 1, 0).bits(0, COUNT)
    for place in range(16):
        assert abs(((bits >> place) & 1).double().mean().item() - 0.5) < SIGMAS * 0.5 / math.sqrt(COUNT)


def test_mix_is_a_permutation_within_32_bits():
    numbers = torch.randint(0, MASK + 1, (COUNT,)).unique()
    mixed = mix(numbers)
    assert mixed.unique().numel() == numbers.numel()
    assert 0 <= mixed.min() <= mixed.max() <= MASK
    assert mixed[17].item() == mix(int(numbers[17]))


@pytest.mark.parametrize("cuts", [[1], [3, 4, 9_000], [1 << 15]])
def test_does_not_depend_on_how_a_parameter_is_cut(cuts):
    values, noise = torch.randn(COUNT), Noise(3, 4, 5)
    bounds = [0, *cuts, COUNT]
    parts = [round_to_bfloat16(values[a:b], noise, start=a) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), round_to_bfloat16(values, noise))


def test_same_seed_step_and_parameter_give_the_same_bits_and_others_do_not():
    values = torch.randn(1_000)
    once = round_to_bfloat16(values, Noise(1, 2, 3))
    assert torch.equal(once, round_to_bfloat16(values.view(10, 100), Noise(1, 2, 3)).view(-1))
    for noise in (Noise(2, 2, 3), Noise(1, 3, 3), Noise(1, 2, 4)):
        assert not torch.equal(once, round_to_bfloat16(values, noise))


def test_a_weight_that_stalls_when_rounded_to_the_nearest_moves_by_the_right_amount_on_average():
    """A hundred steps of 2^-12 from 1, where the nearest neighbours are 2^-8 below and 2^-7 above."""
    nearest, by_chance = torch.ones(COUNT).bfloat16(), torch.ones(COUNT).bfloat16()
    for step in range(1, 101):
        nearest = (nearest.float() + 2**-12).bfloat16()
        by_chance = round_to_bfloat16(by_chance.float() + 2**-12, Noise(0, step, 0))
    assert torch.equal(nearest, torch.ones(COUNT).bfloat16())
    steps_up = 100 * 2**-12 / 2**-7  # each of the hundred goes up by 2^-7 with a chance of 1/32
    deviation = 2**-7 * math.sqrt(steps_up * (1 - 1 / 32) / COUNT)
    assert abs(by_chance.double().mean().item() - (1 + 100 * 2**-12)) < SIGMAS * deviation


def test_infinity_and_what_is_not_a_number_stay():
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    quiet = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a nan in its lowest bit alone
    for step in range(1, 50):
        rounded = round_to_bfloat16(torch.cat([values, quiet]), Noise(0, step, 0))
        assert rounded[:2].tolist() == [math.inf, -math.inf]
        assert rounded[[2, 5]].isnan().all()
        assert rounded[3:5].tolist() == [0.0, 0.0]


def test_empty_scalar_and_refused():
    assert round_to_bfloat16(torch.zeros(0), Noise(0, 1, 0)).shape == (0,)
    assert round_to_bfloat16(torch.tensor(1.0), Noise(0, 1, 0)).shape == ()
    with pytest.raises(TypeError, match="float32"):
        round_to_bfloat16(torch.zeros(3, dtype=torch.float64), Noise(0, 1, 0))
