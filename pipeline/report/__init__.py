"""A conversion or comparison as one HTML file, to look at without a network."""
