"""Inputs and outputs of forward: structures with and without tensors."""

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from declared import program, programs, trains
from torch import Tensor, nn

from steps import makes, mlp, module_of, stepped
from trial import OURS, Run, Trial, gradients

Boxes = namedtuple("Boxes", ["boxes", "scores"])


class Scored(NamedTuple):
    logits: Tensor
    name: str
    extra: Tensor | None = None


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    note: str = "a note"


class Answering(nn.Module):
    """Two heads; `answer` combines their outputs."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.body, self.one, self.other = mlp(6, 8, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return self.answer(features, self.one(features), self.other(features))


@makes(lambda: {"body": mlp()})
def asking(self, batch=None, /, *more, x=None, scale=1.0, flags=None, **rest):
    """Take tensors by position, by keyword and from nested containers."""
    tensors = [] if batch is None else [batch["x"], *batch["views"]["list"]]
    tensors += [*more] if x is None else [x, *more]
    out = torch.stack([self.body(one) for one in tensors]).mean(0) * scale
    return {"out": out, "flags": flags, "rest": sorted(rest)}


@trains(asking)
def keyword_arguments_only(trial, model, step):
    answer = model(x=trial.batch(step), scale=0.5, flags={"train": True}, ids=[1, 2])
    assert (answer["flags"], answer["rest"]) == ({"train": True}, ["ids"])
    return answer["out"].square().mean()


@trains(asking)
def nested_dicts_in(trial, model, step):
    views = {"list": [trial.batch(step), trial.batch(10 + step)], "names": ("a", None)}
    answer = model({"x": trial.batch(20 + step), "views": views, "id": 5}, trial.batch(step))
    return answer["out"].square().mean()


def inputs_come_as_they_are(trial):
    """Inputs are neither copied nor converted: integers, None, objects, the same tensor twice."""
    seen: list[Any] = []

    @module_of(net=mlp())
    def looking(self, *given: Any, **named: Any) -> Tensor:
        seen.append((given, named))
        return self.net(given[0])

    model = trial.wrap(looking)
    x, thing = trial.batch(0), SimpleNamespace(a=1)
    for _ in range(2):
        model(x, x, 3, None, "text", thing, {"x": x}, (x,), thing=thing).sum().backward()
        given, named = seen[-1]
        assert all(one is x for one in (given[0], given[1], given[6]["x"], given[7][0]))
        assert given[5] is named["thing"] is thing
        yield [given[2:5], type(given[7]).__name__]


ANSWERS: dict[str, Any] = {
    "tuple": lambda features, one, other: (one, other),
    "list": lambda features, one, other: [one, [other, None]],
    "dict": lambda features, one, other: {"one": one, "other": other, "n": len(features)},
    "ordered": lambda features, one, other: OrderedDict(one=one, other=other),
    "namedtuple": lambda features, one, other: Boxes(one, other),
    "typed": lambda features, one, other: Scored(one, "name", other),
    "dataclass": lambda features, one, other: Output(None, one, (features, other)),
    "nested": lambda features, one, other: {"a": [Boxes(one, (other, {"f": features})), "text"]},
    "object": lambda features, one, other: SimpleNamespace(one=one, other=other),
    "mixed": lambda features, one, other: (SimpleNamespace(one=one), other),
    "numbers": lambda features, one, other: (one, other, 3, 0.5, "text", None, True),
}


def _tensors(answer: Any) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer]
    if isinstance(answer, dict):
        return [tensor for value in answer.values() for tensor in _tensors(value)]
    if isinstance(answer, list | tuple):
        return [tensor for value in answer for tensor in _tensors(value)]
    if isinstance(answer, Output | SimpleNamespace):
        return _tensors(list(vars(answer).values()))
    return []


def _answers(*left_out: str, **options: Any) -> Run:
    def run(trial: Trial) -> Iterator[Any]:
        for kind in (kind for kind in ANSWERS if kind not in left_out):
            model = trial.wrap(Answering(ANSWERS[kind]), **options)
            for step in stepped(model, 3):
                answer = model(trial.batch(step))
                sum(tensor.square().mean() for tensor in _tensors(answer)).backward()
                yield {"kind": kind, "class": type(answer).__name__, "tensors": _tensors(answer)}

    return run


programs(
    __name__,
    {
        "outputs_of_every_structure": _answers(),
        # Without the structures in which DDP finds no tensors.
        "outputs_of_every_structure_with_unused_parameters_sought": _answers(
            "object", "mixed", find_unused_parameters=True
        ),
        "outputs_of_every_structure_with_a_static_graph": _answers(
            "object", "mixed", "dataclass", static_graph=True
        ),
    },
)


@program(exact_by=OURS)
def dataclass_of_a_static_graph(trial):
    """DDP finds no tensors in the dataclass and does not exchange the first step."""
    model = trial.wrap(Answering(ANSWERS["dataclass"]), static_graph=True)
    for step in stepped(model, 3):
        sum(one.square().mean() for one in _tensors(model(trial.share(step)))).backward()
        yield gradients(trial.bare(model))


def loss_computed_inside(trial):
    """The module returns a dict with its loss, a number for the log, and a prediction."""

    @module_of(net=mlp())
    def withloss(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "log": loss.item(), "best": logits.argmax(1)}

    model = trial.wrap(withloss)
    labels = torch.tensor([0, 1, 2, 1])
    for step in stepped(model, 3):
        answer = model(trial.batch(step), labels=labels)
        answer["loss"].backward()
        yield answer
    model.eval()
    yield model(trial.batch(30))["logits"]


@trains(
    lambda: module_of(net=mlp(), weight=nn.Parameter(torch.ones(3)))(
        lambda self, x: (self.net(x) * self.weight, x, self.weight, torch.ones(2))
    )
)
def output_that_is_the_input_or_a_parameter(trial, model, step):
    """Return leaves of the graph as outputs: the input, a weight, a constant."""
    x = trial.batch(step)
    out, same, weight, _ = model(x)
    assert same is x
    return out.square().mean() + weight.abs().sum()


@trains(asking)
def inputs_that_require_gradients(trial, model):
    """Their gradients are this rank's own."""
    for step in range(3):
        one, other = trial.batch(step).requires_grad_(), trial.batch(9).requires_grad_()
        model(None, one, other)["out"].square().mean().backward()
        yield [one.grad, other.grad]


def output_changed_in_place(trial, model, step):
    """Change the output in place, as an ordinary tensor allows."""
    out = model(trial.batch(step))
    out *= 2
    out[:, 0] = 0
    return out.square().mean()


@trains(mlp, find_unused_parameters=True)
def output_changed_in_place_with_unused_parameters_sought(trial, model, step):
    return output_changed_in_place(trial, model, step)


def batches_of_different_sizes(trial, model, step):
    """Ranks have other numbers of samples, and means weigh each rank alike, as with DDP."""
    return model(trial.batch(step, 1 + step + 3 * trial.rank, 6)).var()


@trains(lambda: nn.GRU(5, 6, batch_first=True))
def sequences_of_different_lengths(trial, model, step):
    lengths = [4, 3 - trial.rank, 2]
    x = nn.utils.rnn.pack_padded_sequence(trial.batch(step, 3, 4, 5), lengths, batch_first=True)
    out, last = model(x)
    return out.data.square().mean() + last.square().mean()


@trains(mlp, steps=4)
def empty_batch_on_one_rank(trial, model, step):
    """Rank 1 has no samples in step 2: its zero gradients halve the mean."""
    rows = 0 if trial.rank == 1 and step == 2 else 4
    return model(trial.batch(step, rows, 6)).square().sum()
