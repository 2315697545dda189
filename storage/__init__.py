"""Bytes: stores, and (in ``formats``) the pure parsing and encoding of files."""
