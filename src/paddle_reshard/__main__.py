"""``python -m paddle_reshard``."""

from paddle_reshard.pipeline.cli.main import main

if __name__ == "__main__":
    main()
