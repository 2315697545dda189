"""``paddle-reshard`` and ``python -m paddle_reshard``."""

import os
import signal


def _end(*_: object) -> None:
    os._exit(128 + signal.SIGINT)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # which ends imports with a traceback
    signal.signal(signal.SIGINT, _end)


def main() -> None:
    """Run a command, which answers to signals itself."""
    from paddle_reshard.pipeline.cli.main import main as run

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
