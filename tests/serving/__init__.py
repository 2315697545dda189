"""What a serving engine reads of an export: ``transformers`` itself, and the lists of keys that engines expect."""
