"""Conversions on a schedule."""
