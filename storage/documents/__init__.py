"""Documents in JSON, read strictly: whatever comes from outside is checked entry by entry."""
