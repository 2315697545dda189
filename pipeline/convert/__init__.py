"""From a request to a checked target: plan, run, manifest."""
