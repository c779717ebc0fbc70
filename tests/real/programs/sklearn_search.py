# shape: kaggle: Pipeline in GridSearchCV, LightGBM, XGBoost; nothing of it is wrapped
import lightgbm
import numpy as np
import xgboost
from common import Counts, digest, result
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

X, y = make_classification(200, 8, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

parts = [("low", StandardScaler(), [0, 1, 2, 3]), ("high", MinMaxScaler(), [4, 5, 6, 7])]
pipeline = Pipeline([("scale", ColumnTransformer(parts)), ("model", LogisticRegression())])
folds = StratifiedKFold(3, shuffle=True, random_state=0)
search = GridSearchCV(pipeline, {"model__C": [0.1, 1.0, 10.0]}, cv=folds, n_jobs=1)
search.fit(X_train, y_train)

gbm = lightgbm.LGBMClassifier(n_estimators=20, n_jobs=1, random_state=0, verbose=-1)
stop = lightgbm.early_stopping(3, verbose=False)
gbm.fit(X_train, y_train, eval_set=[(X_test, y_test)], callbacks=[stop])

xgb = xgboost.XGBClassifier(n_estimators=20, n_jobs=1, random_state=0, early_stopping_rounds=3)
xgb.fit(X_train, y_train, eval_set=[(X_test, y_test)], verbose=False)

probabilities = np.mean([one.predict_proba(X_test)[:, 1] for one in (search, gbm, xgb)], axis=0)
result(
    Counts(),
    best=search.best_params_,
    rounds=[gbm.best_iteration_, xgb.best_iteration],
    accuracy=float(np.mean((probabilities > 0.5) == y_test)),
    probabilities=digest(probabilities),
)
