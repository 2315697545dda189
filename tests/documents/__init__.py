"""What the documents show: their commands and snippets are run, and what they print is compared."""
