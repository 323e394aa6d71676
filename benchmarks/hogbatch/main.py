"""Measure hogbatch with uneven workers: the coordinator's cost and the policies' gains."""

import coordinator
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
    "public": Part(public.measure, tables.of_public),
}
