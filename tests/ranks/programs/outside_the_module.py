"""Gradients outside of the wrapped module, and gradients that are asked for without training it."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trial import Trial, gradients, kept, mlp, program, sgd, squares, state_of, trained


@program
def prompt_outside_of_the_wrapper(trial: Trial) -> Iterator[Any]:
    """Its gradient stays this rank's own, and exact in float64 where it is small."""
    model = trial.wrap(mlp(4, 8, 3))
    prompt = nn.Parameter(torch.zeros(4))
    optimizer = sgd([*model.parameters(), prompt])
    for step in range(4):
        optimizer.zero_grad()
        model(trial.batch(step, 4, 4) + prompt).sum().mul(1e-3).backward()
        yield {"prompt": prompt.grad}
        optimizer.step()


@program
def prompt_before_a_frozen_first_layer(trial: Trial) -> Iterator[Any]:
    module = mlp(4, 8, 8, 3)
    module[0].requires_grad_(False)
    model = trial.wrap(module)
    prompt = nn.Parameter(torch.zeros(2, 4))
    for step in range(3):
        prompt.grad = None
        tokens = torch.cat([prompt, trial.batch(step, 3, 4)])
        model(tokens).square().mean().backward()
        yield {"prompt": prompt.grad}


@program
def small_loss_beside_a_head_outside(trial: Trial) -> Iterator[Any]:
    """A head that is not wrapped keeps this rank's gradients, to the last bit."""
    body, head = trial.wrap(mlp(6, 8, 8)), nn.Linear(8, 2)
    optimizer = sgd([*body.parameters(), *head.parameters()])
    for step in range(3):
        optimizer.zero_grad()
        loss = head(body(trial.batch(step))).square().mean() * 1e-6
        loss.backward()
        yield {"loss": loss, "head": gradients(head)}
        optimizer.step()


@program
def two_wrappers_in_a_chain(trial: Trial) -> Iterator[Any]:
    first, second = trial.wrap(mlp(6, 8, 5)), trial.wrap(mlp(5, 7, 2))
    optimizer = sgd([*first.parameters(), *second.parameters()])
    for step in range(4):
        optimizer.zero_grad()
        loss = second(first(trial.batch(step)).tanh()).square().mean()
        loss.backward()
        yield loss
        optimizer.step()


@program
def three_wrappers_of_which_the_middle_is_frozen_for_a_step(trial: Trial) -> Iterator[Any]:
    models = [trial.wrap(mlp(6, 6)) for _ in range(3)]
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = trial.batch(step)
        for number, model in enumerate(models):
            if number == 1 and step == 2:
                with torch.no_grad():
                    x = x + model(x)
            else:
                x = x + model(x)
        x.square().mean().backward()
        yield x
        for optimizer in optimizers:
            optimizer.step()


@program
def gan_with_requires_grad_toggled(trial: Trial) -> Iterator[Any]:
    """The discriminator is frozen, as in pix2pix, while the generator learns through it."""
    generator, discriminator = trial.wrap(mlp(3, 8, 6)), trial.wrap(mlp(6, 8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), eps=1e-3) for m in (generator, discriminator)]
    for step in range(4):
        fake = generator(trial.batch(step, 4, 3))
        discriminator.requires_grad_(True)
        optimizers[1].zero_grad()
        real_loss = F.softplus(-discriminator(trial.batch(10 + step))).mean()
        fake_loss = F.softplus(discriminator(fake.detach())).mean()
        (real_loss + fake_loss).backward()
        optimizers[1].step()
        discriminator.requires_grad_(False)
        optimizers[0].zero_grad()
        loss = F.softplus(-discriminator(fake)).mean()
        loss.backward()
        optimizers[0].step()
        yield [real_loss, fake_loss, loss]


@program
def gan_without_toggling(trial: Trial) -> Iterator[Any]:
    """As in the DCGAN example: two backward passes of the discriminator for one step of it."""
    generator, discriminator = trial.wrap(mlp(3, 8, 6)), trial.wrap(mlp(6, 8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), eps=1e-3) for m in (generator, discriminator)]
    for step in range(4):
        optimizers[1].zero_grad()
        real = F.softplus(-discriminator(trial.batch(10 + step))).mean()
        real.backward()
        fake = generator(trial.batch(step, 4, 3))
        F.softplus(discriminator(fake.detach())).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = F.softplus(-discriminator(fake)).mean()
        loss.backward()
        yield [real, loss]
        optimizers[0].step()


@program
def wgan_gp_with_double_backward(trial: Trial) -> Iterator[Any]:
    """The penalty is on the discriminator's own input gradient, with create_graph."""
    discriminator = trial.wrap(nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(discriminator.parameters(), eps=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        real, fake = trial.batch(step), trial.batch(10 + step)
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(discriminator(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = discriminator(fake).mean() - discriminator(real).mean() + 10 * penalty
        loss.backward()
        yield {"loss": loss, "slope": slope}
        optimizer.step()


@program
def penalty_through_the_module_beside_the_wrapper(trial: Trial) -> Iterator[Any]:
    """The penalty runs the bare module, as StyleGAN does, before the wrapper's own backward."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))
    model = trial.wrap(module)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x = trial.batch(step).requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + slope.square().mean()).backward()
        yield slope
        optimizer.step()


@program
def saliency_between_steps(trial: Trial) -> Iterator[Any]:
    """torch.autograd.grad leaves nothing behind that the next step's gradients would show."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        x = trial.batch(20 + step).requires_grad_()
        (saliency,) = torch.autograd.grad(model(x).sum(), x)
        optimizer.zero_grad()
        loss = model(trial.batch(step)).square().mean()
        loss.backward()
        yield [saliency, loss]
        optimizer.step()


@program
def saliency_on_one_rank_only(trial: Trial) -> Iterator[Any]:
    """One rank plots while the other trains on; a model without buffers needs nobody for that."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        if trial.rank == 0 and step % 2:
            model.eval()
            x = trial.batch(20 + step).requires_grad_()
            yield torch.autograd.grad(model.module(x).sum(), x)
            model.train()
        optimizer.zero_grad()
        model(trial.batch(step)).square().mean().backward()
        yield step
        optimizer.step()


@program
def adversarial_examples_by_fgsm(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        x = trial.batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x)
        attacked = (x + 0.1 * slope.sign()).detach()
        optimizer.zero_grad()
        loss = model(attacked).square().mean()
        loss.backward()
        yield [attacked, loss]
        optimizer.step()


@program
def adversarial_examples_by_backward(trial: Trial) -> Iterator[Any]:
    """Some write x.grad with a whole backward pass, and clear the model's gradients afterwards."""
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        x = trial.batch(step).requires_grad_()
        model(x).square().mean().backward()
        yield x.grad
        optimizer.zero_grad()
        model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
        yield x.grad
        optimizer.step()


@program
def backward_for_the_inputs_only(trial: Trial) -> Iterator[Any]:
    """backward(inputs=[x]) reaches no parameter: their gradients stay None."""
    model = trial.wrap(mlp())
    x = trial.batch(0).requires_grad_()
    model(x).sum().backward(inputs=[x])
    yield x.grad
    yield from trained(model, squares(trial))


@program
def decay_in_the_loss(trial: Trial) -> Iterator[Any]:
    """The loss reads parameters beside the forward pass: both ways lead into one gradient."""
    model = trial.wrap(mlp())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in model.parameters())
        return model(trial.batch(step)).square().mean() + 0.1 * decay

    yield from trained(model, loss_of)


@program
def distillation_from_a_frozen_teacher(trial: Trial) -> Iterator[Any]:
    teacher = mlp().requires_grad_(False).eval()
    student = trial.wrap(copy.deepcopy(teacher).requires_grad_(True))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = trial.batch(step)
        return F.mse_loss(model(x) * 1.1, teacher(x))

    yield from trained(student, loss_of)
    yield state_of(teacher)


@program
def weighting_of_losses_outside(trial: Trial) -> Iterator[Any]:
    """Learned weights of two losses, which only the loss function knows."""
    model, logs = trial.wrap(mlp(6, 8, 4)), nn.Parameter(torch.zeros(2))
    optimizer = sgd([*model.parameters(), logs])
    for step in range(4):
        optimizer.zero_grad()
        one, other = model(trial.batch(step)).chunk(2, dim=1)
        losses = torch.stack([one.square().mean(), other.abs().mean()])
        (losses * logs.neg().exp() + logs).sum().backward()
        yield kept([losses, logs.grad])
        optimizer.step()


@program
def gradient_with_respect_to_parameters(trial: Trial) -> Iterator[Any]:
    """torch.autograd.grad with respect to the parameters is this rank's own, as with DDP."""
    model = trial.wrap(mlp())
    for step in range(2):
        loss = model(trial.batch(step)).square().mean()
        yield list(torch.autograd.grad(loss, list(model.parameters())))
    yield from trained(model, squares(trial))
