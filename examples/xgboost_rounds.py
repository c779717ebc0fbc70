"""XGBoost with early stopping: a span a boosting round, with its metrics as marks."""

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from xgboost import XGBClassifier

import cirron as ci


def main() -> None:
    ci.profile()
    rows, labels = load_breast_cancer(return_X_y=True)
    rows, rows_held_out, labels, labels_held_out = train_test_split(rows, labels, random_state=0)
    model = ci.wrap(XGBClassifier(n_estimators=200, early_stopping_rounds=5))

    model.fit(rows, labels, eval_set=[(rows_held_out, labels_held_out)], verbose=False)
    model.score(rows_held_out, labels_held_out)

    ci.trace()
    ci.shutdown()
    print(f"\nbest round: {model.best_iteration}, log loss {model.best_score:.3f}")


if __name__ == "__main__":
    main()
