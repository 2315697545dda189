"""What is told while a command runs: observers of one stream of events."""
