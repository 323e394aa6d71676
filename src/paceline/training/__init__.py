"""What is trained: recipes, models and their description, data sets and samplers."""
