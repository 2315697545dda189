"""Any store that fsspec reaches."""
