"""Recipes, models and their descriptions, data sets and samplers."""
