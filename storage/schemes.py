"""Schemes of URLs: those that are opened unasked, and those of stores that speak S3."""

from __future__ import annotations

PLAIN_SCHEMES = frozenset(
    ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "oss", "abfs", "abfss", "az", "hdfs")
)
"""Schemes of URLs that are stores of files and nothing else; any other is opened only if storage options name it."""
S3_SCHEMES = ("s3", "s3a")
"""Two names for stores that speak S3."""
