"""Takes the working directory off the import path of ``python -m paddle_reshard``; imported before anything else.

``python -m`` puts it in front of all others, so that a ``numpy.py`` that lies in a checkpoint would run in place of
NumPy. While Python looks for the module to run, ``sys.argv[0]`` is ``-m``; a package that is imported in any other way
leaves the path to its program.

What Python itself imports before that cannot be held from here, a ``paddle_reshard.py`` in the working directory above
all. The command ``paddle-reshard`` has no such path, nor has ``python -P -m paddle_reshard`` (``PYTHONSAFEPATH``).
"""

import sys


def runs_this_package(argv: list[str], original: list[str]) -> bool:
    """Whether the interpreter was told to run a module of this package, and is looking for it.

    >>> runs_this_package(["-m", "convert"], ["python", "-m", "paddle_reshard", "convert"])
    True
    >>> runs_this_package(["-m"], ["python", "-m", "my_trainer", "paddle_reshard"])
    False
    """
    named = (after for option, after in zip(original, original[1:], strict=False) if option == "-m")
    return argv[:1] == ["-m"] and next(named, "").partition(".")[0] == "paddle_reshard"


_there = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
if _there and runs_this_package(sys.argv, sys.orig_argv):
    del sys.path[0]
