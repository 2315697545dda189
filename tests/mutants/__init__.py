"""Mutants: small changes of the product's code that make it wrong, each of which a test of `make test` must notice.

They ask what the tests are worth. ``tests/mutations`` is something else: changes of checkpoints, which ask what the
product notices.
"""
