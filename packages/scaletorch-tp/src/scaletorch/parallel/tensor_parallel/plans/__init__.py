"""Plans: their styles, and how they are found, checked and explained."""
