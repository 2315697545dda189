"""The record of a conversion in progress: session, ledger, lock, staging folder."""
