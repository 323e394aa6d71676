"""Measure hogbatch with uneven workers: the policies' gains."""

import ratios
import target

from figures import Part

PARTS = {
    "ratios": Part(ratios.measure, ratios.text),
    "target": Part(target.measure, target.text),
}
