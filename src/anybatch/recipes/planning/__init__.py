"""Plans of recipes, published models and modules of your own."""
