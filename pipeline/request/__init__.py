"""What a user asked for: the options, parsed into values, and their record."""
