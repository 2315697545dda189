"""Object stores that speak S3. Importing any of its modules is an error with advice if no client is installed."""

from paddle_reshard.pipeline.core.extras import require

require("s3fs", "s3", "a store that speaks S3")
