"""Cases of rows that are gathered and of errors that come back, against one process that has all.

Each is for the first K of four ranks. Rank r works on all rows, by a loss of its own: the
gradients that a rank gets are those of the sum of all losses.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.codecs import Sent, all_gather, reduce_scatter
from paceline.codecs.blockwise import EightBit
from paceline.codecs.feedback import OneBit
from paceline.codecs.gathering import (
    begin_gather,
    begin_return,
)
from paceline.codecs.names import find_codec
from ranks import CASES, Place, batch, bits, case, distance, main, quick

WIDTH, OUTPUTS = 37, 5
ROWS = {"even": (3, 3, 3, 3), "uneven": (3, 1, 40, 5), "with none": (2, 0, 3, 0)}
TYPES = ("dynamic8", "static8", "mantissa8", "linear8", "half")
FRACTION = 64  # of a block, so that several are in a message
Group = dist.ProcessGroup


def numbered(size: int, function: Callable[[Place, Group, str], dict], rows: str) -> None:
    """Make a function a case of the first `size` ranks, of whom it gets the group."""

    def run(place: Place) -> dict:
        group = dist.new_group(range(size))
        if place.rank >= size:
            return {}
        members = Place(place.rank, size, place.exchange, place.deadline_s)
        return function(members, group, rows)

    CASES[f"{function.__name__}_{size}_{rows}"] = run


def x_of(rank: int, rows: str, dtype: torch.dtype) -> Tensor:
    """The rows of a rank, which are not contiguous."""
    x = batch(rank, 0, WIDTH, ROWS[rows][rank], dtype=dtype).T
    return x.detach().requires_grad_()


def weights(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return batch(rank, step, WIDTH, OUTPUTS, dtype=dtype)


def loss_of(rank: int, x: Tensor) -> Tensor:
    """What a rank makes of the rows of all; the gradient is neither contiguous nor of one size."""
    return (x @ weights(rank, 1, x.dtype)).tanh().square().sum() * (1 + rank)


def parts(sizes: Sequence[int]) -> list[slice]:
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def gathers(place: Place, group: Group, rows: str) -> dict:
    """Without a codec, in float64: what autograd makes of all rows in one process."""
    sizes = ROWS[rows][: place.size]
    own = x_of(place.rank, rows, torch.float64)
    whole = torch.cat([x_of(r, rows, torch.float64) for r in range(place.size)]).detach()
    whole.requires_grad_()
    sum(loss_of(r, whole) for r in range(place.size)).backward()
    worst, sent = [], []
    for given in (None, sizes):
        own.grad, traffic = None, Sent()
        found = all_gather(own, group=group, sizes=given, traffic=traffic)
        loss_of(place.rank, found).backward()
        assert own.grad is not None
        assert own.grad.shape == own.shape
        exact = torch.equal(found, whole)
        far = distance(own.grad, whole.grad[parts(sizes)[place.rank]]) if own.numel() else 0.0
        worst.append(far if exact else 1.0)
        sent.append([traffic.activations_sent, traffic.activations_received])
        sent.append([traffic.activation_gradients_sent, traffic.activation_gradients_received])
    return {"worst": max(worst), "sent": sent}


def scatters(place: Place, group: Group, rows: str) -> dict:
    """Without a codec, in float64: sums of what all ranks have for each, and their gradients."""
    sizes = ROWS[rows][: place.size]
    every = [batch(r, 2, sum(sizes), WIDTH).requires_grad_() for r in range(place.size)]
    summed = sum(every)
    sum(loss_of(r, summed[part]) for r, part in enumerate(parts(sizes))).backward()
    own = every[place.rank].detach().requires_grad_()
    found = reduce_scatter(own, group=group, sizes=None if rows == "even" else sizes)
    loss_of(place.rank, found).backward()
    ours = summed[parts(sizes)[place.rank]]
    far = distance(found, ours) if ours.numel() else float(found.shape != ours.shape)
    return {"worst": max(far, distance(own.grad, every[place.rank].grad))}


def by_hand(codec: Any, values: Tensor) -> Tensor:
    """What arrives of values that have travelled."""
    if codec is None:
        return values
    form = find_codec(codec) if isinstance(codec, str) else codec
    return form.decode(form.encode(values)).view(values.shape)


def encoded(place: Place, group: Group, rows: str) -> dict:
    """Each type: the same bits as values that are encoded and decoded by hand, in both ways."""
    sizes, every, wrong, sent = ROWS[rows][: place.size], [], [], {}
    for codec in (*TYPES, EightBit("dynamic8", FRACTION), EightBit("static8", offset=10.0)):
        name, traffic = codec if isinstance(codec, str) else codec.name, Sent()
        own = x_of(place.rank, rows, torch.float32)
        found = all_gather(
            own, codec, activation_gradients=codec, group=group, sizes=sizes, traffic=traffic
        )
        loss_of(place.rank, found).backward()
        arrived = [by_hand(codec, x_of(r, rows, torch.float32)) for r in range(place.size)]
        if not torch.equal(found, torch.cat(arrived)):
            wrong.append([name, "forward"])
        if not torch.equal(own.grad, errors_by_hand(place, codec, torch.cat(arrived), sizes)):
            wrong.append([name, "backward"])
        every += [found]
        sent[name] = [traffic.activations_sent, traffic.activation_gradients_sent]
    return {"wrong": wrong, "bits": bits(every), "sent": sent}


def errors_by_hand(place: Place, codec: Any, whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum of what this rank's rows get of each one's loss, in rank order; its own is exact."""
    part, total = parts(sizes)[place.rank], torch.zeros(sizes[place.rank], WIDTH)
    for rank in range(place.size):
        known = whole.clone().requires_grad_()
        loss_of(rank, known).backward()
        own = known.grad[part]
        total += own if rank == place.rank else by_hand(codec, own)
    return total


def other_codecs(place: Place, group: Group, rows: str) -> dict:
    """Errors that travel as they are, of activations that do not; and the other way round."""
    sizes, worst = ROWS[rows][: place.size], []
    for there, back in (("linear8", None), (None, "linear8"), ("dynamic8", "half")):
        own = x_of(place.rank, rows, torch.float32)
        loss_of(
            place.rank, all_gather(own, there, activation_gradients=back, group=group)
        ).backward()
        every = [x_of(r, rows, torch.float32) for r in range(place.size)]
        whole = torch.cat([by_hand(there, one) for one in every])
        expected = errors_by_hand(place, back, whole.detach(), sizes)
        worst.append(distance(own.grad, expected) if own.numel() else 0.0)
    return {"worst": worst}


for _size in (1, 2, 3, 4):
    for _rows in ROWS:
        numbered(_size, gathers, _rows)
        numbered(_size, scatters, _rows)
        if _size > 1:
            numbered(_size, encoded, _rows)
numbered(4, other_codecs, "uneven")


@case
def gradcheck(place: Place) -> dict:
    """Torch's own check, of the whole exchange: all ranks move one value of one rank at a time."""
    own = batch(place.rank, 0, 2, 3).requires_grad_()
    step, found = 1e-6, []
    gathered = all_gather(own, what="rows")
    loss_of_small(place, gathered).backward()
    for owner in range(place.size):
        for index in range(own.numel()):
            ends = []
            for sign in (1, -1):
                moved = own.detach().clone()
                if owner == place.rank:
                    moved.view(-1)[index] += sign * step
                total = loss_of_small(place, all_gather(moved)).detach()
                dist.all_reduce(total)
                ends.append(float(total))
            if owner == place.rank:
                slope = (ends[0] - ends[1]) / (2 * step)
                found.append(abs(slope - float(own.grad.view(-1)[index])))
    return {"worst": max(found)}


def loss_of_small(place: Place, x: Tensor) -> Tensor:
    return (x @ batch(place.rank, 3, 3, 2)).sin().sum()


@case
def beside_other_work(place: Place) -> dict:
    """Several at once, of values that change meanwhile, waited for in another order than begun."""
    sizes = ROWS["uneven"]
    values = batch(place.rank, 0, sizes[place.rank], WIDTH, dtype=torch.float32)
    errors = batch(place.rank, 1, sum(sizes), WIDTH, dtype=torch.float32)
    labels = torch.arange(sizes[place.rank]) + 100 * place.rank
    expected = [
        begin_gather(values, "dynamic8", None, sizes).wait(),
        begin_return(errors, "dynamic8", None, sizes).wait(),
        begin_gather(labels).wait(),
    ]
    begun = [
        begin_gather(values, "dynamic8", None, sizes),
        begin_return(errors, "dynamic8", None, sizes),
        begin_gather(labels, None, None, sizes),
    ]
    for one in (values, errors, labels):
        one.zero_()
    found = [one.wait() for one in reversed(begun)][::-1]
    same = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
    return {"same": same, "labels": found[2].tolist()}


@case
def bfloat16(place: Place) -> dict:
    """Without a codec sums are of float32, and rounded once."""
    own = batch(place.rank, 0, 2, 3).bfloat16().requires_grad_()
    whole = all_gather(own)
    (whole * batch(place.rank, 4, 8, 3).bfloat16()).sum().backward()
    every = [batch(r, 4, 8, 3).bfloat16()[2 * place.rank :][:2].float() for r in range(place.size)]
    total = torch.zeros(2, 3)
    for one in every:
        total += one
    return {
        "dtypes": [str(whole.dtype), str(own.grad.dtype)],
        "same": torch.equal(own.grad, total.bfloat16()),
    }


def said(*attempts: Callable[[], object]) -> dict:
    """What comes of each attempt."""
    outcomes = []
    for attempt in attempts:
        try:
            attempt()
            outcomes.append("nothing")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return {"said": outcomes}


@case
def not_finite(place: Place) -> dict:
    """In the activations of one rank, in the gradients of another, and too large for a codec."""
    x = torch.ones(2, 3, requires_grad=True)
    bad = x.detach().clone()
    if place.rank == 1:
        bad[0, 1:] = torch.tensor([torch.nan, -torch.inf])
    large = x.detach() * (1e5 if place.rank == 3 else 1.0)

    def backward(codec: str | None) -> None:
        gathered = all_gather(x, codec, activation_gradients=codec, what="fc1")
        # Of its own rows, which do not travel.
        scale = torch.ones(8, 3)
        if place.rank == 2:
            scale[4] = torch.inf
        (gathered * scale).sum().backward()

    return said(
        lambda: all_gather(bad, "dynamic8", what="fc1"),
        lambda: all_gather(bad, what="fc1"),
        lambda: all_gather(large, "half", what="fc1"),
        lambda: backward("dynamic8"),
        lambda: backward(None),
        lambda: all_gather(x, "dynamic8"),  # they have all gone on from there
    )


@case
def refused(place: Place) -> dict:
    """What all ranks ask for, and what no two do alike."""
    x = torch.ones(2, 3)
    return said(
        lambda: all_gather(x, "onebit"),
        lambda: all_gather(x, activation_gradients="threshold:0.1"),
        lambda: all_gather(x, "auto"),
        lambda: all_gather(x.double(), "dynamic8"),
        lambda: all_gather(x.double(), activation_gradients="dynamic8", sizes=[2] * 4),
        lambda: all_gather(x, sizes=[2, 2, 2]),
        lambda: all_gather(x, sizes=[1, 2, 2, 1]) if place.rank in (0, 3) else None,
        lambda: all_gather(torch.tensor(1.0)),
        lambda: all_gather(x, "half" if place.rank == 3 else "bfloat16"),
        lambda: all_gather(torch.ones(2, 4 if place.rank == 3 else 3)),
        lambda: reduce_scatter(torch.ones(4, 3).long()),
        lambda: all_gather(x, OneBit()),  # which remembers nothing
    )


@quick
def absent(place: Place) -> dict:
    """A rank that does not come: the others do not wait for longer than their group does."""
    if place.rank == 2:
        return {}
    return said(lambda: all_gather(torch.ones(2, 3), "dynamic8", sizes=[2] * 4))


if __name__ == "__main__":
    main(["gloo"], sys.argv[1].split(",") if len(sys.argv) > 1 else ())
