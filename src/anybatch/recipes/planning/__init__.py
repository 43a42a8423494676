"""Plans of recipes, published models, models of libraries and modules of your own."""
