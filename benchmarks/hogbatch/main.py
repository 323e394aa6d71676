"""Uneven workers on one model: what the coordinator costs, and what the policies gain."""

import coordinator
import ideal
import public
import ratios
import small
import tables
import target

from figures import Part

PARTS = {
    "coordinator": Part(coordinator.measure, tables.of_coordinator),
    "ratios": Part(ratios.measure, tables.of_ratios),
    "small": Part(small.measure, tables.of_small),
    "target": Part(target.measure, tables.of_target),
    "ideal": Part(ideal.measure, tables.of_ideal),
    "public": Part(public.measure, tables.of_public),
}
