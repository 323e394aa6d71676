"""Measure hogbatch with uneven workers: the policies' gains, and public programs beside it."""

import public
import ratios
import target

from figures import Part

PARTS = {
    "ratios": Part(ratios.measure, ratios.text),
    "target": Part(target.measure, target.text),
    "public": Part(public.measure, public.text),
}
