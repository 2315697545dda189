"""What a model is, whatever topology trains it: its parameters, their rules, names and optimizer states; pure."""
