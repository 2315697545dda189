"""The version of this package, as manifests and sessions note it."""

__version__ = "0.1.0"
