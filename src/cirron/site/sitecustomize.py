# `cirron run` puts this folder first on PYTHONPATH. Any Python may run this file, even an old one,
# or one without cirron, so it has no new syntax, and nothing that can fail. If the program has its
# own sitecustomize, that one stays imported.
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [one for one in sys.path if os.path.abspath(one) != here]
ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the next one on the path
except ImportError as error:
    if ours is not None:  # this one is still being imported
        sys.modules["sitecustomize"] = ours
    if getattr(error, "name", None) != "sitecustomize":
        raise
finally:
    try:
        from cirron import autostart
    except Exception:  # noqa: BLE001  protects a program without cirron, or with an old one
        pass
    else:
        autostart.begin()
