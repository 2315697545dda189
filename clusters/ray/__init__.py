"""Conversions on Ray."""
