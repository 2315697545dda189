"""The job of a topology: what each of its ranks holds, for every format whose files are those of ranks."""
