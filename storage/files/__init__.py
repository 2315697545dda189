"""Parsing and encoding of file types; touches no store."""
