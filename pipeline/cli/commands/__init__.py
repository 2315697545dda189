"""Commands: a module for each, and for those that share most of what they do."""
