"""Conversions on Ray. Importing any of its modules is an error with advice if Ray is not installed."""

from paddle_reshard.pipeline.core.extras import require

require("ray", "ray", "Ray, for --cluster ray and jobs,")
