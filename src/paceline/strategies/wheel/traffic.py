"""Compare the bytes that a hub counted in a run with the planned bytes, by purpose."""

from collections import Counter

from paceline.core.outcome import SentShare, Traffic
from paceline.core.wire_format import Purpose
from paceline.strategies.wheel import job as jobs
from paceline.strategies.wheel.answers import Answers
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages


def sent_share_of(job: jobs.TrainingJob, answers: Answers) -> SentShare | None:
    """Compare the codec's declared share of sent gradients with the measured share.

    Returns None if gradients are not encoded.
    """
    size = messages(job.parts, job.spec.config)[Purpose.GRADIENTS]
    if size.wire_format is None:
        return None
    below = answers.children.reports.values()
    num_pushed = answers.steps.num_pushed + sum(one.num_pushed for one in below)
    nbytes = answers.steps.nbytes[Purpose.GRADIENTS]
    nbytes += sum(one.nbytes[Purpose.GRADIENTS] for one in below)
    measured = size.wire_format.sent_share(size.num_values, nbytes, num_pushed)
    return SentShare.of(job.spec.config.gradients, measured)


def traffic_of(job: jobs.TrainingJob, answers: Answers) -> tuple[Traffic, ...]:
    """Return the counted and planned bytes of messages, by purpose.

    Includes messages between this hub and its workers or child hubs, and messages between child
    hubs and their workers, as the child hubs report. The planned bytes of this hub's workers follow
    from Table 1.
    """
    spec, parts = job.spec, job.parts
    sizes: Counter[int] = Counter()
    for worker in range(spec.config.workers):
        if worker not in answers.children.workers:
            each = list(map(len, jobs.batches_of(spec, worker, job.num_samples)))
            whole, rest = divmod(spec.num_steps, len(each))
            sizes.update(each * whole + each[:rest])
    planned: Counter[Purpose] = Counter()
    for size, times in sizes.items():
        for purpose, message in messages(parts.resized(size), spec.config).items():
            planned[purpose] += times * message.nbytes
    counted = Counter(answers.steps.nbytes)
    for report in answers.children.reports.values():
        counted.update(report.nbytes)
        planned.update(report.planned_nbytes)
    within = tuple(
        Traffic(one.value, counted[one], planned[one], one in (*TO_HUB, *FROM_HUB))
        for one in Purpose
    )
    return within + answers.children.traffic.rows(parts)
