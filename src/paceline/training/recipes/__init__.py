"""Recipes, built in or the user's: model, data, loss, optimizer, schedule."""
