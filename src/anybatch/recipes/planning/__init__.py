"""Plans of recipes, published models, library models and your own modules."""
