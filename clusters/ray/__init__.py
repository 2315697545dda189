"""Conversions on Ray. Importing any of its modules is an error with advice if Ray is not installed."""

from paddle_reshard.clusters.ray.head import patience_seconds
from paddle_reshard.pipeline.core.extras import require

require("ray", "ray", "Ray, for --cluster ray and jobs,")
patience_seconds()  # a process that imports Ray crashes without a message if Ray cannot read the variable
