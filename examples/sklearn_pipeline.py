"""A search over a scikit-learn Pipeline: a span a candidate, fold and step."""

from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cirron as ci


def main() -> None:
    ci.profile()
    rows, labels = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    search = ci.wrap(GridSearchCV(pipeline, {"logisticregression__C": [0.1, 1.0, 10.0]}, cv=3))

    search.fit(rows, labels)
    search.predict(rows)

    ci.trace()
    ci.shutdown()
    print(f"\nbest: {search.best_params_}, score {search.best_score_:.3f}")


if __name__ == "__main__":
    main()
