"""`ci.wrap` with the real XGBoost and LightGBM: a step a round, metrics as marks."""

from __future__ import annotations

import inspect
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cirron as ci
from cirron import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Scripts

ROWS, LABELS = make_classification(200, random_state=0)
TRAIN, VALID = (ROWS[:150], LABELS[:150]), (ROWS[150:], LABELS[150:])

BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def model_of(library: str, rounds: int = 5, **options: Any) -> Any:
    module = pytest.importorskip(library)
    if library == "xgboost":
        return module.XGBClassifier(n_estimators=rounds, n_jobs=1, **options)
    return module.LGBMClassifier(n_estimators=rounds, n_jobs=1, verbose=-1, **options)


def fit(model: Any, **options: Any) -> Any:
    """Trains with a validation set, in the library's words."""
    if type(model).__name__.startswith("XGB"):
        return model.fit(*TRAIN, eval_set=[VALID], verbose=False, **options)
    if "eval_X" in inspect.signature(model.fit).parameters:  # since 4.7
        return model.fit(*TRAIN, eval_X=VALID[0], eval_y=VALID[1], **options)
    return model.fit(*TRAIN, eval_set=[VALID], **options)


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


def names(recorded: testing.Captured) -> list[str]:
    return [span.name for span in recorded.spans]


def values(recorded: testing.Captured, name: str) -> list[Any]:
    return [mark.value for mark in recorded.marks if mark.name == name]


class TestBoth:
    """What holds for either library."""

    @BOTH
    def test_rounds(self, library: str, recorded: testing.Captured) -> None:
        """Each boosting round is a step under `fit`, numbered from 0."""
        model = ci.wrap(model_of(library))
        model.fit(*TRAIN)
        (whole,) = [span for span in recorded.spans if span.name == "fit"]
        steps = [span for span in recorded.spans if span.name == "step"]

        assert list(range(5)) == [span.index for span in steps]
        assert {whole.id} == {span.parent_id for span in steps}
        assert type(model).__name__ == whole.attrs["estimator"]

    @BOTH
    def test_results(self, library: str) -> None:
        """The trained model is the one that it would have been."""
        plain = model_of(library).fit(*TRAIN)
        wrapped = ci.wrap(model_of(library)).fit(*TRAIN)

        np.testing.assert_array_equal(plain.predict_proba(ROWS), wrapped.predict_proba(ROWS))
        assert repr(plain) == repr(wrapped)
        assert str(plain.get_params()) == str(wrapped.get_params())

    @BOTH
    def test_saved_and_cloned(self, library: str) -> None:
        """It is cloned and saved as ever."""
        wrapped = ci.wrap(model_of(library)).fit(*TRAIN)
        loaded = pickle.loads(pickle.dumps(wrapped))

        assert type(model_of(library)) is type(loaded)
        np.testing.assert_array_equal(wrapped.predict(ROWS), loaded.predict(ROWS))
        assert type(wrapped) is type(clone(wrapped))

    @BOTH
    def test_in_a_search(self, library: str, recorded: testing.Captured) -> None:
        """In a Pipeline in a search, the steps are under the step, the fold and the candidate."""
        model = make_pipeline(StandardScaler(), model_of(library, rounds=2))
        key = f"{model.steps[1][0]}__max_depth"
        ci.wrap(GridSearchCV(model, {key: [1, 2]}, cv=2)).fit(ROWS, LABELS)
        (root,) = recorded.dict()["roots"]
        fold = root["children"][0]["children"][0]

        assert ["candidate", "candidate", "fit"] == [child["name"] for child in root["children"]]
        assert ["fit", "score"] == [child["name"] for child in fold["children"]]
        boosted = fold["children"][0]["children"][1]
        assert ["step", "step"] == [child["name"] for child in boosted["children"]]
        assert 2 * (2 * 2 + 1) == names(recorded).count("step")

    @BOTH
    def test_cross_validation(self, library: str) -> None:
        """Other processes get the same scores."""
        expected = cross_val_score(model_of(library), ROWS, LABELS, cv=2)
        found = cross_val_score(ci.wrap(model_of(library)), ROWS, LABELS, cv=2, n_jobs=2)

        np.testing.assert_array_equal(expected, found)

    @BOTH
    def test_off(self, library: str) -> None:
        """While profiling is off, it trains as ever."""
        plain = model_of(library).fit(*TRAIN)
        ci.profile(enabled=False)
        wrapped = ci.wrap(model_of(library)).fit(*TRAIN)

        np.testing.assert_array_equal(plain.predict_proba(ROWS), wrapped.predict_proba(ROWS))

    @BOTH
    def test_a_function_of_training(self, library: str, recorded: testing.Captured) -> None:
        """The functions `train` and `cv` are wrapped too, and train the same model."""
        module = pytest.importorskip(library)
        data = module.DMatrix if library == "xgboost" else module.Dataset
        params = {"max_depth": 2, "verbosity": 0 if library == "xgboost" else -1, "nthread": 1}

        def train(function: Any) -> Any:
            booster = function(params, data(*TRAIN), 3)
            return booster.predict(data(ROWS) if library == "xgboost" else ROWS)

        expected = train(module.train)
        np.testing.assert_array_equal(expected, train(ci.wrap(module.train)))
        ci.wrap(module.cv)(params, data(*TRAIN), 2, nfold=2)

        assert [*["step"] * 3, "train", *["step"] * 2, "cv"] == names(recorded)
        assert {"library": library} == recorded.spans[3].attrs
        assert recorded.marks
        assert module.train is not ci.wrap(module.train)


class TestXGBoost:
    """What is XGBoost's own."""

    @pytest.fixture(autouse=True)
    def xgboost(self) -> Any:
        return pytest.importorskip("xgboost")

    def test_metrics(self, recorded: testing.Captured) -> None:
        """The metrics of each round are marks on its step."""
        model = fit(ci.wrap(model_of("xgboost", eval_metric=["logloss", "auc"])))
        found = model.evals_result()["validation_0"]

        assert found["logloss"] == values(recorded, "validation_0-logloss")
        assert found["auc"] == values(recorded, "validation_0-auc")
        assert {"step"} == {
            span.name
            for span in recorded.spans
            for mark in recorded.marks
            if mark.span_id == span.id
        }

    def test_early_stopping(self, recorded: testing.Captured) -> None:
        """Training stops where it would have, and what it found is marked on `fit`."""
        options: Any = {"rounds": 200, "early_stopping_rounds": 3, "learning_rate": 1.0}
        plain = fit(model_of("xgboost", **options))
        wrapped = fit(ci.wrap(model_of("xgboost", **options)))

        assert plain.best_iteration == wrapped.best_iteration
        assert [wrapped.best_iteration] == values(recorded, "best_iteration")
        assert [wrapped.best_score] == values(recorded, "best_score")
        assert wrapped.get_booster().num_boosted_rounds() == names(recorded).count("step") < 200

    def test_own_callbacks(self, xgboost: Any, recorded: testing.Captured) -> None:
        """The user's callbacks are called, and the parameter is his afterwards, also on errors."""
        rates = xgboost.callback.LearningRateScheduler([0.5, 0.4, 0.3, 0.2, 0.1])
        given = [rates]
        plain = fit(model_of("xgboost", callbacks=[rates]))
        wrapped = fit(ci.wrap(model_of("xgboost", callbacks=given)))
        with pytest.raises(xgboost.core.XGBoostError, match="Invalid size for `label`"):
            wrapped.fit(ROWS, LABELS[:3])

        np.testing.assert_array_equal(plain.predict_proba(ROWS), wrapped.predict_proba(ROWS))
        assert given is wrapped.callbacks
        assert [rates] == given

    def test_forests(self, xgboost: Any, recorded: testing.Captured) -> None:
        """A forest, which refuses callbacks, is trained without."""
        ci.wrap(xgboost.XGBRFClassifier(n_estimators=3)).fit(*TRAIN)

        assert ["fit"] == names(recorded)


class TestLightGBM:
    """What is LightGBM's own."""

    @pytest.fixture(autouse=True)
    def lightgbm(self) -> Any:
        return pytest.importorskip("lightgbm")

    def test_metrics(self, recorded: testing.Captured) -> None:
        """The metrics of each round are marks on its step."""
        model = fit(ci.wrap(model_of("lightgbm")))

        assert model.evals_result_["valid_0"]["binary_logloss"] == values(
            recorded, "valid_0-binary_logloss"
        )

    def test_early_stopping(self, lightgbm: Any, recorded: testing.Captured) -> None:
        """Training stops where it would have, and what it found is marked on `fit`."""

        def trained(model: Any) -> Any:
            return fit(model, callbacks=[lightgbm.early_stopping(3, verbose=False)])

        plain = trained(model_of("lightgbm", rounds=200, learning_rate=1.0))
        wrapped = trained(ci.wrap(model_of("lightgbm", rounds=200, learning_rate=1.0)))

        assert plain.best_iteration_ == wrapped.best_iteration_
        assert [wrapped.best_iteration_] == values(recorded, "best_iteration")
        assert wrapped.best_iteration_ + 3 == names(recorded).count("step") < 200

    def test_no_early_stopping(self, recorded: testing.Captured) -> None:
        """Without early stopping there is no best round."""
        fit(ci.wrap(model_of("lightgbm")))

        assert [] == values(recorded, "best_iteration")

    def test_own_callbacks(self, recorded: testing.Captured) -> None:
        """The user's callbacks are called, and his list is as it was."""
        seen = []

        def callback(env: Any) -> None:
            seen.append(env.iteration)

        given = [callback]
        fit(ci.wrap(model_of("lightgbm")), callbacks=given)

        assert [0, 1, 2, 3, 4] == seen
        assert [callback] == given

    def test_a_subclass(self, lightgbm: Any, recorded: testing.Captured) -> None:
        """A `fit` that names no callbacks has its rounds, and is given what it was given."""

        class Mine(lightgbm.LGBMClassifier):  # type: ignore[misc]
            def fit(self, X: Any, y: Any, **options: Any) -> Any:  # noqa: N803
                self.given_ = options
                return super().fit(X, y, **options)

        model = ci.wrap(Mine(n_estimators=2, n_jobs=1, verbose=-1)).fit(*TRAIN)

        assert {} == model.given_
        assert ["step", "step", "fit"] == names(recorded)
        assert isinstance(model, lightgbm.LGBMClassifier)

    def test_more_rounds(self, recorded: testing.Captured) -> None:
        """Training that goes on from a model numbers its rounds from there."""
        model = ci.wrap(model_of("lightgbm", rounds=2)).fit(*TRAIN)
        model.fit(*TRAIN, init_model=model.booster_)

        assert [0, 1, 2, 3] == [span.index for span in recorded.spans if span.name == "step"]

    def test_a_callback_that_fails(self, recorded: testing.Captured) -> None:
        """An exception in a round passes, and the spans that were open tell of it."""

        def callback(env: Any) -> None:
            raise RuntimeError("no more")

        callback.before_iteration = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="no more"):
            ci.wrap(model_of("lightgbm")).fit(*TRAIN, callbacks=[callback])

        assert ["step", "fit"] == names(recorded)
        assert all("no more" in span.attrs["error"] for span in recorded.spans)


def test_what_is_imported(scripts: Scripts) -> None:
    """Wrapping an estimator of scikit-learn imports neither library."""
    ended = scripts.run(
        """
        import sys
        import cirron as ci
        from sklearn.linear_model import LogisticRegression

        ci.wrap(LogisticRegression()).fit([[0], [1]], [0, 1])
        print({"xgboost", "lightgbm"} & set(sys.modules))
        """
    )

    assert (0, "set()\n", "") == ended


@pytest.mark.parametrize("library", ["xgboost", "lightgbm", "sklearn"])
def test_the_session_says_which_library(scripts: Scripts, library: str) -> None:
    """A program that uses one of these says so, although both import scikit-learn."""
    pytest.importorskip(library)
    ended = scripts.run(f"import {library}\nimport cirron as ci\nci.profile()", timeout_s=60)
    (root,) = scripts.spans("cirron.session")

    assert (0, library) == (ended.status, root.attrs["framework"])
    assert library in scripts.session().program.versions
