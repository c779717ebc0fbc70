# What `cirron run` puts before everything else on PYTHONPATH. Any Python may read it, one without
# cirron or of another version too: so no syntax that is new, and nothing that can fail. The
# program's own sitecustomize, if it has one, is the one that stays imported.
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
    except Exception:  # noqa: BLE001  protects a program whose Python has no cirron, or an older one
        pass
    else:
        autostart.begin()
