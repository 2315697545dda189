"""Engines that run tasks."""
