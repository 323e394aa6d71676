"""The tables of codes against what the paper says of them."""

import pytest
import torch

from paceline.codecs.blockwise import TABLES, table


@pytest.mark.parametrize("name", TABLES)
def test_magnitudes_ascend_from_zero(name: str):
    one = table(name)
    assert one.magnitudes[0] == 0
    assert one.magnitudes.dtype == torch.float32
    assert 2 <= len(one.magnitudes) <= 128
    assert (one.magnitudes.diff() > 0).all()
    assert one.magnitudes[-1] <= 1


def test_the_dynamic_tree_is_that_of_the_paper():
    magnitudes = table("dynamic8").magnitudes.double()
    assert len(magnitudes) == 128  # 64 + 32 + ... + 1 leaves, and zero
    decades = [
        int(((10.0**-n > magnitudes) & (magnitudes > 10.0 ** -(n + 1))).sum()) for n in range(7)
    ]
    assert decades == [64, 32, 16, 8, 4, 2, 1]
    assert magnitudes[-1] == pytest.approx(1 - 0.9 / 128)
    assert magnitudes[1] == pytest.approx(0.55e-6)  # one leaf: the middle of (0.1, 1), times 10^-6


def test_the_static_tree_has_sixteen_leaves_in_each_of_eight_decades():
    magnitudes = table("static8").magnitudes.double()
    assert len(magnitudes) == 128
    decades = [
        int(((10.0**-n > magnitudes) & (magnitudes > 10.0 ** -(n + 1))).sum()) for n in range(8)
    ]
    assert decades == [16] * 7 + [15]  # the smallest is zero


def test_the_mantissa_holds_the_digits_up_to_fifteen():
    magnitudes = table("mantissa8").magnitudes.double()
    ones = magnitudes[(magnitudes > 0.0999) & (magnitudes < 1.0001)]
    assert torch.allclose(
        ones,
        torch.tensor(
            [0.1, 0.11, 0.12, 0.13, 0.14, 0.15, *[i / 10 for i in range(2, 11)]],
            dtype=torch.float64,
        ),
    )
