"""Published versions of weights: full exports and the deltas between them, in the form that inference engines read."""
