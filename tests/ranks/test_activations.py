"""all_gather and reduce_scatter of activations, compared with one process.

Each rank computes its own loss of all rows, so the gradients of a rank's rows are those of the sum
of all losses.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from codec_cases import normal
from codec_training import bits
from paceline.codecs import Sent, all_gather, reduce_scatter
from paceline.codecs.blockwise import EightBit
from paceline.codecs.feedback import OneBit
from paceline.codecs.gathering import RowExchange
from paceline.codecs.names import find_codec
from paceline.core.errors import NonFinite
from pair import Ranks
from refusals import refused

slow = pytest.mark.slow
WIDTH, OUTPUTS, HEADER = 37, 5, 40
ROWS = {"even": (3, 3, 3), "uneven": (3, 1, 40), "with none": (2, 0, 3)}
CODECS: tuple[Any, ...] = (
    *("dynamic8", "static8", "mantissa8", "linear8", "half"),
    EightBit("dynamic8", 64),  # small blocks, so that a message has several
    EightBit("static8", offset=10.0),
)


def values(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    count = torch.Size(shape).numel()
    return normal(count, 1 + 1000 * rank + step).to(dtype).view(shape)


def x_of(rank: int, rows: str, dtype: torch.dtype) -> Tensor:
    """Return a rank's rows, which are not contiguous."""
    return values(rank, 0, WIDTH, ROWS[rows][rank], dtype=dtype).T.detach().requires_grad_()


def loss_of(rank: int, x: Tensor) -> Tensor:
    """Return a rank's loss of all rows; the gradient is not contiguous and varies in magnitude."""
    weights = values(rank, 1, WIDTH, OUTPUTS, dtype=x.dtype)
    return (x @ weights).tanh().square().sum() * (1 + rank)


def parts(sizes: Sequence[int]) -> list[slice]:
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    if one.numel():
        apart = (one.detach() - other.detach()).abs().max()
        assert float(apart / other.detach().abs().max().clamp(min=1e-3)) <= 1e-12


def exact(rows: str) -> list[list[int]]:
    """Compare exchanges without a codec with autograd on all rows in one process, in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, sent = ROWS[rows][:size], []
    own, part = x_of(rank, rows, torch.float64), parts(sizes)[rank]
    whole = torch.cat([x_of(r, rows, torch.float64) for r in range(size)]).detach()
    whole.requires_grad_()
    sum(loss_of(r, whole) for r in range(size)).backward()
    for given in (None, sizes):
        own.grad, traffic = None, Sent()
        found = all_gather(own, sizes=given, traffic=traffic)
        loss_of(rank, found).backward()
        assert torch.equal(found, whole)
        assert own.grad is not None
        assert_near(own.grad, whole.grad[part])
        sent.append([traffic.activations_sent, traffic.activation_gradients_sent])
    every = [values(r, 2, sum(sizes), WIDTH).requires_grad_() for r in range(size)]
    summed = sum(every)
    sum(loss_of(r, summed[one]) for r, one in enumerate(parts(sizes))).backward()
    own = every[rank].detach().requires_grad_()
    found = reduce_scatter(own, sizes=None if rows == "even" else sizes)
    loss_of(rank, found).backward()
    assert_near(found, summed[part])
    assert_near(own.grad, every[rank].grad)
    return sent


def by_hand(codec: Any, given: Tensor) -> Tensor:
    """Encode and decode values."""
    if codec is None:
        return given
    form = find_codec(codec) if isinstance(codec, str) else codec
    return form.decode(form.encode(given)).view(given.shape)


def errors_by_hand(codec: Any, whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum this rank's gradients in rank order; contributions of other ranks are encoded."""
    own_rank = dist.get_rank()
    part, total = parts(sizes)[own_rank], torch.zeros(sizes[own_rank], WIDTH)
    for rank in range(len(sizes)):
        known = whole.clone().requires_grad_()
        loss_of(rank, known).backward()
        own = known.grad[part]
        total += own if rank == own_rank else by_hand(codec, own)
    return total


def encoded(rows: str) -> tuple[list[list[int]], str]:
    """Compare each codec, in both directions, with encoding and decoding by hand, bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, every, sent = ROWS[rows][:size], [], []
    pairs = [(codec, codec) for codec in CODECS]
    # A codec for activations only, for gradients only, and a different one for each.
    pairs += [("linear8", None), (None, "linear8"), ("dynamic8", "half")]
    for there, back in pairs:
        own, traffic = x_of(rank, rows, torch.float32), Sent()
        found = all_gather(own, there, activation_gradients=back, sizes=sizes, traffic=traffic)
        loss_of(rank, found).backward()
        arrived = torch.cat([by_hand(there, x_of(r, rows, torch.float32)) for r in range(size)])
        assert torch.equal(found, arrived)
        # Sums without a codec have the same bits, too: the order of the values is the same.
        assert torch.equal(own.grad, errors_by_hand(back, arrived.detach(), sizes))
        every.append(found)
        sent.append([traffic.activations_sent, traffic.activation_gradients_sent])
    return sent[: len(CODECS)], bits(every)


@pytest.mark.parametrize(
    ("place", "rows"),
    [
        *(("pair", rows) for rows in ("uneven", "with none")),
        *(pytest.param("triple", rows, marks=slow) for rows in ROWS),
    ],
)
def test_exchanges_match_one_process(ranks: Ranks, rows: str):
    sizes = ROWS[rows][: ranks.size]

    def sent_by(rank: int, nbytes: Callable[[int], int]) -> list[int]:
        """Return the bytes sent for a rank's own rows and for other ranks' rows."""
        lengths = [HEADER + 8 * -(-nbytes(WIDTH * count) // 8) for count in sizes]
        return [(ranks.size - 1) * lengths[rank], sum(lengths) - lengths[rank]]

    for rank, sent in enumerate(ranks(exact, rows)):
        own, others = sent_by(rank, lambda count: 8 * count)
        assert sent == [[own, others]] * 2
    outcomes = ranks(encoded, rows)
    assert len({bits for _, bits in outcomes}) == 1
    for rank, (sent, _) in enumerate(outcomes):
        for codec, found in zip(CODECS, sent, strict=True):
            form = find_codec(codec) if isinstance(codec, str) else codec
            assert found == sent_by(rank, form.nbytes), form.name


def overlapping() -> list[int]:
    """Start several exchanges, overwrite their inputs, and wait in reverse order."""
    rank, sizes = dist.get_rank(), ROWS["uneven"][: dist.get_world_size()]
    rows = values(rank, 0, sizes[rank], WIDTH, dtype=torch.float32)
    errors = values(rank, 1, sum(sizes), WIDTH, dtype=torch.float32)
    labels = torch.arange(sizes[rank]) + 100 * rank
    encoded, exact = RowExchange("dynamic8", None, sizes), RowExchange(None, None, sizes)
    begins = [
        partial(encoded.all_gather, rows),
        partial(encoded.reduce_scatter, errors),
        partial(exact.all_gather, labels),
    ]
    expected = [begin().wait() for begin in begins]
    begun = [begin() for begin in begins]
    for one in (rows, errors, labels):
        one.zero_()
    found = [one.wait() for one in reversed(begun)][::-1]
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    return found[2].tolist()


def in_bfloat16() -> None:
    """Without a codec, sums are computed in float32 and rounded once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = values(rank, 0, 2, 3).bfloat16().requires_grad_()
    whole = all_gather(own)
    (whole * values(rank, 4, 2 * size, 3).bfloat16()).sum().backward()
    every = [values(r, 4, 2 * size, 3).bfloat16()[2 * rank :][:2].float() for r in range(size)]
    assert (whole.dtype, own.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(own.grad, sum(every).bfloat16())


def test_exchanges_overlap_and_bfloat16_stays_bfloat16(pair: Ranks):
    labels = [100 * rank + n for rank in range(2) for n in range(ROWS["uneven"][rank])]
    assert pair(overlapping) == [labels] * 2
    pair(in_bfloat16)


def not_finite() -> None:
    """Use non-finite activations, non-finite gradients, and values too large for a codec."""
    rank = dist.get_rank()
    x = torch.ones(2, 3, requires_grad=True)
    bad = x.detach().clone()
    if rank == 1:
        bad[0, 1:] = torch.tensor([torch.nan, -torch.inf])
    large = x.detach() * (1e5 if rank == 0 else 1.0)

    def backward(codec: str | None) -> None:
        gathered = all_gather(x, codec, activation_gradients=codec, what="fc1")
        scale = torch.ones(4, 3)
        if rank == 1:
            scale[0] = torch.inf  # a row of rank 0: a rank's own rows are not sent
        (gathered * scale).sum().backward()

    for call, *facts in (
        (lambda: all_gather(bad, "dynamic8", what="fc1"), "2 values", "rank 1", "dynamic8/1024"),
        (lambda: all_gather(bad, what="fc1"), "2 values", "rank 1", "float32"),
        (lambda: all_gather(large, "half", what="fc1"), "6 values", "rank 0", "half"),
        (lambda: backward("dynamic8"), "gradient of", "3 values", "rank 1", "dynamic8/1024"),
        (lambda: backward(None), "gradient of", "3 values", "rank 1", "float32"),
    ):
        with pytest.raises(NonFinite) as caught:
            call()
        assert all(fact in str(caught.value) for fact in ("fc1", *facts)), caught.value
    all_gather(x, "dynamic8")  # ranks can still exchange after the errors


def test_all_ranks_name_the_rank_with_non_finite_values(pair: Ranks):
    pair(not_finite)


def wrong_rows() -> None:
    """Pass invalid arguments: the same on both ranks, or different ones."""
    x, is_last = torch.ones(2, 3), dist.get_rank() == 1
    for field, call in (
        ("codec", lambda: all_gather(x, "onebit")),
        ("codec", lambda: all_gather(x, activation_gradients="threshold:0.1")),
        ("codec", lambda: all_gather(x, "auto")),
        ("codec", lambda: all_gather(x.double(), "dynamic8")),
        ("codec", lambda: all_gather(x.double(), activation_gradients="half", sizes=[2, 2])),
        ("sizes", lambda: all_gather(x, sizes=[2, 2, 2])),
        ("x", lambda: all_gather(torch.tensor(1.0), what="x")),
        ("x", lambda: all_gather(x, "half" if is_last else "bfloat16", what="x")),
        ("x", lambda: all_gather(torch.ones(2, 4 if is_last else 3), what="x")),
        ("x", lambda: reduce_scatter(torch.ones(4, 3).long(), what="x")),
    ):
        with refused(field):
            call()
    with refused("x"):  # both ranks have two rows, not three
        all_gather(x, sizes=[3, 3], what="x")
    all_gather(x, OneBit())  # accepted: it has no error feedback


def test_invalid_arguments_are_refused(pair: Ranks):
    pair(wrong_rows)
