"""`ci.wrap` with the real scikit-learn: the spans, and that all else is as without it."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import BaseEstimator, TransformerMixin, clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_transformer
from sklearn.datasets import make_classification
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    BaggingClassifier,
    IsolationForest,
    RandomForestClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  makes the class importable
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    KFold,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
    cross_validate,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import LabelEncoder, MinMaxScaler, StandardScaler
from sklearn.svm import SVC
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, has_fit_parameter

import cirron as ci
from cirron import hooks, testing
from cirron.hooks import sklearn as wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.conftest import Scripts, Traced

ROWS, LABELS = make_classification(60, n_features=6, random_state=0)


def pipeline() -> Pipeline:
    return Pipeline([("scale", StandardScaler()), ("model", LogisticRegression(C=0.5))])


def columns() -> ColumnTransformer:
    return ColumnTransformer(
        [("scale", StandardScaler(), [0, 1]), ("reduce", PCA(1), [2, 3]), ("gone", "drop", [4])],
        remainder=MinMaxScaler(),
    )


def union() -> FeatureUnion:
    return FeatureUnion([("few", PCA(1)), ("more", PCA(2))])


def search(**options: Any) -> GridSearchCV:
    return GridSearchCV(pipeline(), {"model__C": [0.1, 1.0]}, cv=2, **options)


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "classifier": LogisticRegression,
    "forest": lambda: RandomForestClassifier(5, random_state=0),
    "regressor": Ridge,
    "clusters": lambda: KMeans(2, random_state=0),
    "outliers": lambda: IsolationForest(n_estimators=5, random_state=0),
    "transformer": StandardScaler,
    "encoder": LabelEncoder,
    "vectorizer": TfidfVectorizer,
    "svc": SVC,
    "pipeline": pipeline,
    "columns": columns,
    "union": union,
    "search": search,
    "random search": lambda: RandomizedSearchCV(
        pipeline(), {"model__C": [0.1, 1.0, 2.0]}, n_iter=2, cv=2, random_state=0
    ),
    "halving search": lambda: HalvingGridSearchCV(
        LogisticRegression(), {"C": [0.1, 1.0, 2.0]}, cv=2, min_resources=20, random_state=0
    ),
    "voting": lambda: VotingClassifier([("a", GaussianNB()), ("b", KNeighborsClassifier())]),
    "stacking": lambda: StackingClassifier(
        [("a", GaussianNB()), ("b", KNeighborsClassifier())], LogisticRegression(), cv=2
    ),
    "bagging": lambda: BaggingClassifier(GaussianNB(), 3, random_state=0),
    "calibrated": lambda: CalibratedClassifierCV(GaussianNB(), cv=2),
    "one vs rest": lambda: OneVsRestClassifier(GaussianNB()),
    "target": lambda: TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
    "nested": lambda: make_pipeline(columns(), search()),
}
ANY = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)


def data_for(estimator: Any) -> tuple[Any, Any]:
    if isinstance(estimator, LabelEncoder):
        return LABELS, None
    if isinstance(estimator, TfidfVectorizer):
        return ["a text", "another text", "text"], None
    return ROWS, LABELS


def fitted(estimator: Any) -> Any:
    rows, labels = data_for(estimator)
    return estimator.fit(rows) if labels is None else estimator.fit(rows, labels)


def answers(estimator: Any) -> dict[str, Any]:
    """What each method of a fitted estimator returns."""
    rows, labels = data_for(estimator)
    found = {}
    for name in wrapping.METHODS:
        if "fit" in name or name == "inverse_transform" or not hasattr(estimator, name):
            continue
        method = getattr(estimator, name)
        with np.errstate(divide="ignore"):  # the log of a probability of 0
            result = method(rows, labels) if name == "score" else method(rows)
        found[name] = result.toarray() if hasattr(result, "toarray") else result
    return found


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], name)


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


def outline(recorded: testing.Captured) -> list[str]:
    """The tree, a line a span: `  fit Pipeline scale`."""

    def lines(node: dict[str, Any], depth: int) -> Iterator[str]:
        index = "" if node["index"] is None else f"[{node['index']}]"
        told = [node["attrs"].get(key) for key in ("estimator", "step")]
        yield "  " * depth + " ".join([node["name"] + index, *filter(None, told)])
        for child in node["children"]:
            yield from lines(child, depth + 1)

    return [line for root in recorded.dict()["roots"] for line in lines(root, 0)]


class TestSpans:
    """What is recorded."""

    def test_the_example_of_the_manual(self, traced: Traced) -> None:
        """The example runs as written, and opens a scope round `fit`."""
        X, y = ROWS, LABELS  # noqa: N806  as it is written there

        model = ci.wrap(RandomForestClassifier(n_estimators=100))
        model.fit(X, y)

        assert "fit" == traced()

    def test_a_pipeline(self, recorded: testing.Captured) -> None:
        """The steps of a Pipeline have spans of their own, with their name and class."""
        model = ci.wrap(pipeline())
        model.fit(ROWS, LABELS)
        model.predict(ROWS)
        model.score(ROWS, LABELS)

        assert [
            "fit Pipeline",
            "  fit_transform StandardScaler scale",
            "  fit LogisticRegression model",
            "predict Pipeline",
            "  transform StandardScaler scale",
            "  predict LogisticRegression model",
            "score Pipeline",
            "  transform StandardScaler scale",
            "  score LogisticRegression model",
        ] == outline(recorded)

    def test_columns_and_unions(self, recorded: testing.Captured) -> None:
        """So have the transformers of a ColumnTransformer and of a FeatureUnion."""
        model = ci.wrap(make_pipeline(columns(), union()))
        model.fit(ROWS)
        model.transform(ROWS)

        assert [
            "fit Pipeline",
            "  fit_transform ColumnTransformer columntransformer",
            "    fit_transform StandardScaler scale",
            "    fit_transform PCA reduce",
            "    fit_transform MinMaxScaler",
            "  fit FeatureUnion featureunion",
            "    fit PCA few",
            "    fit PCA more",
            "transform Pipeline",
            "  transform ColumnTransformer columntransformer",
            "    transform StandardScaler scale",
            "    transform PCA reduce",
            "    transform MinMaxScaler remainder",
            "  transform FeatureUnion featureunion",
            "    transform PCA few",
            "    transform PCA more",
        ] == outline(recorded)

    def test_a_search(self, recorded: testing.Captured) -> None:
        """A search has a span a candidate and fold, with the parameters, and marks its scores."""
        model = ci.wrap(search(scoring="accuracy"))
        model.fit(ROWS, LABELS)

        fold = [
            "      fit Pipeline",
            "        fit_transform StandardScaler scale",
            "        fit LogisticRegression model",
            "      predict Pipeline",
            "        transform StandardScaler scale",
            "        predict LogisticRegression model",
        ]
        folds = ["    fold[0]", *fold, "    fold[1]", *fold]
        assert [
            "fit GridSearchCV",
            "  candidate[0]",
            *folds,
            "  candidate[1]",
            *folds,
            "  fit Pipeline",
            "    fit_transform StandardScaler scale",
            "    fit LogisticRegression model",
        ] == outline(recorded)
        assert [{"model__C": 0.1}, {"model__C": 1.0}] == [
            span.attrs for span in recorded.spans if span.name == "candidate"
        ]
        scores = [mark for mark in recorded.marks if mark.name == "mean_test_score"]
        assert list(model.cv_results_["mean_test_score"]) == [mark.value for mark in scores]
        assert [0, 1] == [mark.attrs["candidate"] for mark in scores]
        assert {"best_score": model.best_score_, "best_index": model.best_index_} == {
            mark.name: mark.value for mark in recorded.marks if mark.kind == "summary"
        }

    @pytest.mark.parametrize("name", ["random search", "halving search"])
    def test_other_searches(self, name: str, recorded: testing.Captured) -> None:
        """Every search numbers its candidates from 0, through all rounds, each with its folds."""
        model = ci.wrap(ESTIMATORS[name]())
        model.fit(ROWS, LABELS)
        count = len(model.cv_results_["params"])
        candidates = [span for span in recorded.spans if span.name == "candidate"]
        folds = [span for span in recorded.spans if span.name == "fold"]

        assert list(range(count)) == [span.index for span in candidates]
        assert model.cv_results_["params"] == [span.attrs for span in candidates]
        assert [0, 1] * count == [span.index for span in folds]

    def test_several_scores(self, recorded: testing.Captured) -> None:
        """Each score of a search that has several is marked."""
        ci.wrap(search(scoring=["accuracy", "f1"], refit=False)).fit(ROWS, LABELS)

        assert {"mean_test_accuracy": 2, "mean_test_f1": 2} == {
            name: [mark.name for mark in recorded.marks].count(name)
            for name in {mark.name for mark in recorded.marks}
        }

    def test_a_search_over_estimators(self, recorded: testing.Captured) -> None:
        """Estimators that a search puts into a Pipeline have spans too."""
        models = [GaussianNB(), KNeighborsClassifier()]
        ci.wrap(GridSearchCV(pipeline(), {"model": models}, cv=2)).fit(ROWS, LABELS)
        fits = [span.attrs for span in recorded.spans if span.name == "fit"]
        candidates = [span.attrs for span in recorded.spans if span.name == "candidate"]

        assert {"estimator": "GaussianNB", "step": "model"} in fits
        assert [{"model": "GaussianNB()"}, {"model": "KNeighborsClassifier()"}] == candidates

    def test_a_search_in_a_search(self, recorded: testing.Captured) -> None:
        """Nested cross-validation is nested spans."""
        inner = GridSearchCV(GaussianNB(), {"var_smoothing": [1e-9, 1e-8]}, cv=2)
        ci.wrap(GridSearchCV(inner, {"refit": [True]}, cv=3)).fit(ROWS, LABELS)
        lines = outline(recorded)

        assert 3 == lines.count("        candidate[0]") == lines.count("        candidate[1]")
        assert ["  candidate[0]", "    fold[0]", "      fit GridSearchCV"] == lines[1:4]

    def test_a_candidate_that_fails(self, recorded: testing.Captured) -> None:
        """A fit that fails in a search says so, the search goes on, and its folds are right."""
        model = ci.wrap(GridSearchCV(LogisticRegression(), {"C": [-1.0, 1.0]}, cv=2))
        with pytest.warns(FitFailedWarning), pytest.warns(UserWarning, match="non-finite"):
            model.fit(ROWS, LABELS)
        failed = [span for span in recorded.spans if "error" in span.attrs]

        assert ["fit", "fit"] == [span.name for span in failed]
        assert "InvalidParameterError" in failed[0].attrs["error"]
        assert 4 == sum(span.name == "fold" for span in recorded.spans)

    def test_a_search_that_fails(self, recorded: testing.Captured) -> None:
        """A search that gives up has told all spans that were open."""
        model = ci.wrap(GridSearchCV(LogisticRegression(), {"C": [-1.0]}, error_score="raise"))
        with pytest.raises(ValueError, match="'C' parameter"):
            model.fit(ROWS, LABELS)

        assert ["fit", "fold", "candidate", "fit"] == [span.name for span in recorded.spans]
        assert all("InvalidParameterError" in span.attrs["error"] for span in recorded.spans)

    @pytest.mark.parametrize("method", ["fit_predict", "fit_transform"])
    def test_what_it_calls_on_itself(self, method: str, recorded: testing.Captured) -> None:
        """A method that calls others of the same estimator is one span."""
        getattr(ci.wrap(KMeans(2)), method)(ROWS)

        assert [method] == [span.name for span in recorded.spans]

    @pytest.mark.parametrize("make", [SGDClassifier, lambda: MiniBatchKMeans(2), GaussianNB])
    def test_partial_fit(self, make: Any, recorded: testing.Captured) -> None:
        """Each call of `partial_fit` is a span."""
        model = ci.wrap(make())
        for part in range(3):
            if is_classifier(model):
                model.partial_fit(ROWS[part * 20 :][:20], LABELS[part * 20 :][:20], classes=[0, 1])
            else:
                model.partial_fit(ROWS[part * 20 :][:20])

        assert ["partial_fit"] * 3 == [span.name for span in recorded.spans]

    def test_cross_validation(self, recorded: testing.Captured) -> None:
        """The folds of `cross_validate` are spans under the scope that the user opened."""
        with ci.scope("validation"):
            cross_validate(ci.wrap(GaussianNB()), ROWS, LABELS, cv=3)

        assert ["validation", *["  fit GaussianNB", "  score GaussianNB"] * 3] == outline(recorded)

    def test_wrapped_inside_of_what_is_not(self, recorded: testing.Captured) -> None:
        """A wrapped step has its spans in a Pipeline and a search that are not wrapped."""
        model = make_pipeline(StandardScaler(), ci.wrap(GaussianNB()))
        GridSearchCV(model, {"gaussiannb__var_smoothing": [1e-9]}, cv=2).fit(ROWS, LABELS)

        assert ["fit GaussianNB", "score GaussianNB"] * 2 + ["fit GaussianNB"] == outline(recorded)

    def test_fitted_before(self, recorded: testing.Captured) -> None:
        """An estimator that was fitted, saved and loaded has spans once it is wrapped."""
        saved = pickle.dumps(make_pipeline(columns(), search()).fit(ROWS, LABELS))
        ci.wrap(pickle.loads(saved)).predict(ROWS)

        assert [
            "predict Pipeline",
            "  transform ColumnTransformer columntransformer",
            "    transform StandardScaler scale",
            "    transform PCA reduce",
            "    transform MinMaxScaler remainder",
            "  predict GridSearchCV gridsearchcv",
            "    predict Pipeline",
            "      transform StandardScaler scale",
            "      predict LogisticRegression model",
        ] == outline(recorded)

    def test_an_exception(self, recorded: testing.Captured) -> None:
        """A span that ended in an exception says so, as do those above it."""
        with pytest.raises(NotFittedError):
            ci.wrap(pipeline()).predict(ROWS)

        assert {"NotFittedError"} == {
            span.attrs["error"].partition(":")[0] for span in recorded.spans
        }


class TestTheSame:
    """What stays as it was."""

    @ANY
    def test_results(self, make: Any) -> None:
        """A wrapped estimator has the methods of the plain one, and the same results."""
        assert_same(answers(fitted(make())), answers(fitted(ci.wrap(make()))))

    @ANY
    def test_what_there_is(self, make: Any) -> None:
        """It has the same public attributes, before it is fitted and after."""
        plain, wrapped = make(), ci.wrap(make())

        assert public(plain) == public(wrapped)
        assert public(fitted(plain)) == public(fitted(wrapped))

    @ANY
    def test_how_it_looks(self, make: Any) -> None:
        """It prints as before, also as HTML, and has the same tags and routing."""
        plain, wrapped = make(), ci.wrap(make())

        assert repr(plain) == repr(wrapped)
        assert type(plain).__name__ in wrapped._repr_html_()
        assert get_tags(plain) == get_tags(wrapped)
        assert is_classifier(plain) == is_classifier(wrapped)
        assert is_regressor(plain) == is_regressor(wrapped)
        assert repr(plain.get_params()) == repr(wrapped.get_params())
        with config_context(enable_metadata_routing=True):
            assert str(plain.get_metadata_routing()) == str(wrapped.get_metadata_routing())

    @ANY
    def test_clones(self, make: Any) -> None:
        """A clone is not fitted, is wrapped, and is an instance of the plain class."""
        wrapped = fitted(ci.wrap(make()))
        cloned = clone(wrapped)

        assert type(wrapped) is type(cloned)
        assert isinstance(cloned, type(make()))
        assert public(make()) == public(cloned)

    @ANY
    def test_saved(self, make: Any, tmp_path: Path) -> None:
        """Saved and loaded, it is the plain estimator, fitted."""
        wrapped = fitted(ci.wrap(make()))
        expected = answers(wrapped)
        joblib.dump(wrapped, tmp_path / "model")
        loaded = joblib.load(tmp_path / "model")

        assert type(make()) is type(loaded)
        assert b"cirron" not in pickle.dumps(wrapped)
        assert_same(expected, answers(loaded))
        assert_same(expected, answers(copy.deepcopy(wrapped)))

    @pytest.mark.parametrize(
        "make",
        [
            LogisticRegression,
            StandardScaler,
            KNeighborsClassifier,
            lambda: GridSearchCV(GaussianNB(), {"var_smoothing": [1e-9, 1e-8]}, cv=2),
        ],
        ids=["classifier", "transformer", "neighbours", "search"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_the_checks_of_scikit_learn(self, make: Any) -> None:
        """Wrapped, it still passes what scikit-learn checks of an estimator."""
        results = check_estimator(ci.wrap(make()), on_skip=None)

        assert 40 < sum(result["status"] == "passed" for result in results)

    def test_fitted_in_place(self) -> None:
        """The objects are the user's own: fitting a wrapped Pipeline fits the steps that he has."""
        scaler = StandardScaler()
        model = Pipeline([("scale", scaler), ("model", GaussianNB())])
        ci.wrap(model).fit(ROWS, LABELS)

        assert model["scale"] is scaler
        check_is_fitted(model)
        assert (6,) == scaler.mean_.shape

    def test_parameters(self) -> None:
        """Parameters are set and read, in depth, as before."""
        model = ci.wrap(pipeline()).set_params(model__C=7, scale="passthrough")

        assert 7 == model.get_params()["model__C"]
        assert 7 == model["model"].C
        assert "passthrough" == model["scale"]
        with pytest.raises(ValueError, match="Invalid parameter"):
            model.set_params(unknown=1)

    def test_frames(self) -> None:
        """Frames, their column names and `set_output` work as before."""
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(ROWS, columns=list("abcdef"))
        plain = make_column_transformer((StandardScaler(), ["a", "b"]), remainder="passthrough")
        wrapped = ci.wrap(clone(plain)).set_output(transform="pandas")
        expected = plain.set_output(transform="pandas").fit_transform(frame)

        pandas.testing.assert_frame_equal(expected, wrapped.fit_transform(frame))
        assert list("abcdef") == list(wrapped.feature_names_in_)
        assert list(expected) == list(wrapped.get_feature_names_out())

    def test_routed_metadata(self) -> None:
        """Sample weights are routed to the steps that asked for them."""
        weights = np.linspace(0.1, 1, len(ROWS))

        def score(model: Any) -> Any:
            model["model"].set_fit_request(sample_weight=True)
            model["scale"].set_fit_request(sample_weight=False)
            return model.fit(ROWS, LABELS, sample_weight=weights)["model"].coef_

        with config_context(enable_metadata_routing=True):
            np.testing.assert_array_equal(score(pipeline()), score(ci.wrap(pipeline())))
        assert has_fit_parameter(ci.wrap(Ridge()), "sample_weight")

    @pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
    def test_several_jobs(self, backend: str) -> None:
        """Other processes and threads get the same results."""
        expected = search().fit(ROWS, LABELS)
        model = ci.wrap(search(n_jobs=2))
        with joblib.parallel_config(backend=backend):
            model.fit(ROWS, LABELS)
            scores = cross_val_score(ci.wrap(pipeline()), ROWS, LABELS, cv=2, n_jobs=2)
            predicted = cross_val_predict(ci.wrap(pipeline()), ROWS, LABELS, cv=2, n_jobs=2)

        np.testing.assert_array_equal(
            expected.cv_results_["mean_test_score"], model.cv_results_["mean_test_score"]
        )
        assert expected.best_params_ == model.best_params_
        np.testing.assert_array_equal(cross_val_score(pipeline(), ROWS, LABELS, cv=2), scores)
        np.testing.assert_array_equal(cross_val_predict(pipeline(), ROWS, LABELS, cv=2), predicted)

    def test_parts_from_other_processes(self, recorded: testing.Captured) -> None:
        """Parts that were fitted in other processes have spans in the next call."""
        model = ci.wrap(union().set_params(n_jobs=2)).fit(ROWS)
        model.set_params(n_jobs=None).transform(ROWS)

        assert ["transform FeatureUnion", "  transform PCA few", "  transform PCA more"] == (
            outline(recorded)[-3:]
        )

    def test_splits_are_drawn_once(self) -> None:
        """A search draws its random splits as often as it would without us."""

        def scores(model: Any) -> Any:
            model.set_params(cv=KFold(3, shuffle=True, random_state=np.random.RandomState(3)))
            return model.fit(ROWS, LABELS).cv_results_["mean_test_score"]

        np.testing.assert_array_equal(scores(search()), scores(ci.wrap(search())))

    def test_cached_steps(self, tmp_path: Path, recorded: testing.Captured) -> None:
        """A Pipeline with a memory fits its steps once."""

        def fit() -> Any:
            return ci.wrap(pipeline().set_params(memory=str(tmp_path))).fit(ROWS, LABELS)

        expected = pipeline().fit(ROWS, LABELS).predict(ROWS)
        np.testing.assert_array_equal(expected, fit().predict(ROWS))
        np.testing.assert_array_equal(expected, fit().predict(ROWS))
        names = [span.attrs.get("step") for span in recorded.spans if "fit" in span.name]

        assert ["scale", "model", None, "model", None] == names

    def test_own_estimators(self, recorded: testing.Captured) -> None:
        """An estimator of the user's, defined anywhere, is wrapped, saved and cloned."""
        model = ci.wrap(make_pipeline(Doubles(), GaussianNB()))
        loaded = pickle.loads(pickle.dumps(clone(model).fit(ROWS, LABELS)))

        assert type(loaded[0]) is Doubles
        assert "  fit_transform Doubles doubles" in outline(recorded)

    def test_nothing_is_patched(self) -> None:
        """The classes of scikit-learn are what they were, and others are not traced."""
        before = {name: vars(LogisticRegression)[name] for name in ("fit", "predict_proba")}
        with testing.capture() as captured:
            ci.wrap(LogisticRegression()).fit(ROWS, LABELS)
            LogisticRegression().fit(ROWS, LABELS)

        assert before == {name: vars(LogisticRegression)[name] for name in before}
        assert 1 == len(captured.spans)


class Doubles(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # they have no types
    def fit(self, rows: Any, labels: Any = None) -> Doubles:
        return self

    def transform(self, rows: Any) -> Any:
        return rows * 2


def public(estimator: Any) -> list[str]:
    return [name for name in dir(estimator) if not name.startswith("_")]


class TestProcesses:
    """What a program sees."""

    def test_nothing_is_imported(self, scripts: Scripts) -> None:
        """`ci.wrap` imports none of the libraries."""
        ended = scripts.run(
            f"""
            import sys
            import cirron as ci

            class Model:
                def get_params(self): return {{}}
                def fit(self): return self

            ci.wrap(Model()).fit()
            ci.wrap(object())
            print(*{{"numpy", *{hooks.PRECEDENCE!r}}} & set(sys.modules))
            """
        )

        assert (0, "\n", "") == ended

    def test_without_scikit_learn(self, scripts: Scripts) -> None:
        """Where it is not installed, `ci.wrap` says nothing and changes nothing."""
        ended = scripts.run(
            """
            import sys
            sys.modules.update(sklearn=None, xgboost=None, lightgbm=None)
            import cirron as ci

            thing = object()
            print(ci.wrap(thing) is thing, ci.wrap(len) is len)
            """
        )

        assert (0, "True True\n", "") == ended

    def test_a_model_is_loaded_without_cirron(self, scripts: Scripts) -> None:
        """A model that was saved wrapped is loaded by a program that has no cirron."""
        joblib.dump(ci.wrap(pipeline()).fit(ROWS, LABELS), scripts.folder / "model")
        ended = scripts.run(
            """
            import sys
            sys.modules["cirron"] = None
            import joblib

            print(joblib.load("model").predict([[0] * 6]).shape)
            """
        )

        assert (0, "(1,)\n", "") == ended

    def test_on_disk(self, scripts: Scripts) -> None:
        """A profiled program leaves the spans of a wrapped Pipeline on disk."""
        ended = scripts.run(
            """
            import numpy
            import cirron as ci
            from sklearn.linear_model import LogisticRegression
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler

            ci.profile()
            rows = numpy.arange(40.0).reshape(20, 2)
            model = ci.wrap(make_pipeline(StandardScaler(), LogisticRegression()))
            model.fit(rows, [0, 1] * 10).score(rows, [0, 1] * 10)
            ci.shutdown()
            model.predict(rows)
            """
        )
        session = scripts.session()

        assert (0, []) == (ended.status, ended.warnings)
        assert 3 == len([span for span in session.spans if span.name.startswith("fit")])
        assert ["score", "score"] == [mark.name for mark in session.marks]
