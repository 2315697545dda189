"""Parsing and encoding of bytes; touches no store."""
