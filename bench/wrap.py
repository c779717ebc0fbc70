"""What `ci.wrap` adds to a call of a tiny estimator, as a ratio to the plain call. One JSON line.

Plain and wrapped take turns, round by round, so that a slow moment hits both.
"""

import json
import os
import sys
import tempfile
import time

import numpy
import sklearn
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

os.chdir(tempfile.mkdtemp())
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

COUNT = int(os.environ.get("COUNT", "1000"))
ROUNDS = int(os.environ.get("ROUNDS", "15"))
now = time.perf_counter_ns

rows = numpy.arange(40.0).reshape(20, 2)
labels = [0, 1] * 10


class Nothing:
    """All that a call costs is ours."""

    def get_params(self, deep=True):
        return {}

    def fit(self, rows, labels):
        return self

    def predict(self, rows):
        return rows


def pipeline():
    return make_pipeline(StandardScaler(), LogisticRegression())


def timed(predict):
    row = rows[:1]
    began = now()
    for _ in range(COUNT):
        predict(row)
    return (now() - began) / COUNT


def measure(make):
    """The best of the rounds, of the wrapped estimator and of the plain one beside it."""
    plain = make().fit(rows, labels).predict
    wrapped = ci.wrap(make()).fit(rows, labels).predict
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(timed(plain))
        ours.append(timed(wrapped))
        ci.flush()
    added = min(ours) - min(theirs)
    return {
        "us": round(min(ours) / 1e3, 2),
        "ratio": round(min(ours) / min(theirs), 3),
        "added_us": round(added / 1e3, 2),
    }


found = {"python": sys.version.split()[0], "scikit_learn": sklearn.__version__}
ci.profile(frameworks=[], output="none")
found["predict"] = measure(LogisticRegression)
found["pipeline"] = measure(pipeline)
found["nothing"] = measure(Nothing)
ci.shutdown()
ci.profile(enabled=False)
found["predict_off"] = measure(LogisticRegression)
found["nothing_off"] = measure(Nothing)
ci.shutdown()
print(json.dumps(found))
