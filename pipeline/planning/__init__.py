"""From a source catalog and a target layout to a plan; pure."""
