"""What a script needs beside Python itself, told in one line where it is not there."""

import importlib.util
import sys


def needs(*modules):
    """Ends the script if one of them is missing; they are installed by their names."""
    missing = " ".join(name for name in modules if importlib.util.find_spec(name) is None)
    if missing:
        sys.exit(f"{sys.argv[0]}: needs {missing}: pip install {missing}")
