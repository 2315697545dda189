"""From a request to a checked target."""
