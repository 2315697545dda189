"""Bytes: stores, sessions, and the pure parsing and encoding of files and documents."""
