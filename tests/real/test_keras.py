"""Keras on each of its backends: one epoch span an epoch, one batch a batch, the same everywhere.

A backend is for a whole process, so that `keras_cases.py` is run once for each; the tests read what
it left on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.spools import Recorded as InSpool
from tests.spools import read_one

import cirron as ci
from cirron import hooks
from cirron.runs import tree

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

    from cirron import wire

if find_spec("keras") is None:  # importing it would need its default backend, TensorFlow
    pytest.skip("keras is not installed", allow_module_level=True)

CASES = Path(__file__).with_name("keras_cases.py")
OLDEST = Path(sys.prefix) / "oldest-keras"  # where `make test-heavy` puts that release
BACKENDS = [
    "torch",
    "jax",
    pytest.param("tensorflow", marks=pytest.mark.heavy),
    *(
        pytest.param(f"{backend} oldest", marks=pytest.mark.heavy)
        for backend in ("torch", "jax", "tensorflow")
    ),
]
METRICS = ("loss", "mae")

# What is compared. Others say more: when a function is compiled, how a model is built.
NAMES = {"thread", "fit", "epoch", "step", "batch", "evaluation", "prediction"} | {
    "data_load",
    "forward",
    "backward",
    "optimizer_step",
}

# What the torch hooks record beneath a batch.
TORCH = {
    "train": "(data_load forward:train backward optimizer_step)",
    "eval": "(data_load forward:eval)",
}


class Recorded(NamedTuple):
    """What the script left."""

    backend: str
    folder: Path
    facts: dict[str, Any]
    run: InSpool
    cases: dict[str, dict[str, Any]]  # the tree of each

    @property
    def until_it_raises(self) -> int:
        """How many batches are trained of data that has three, and then raises."""
        reads_ahead = self.backend == "jax" and self.facts["version"].startswith("3.12")
        return 2 if reads_ahead else 3

    def outline(self, case: str) -> str:
        return " ".join(outlines(self.cases[case]["children"]))

    def batches(self, count: int, kind: str = "train", first: int = 0) -> str:
        beneath = {"torch": TORCH[kind], "jax": "(data_load)"}.get(self.backend, "")
        return " ".join(f"batch[{index}]{beneath}" for index in range(first, count))

    def epoch(self, index: int, count: int = 3, *more: str) -> str:
        return f"epoch[{index}]({' '.join((self.batches(count), *more))})"

    def evaluation(self, count: int) -> str:
        return f"evaluation({self.batches(count, 'eval')})"


def outlines(nodes: list[dict[str, Any]]) -> list[str]:
    """As `outline` of the other tests, of the spans that are compared."""
    found = []
    for node in nodes:
        if node["name"] in NAMES:
            index = "" if node["index"] is None else f"[{node['index']}]"
            mode = f":{node['attrs']['mode']}" if "mode" in node["attrs"] else ""
            state = "!" if "error" in node["attrs"] else "?" if node["open"] else ""
            beneath = outlines(node["children"])
            inner = f"({' '.join(beneath)})" if beneath else ""
            found.append(f"{node['name']}{index}{mode}{state}{inner}")
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    backend, _, release = request.param.partition(" ")
    if find_spec(backend) is None or (release and not OLDEST.exists()):
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(backend)
    first = [str(OLDEST)] if release else []
    path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, str(CASES)],
        cwd=folder,
        env={
            **os.environ,
            **({"PYTHONPATH": path} if path else {}),
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ended.returncode, ended.stderr
    assert "internal error" not in ended.stderr
    run = read_one(folder / ".cirron")
    (root,) = tree.to_dict(tree.build(run.spans, run.marks, now_ns=0))["roots"]
    facts = json.loads((folder / "facts.json").read_text())
    if release:
        assert facts["version"].startswith(".".join(map(str, hooks.HOOKS["keras"][-1])))
    return Recorded(backend, folder, facts, run, {node["name"]: node for node in root["children"]})


def values(node: dict[str, Any], kind: str) -> dict[str, Any]:
    return {mark["name"]: mark["value"] for mark in node["marks"] if mark["kind"] == kind}


def named(node: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """The spans of that path of names below a span."""
    found = [node]
    for name in names:
        found = [child for one in found for child in one["children"] if child["name"] == name]
    return found


pytestmark = pytest.mark.timeout(300)  # a backend's first import, on a machine that is busy


# -- fits ------------------------------------------------------------------------------------


def test_a_fit(recorded: Recorded) -> None:
    """Each epoch has its batches, and its validation as an evaluation that is no epoch."""
    epochs = [recorded.epoch(index, 3, recorded.evaluation(3)) for index in range(2)]

    assert " ".join(epochs) == recorded.outline("validation")


def test_summaries(recorded: Recorded) -> None:
    """An epoch's summaries are what Keras has in its history, those of the validation too."""
    history = recorded.facts["history"]
    epochs = named(recorded.cases["validation"], "epoch")

    assert ["loss", "mae", "val_loss", "val_mae"] == sorted(history)
    for number, epoch in enumerate(epochs):
        assert {name: series[number] for name, series in history.items()} == pytest.approx(
            values(epoch, "summary")
        )
        (evaluation,) = named(epoch, "evaluation")
        expected = {name: history[f"val_{name}"][number] for name in METRICS}
        assert expected == pytest.approx(values(evaluation, "summary"))


def test_points(recorded: Recorded) -> None:
    """Each batch has its metrics as points; Keras's are those of the epoch so far."""
    history = recorded.facts["history"]
    for number, epoch in enumerate(named(recorded.cases["validation"], "epoch")):
        batches = named(epoch, "batch")

        assert [set(METRICS)] * 3 == [set(values(batch, "point")) for batch in batches]
        last = {name: history[name][number] for name in METRICS}
        assert last == pytest.approx(values(batches[-1], "point"))


def test_what_is_measured(recorded: Recorded) -> None:
    """Epochs, evaluations and predictions have processor time and memory, as in any loop."""
    fits, others = recorded.cases["validation"], recorded.cases["other_methods"]
    epochs = named(fits, "epoch")
    # The last of those methods are given one batch alone.
    whole = [named(fits, "epoch", "evaluation"), named(others, "evaluation")[:1]]
    predictions = named(others, "prediction")[:1]

    for one in (*epochs, *whole[0], *whole[1], *predictions):
        assert one["cpu_ns"] > 0
        assert one["memory_peak_bytes"] > 0
    assert {None} == {batch["cpu_ns"] for batch in named(fits, "epoch", "batch")}


def test_results_are_the_same(recorded: Recorded) -> None:
    """The weights after a fit are those that it has without a profiler, to the last bit."""
    assert recorded.facts["plain_weights"] == recorded.facts["weights"]


def test_fits_one_after_the_other(recorded: Recorded) -> None:
    """Epochs are numbered as Keras does: from 0 in each fit, or from `initial_epoch` on."""
    expected = " ".join(recorded.epoch(index) for index in (0, 2, 3))

    assert expected == recorded.outline("again")


def test_several_steps_at_once(recorded: Recorded) -> None:
    """With `steps_per_execution` a batch has the index of its first step, and says how many."""
    if recorded.backend == "torch":
        pytest.skip("the torch backend does one step at a time")
    case = recorded.cases["several_steps_at_once"]
    paths = (("epoch",), ("epoch", "evaluation"), ("evaluation",), ("prediction",))
    counts = {
        path: [
            [(batch["index"], batch["attrs"].get("steps", 1)) for batch in named(one, "batch")]
            for one in named(case, *path)
        ]
        for path in paths
    }

    epochs, validations, evaluations, predictions = counts.values()
    assert [[(0, 2), (2, 1)]] * 2 == epochs
    assert [[(0, 2), (2, 2), (4, 1)]] * 2 == validations
    assert [[(0, 2), (2, 1)]] == evaluations == predictions


def test_endless_data(recorded: Recorded) -> None:
    """With `steps_per_epoch` an epoch has that many batches."""
    epochs = [recorded.epoch(index, 2, recorded.evaluation(2)) for index in range(2)]

    assert " ".join(epochs) == recorded.outline("endless_data")


def test_data_of_unknown_length(recorded: Recorded) -> None:
    """The batch that Keras begins before it finds that there is no more data is none."""
    assert recorded.epoch(0) == recorded.outline("data_of_unknown_length")


def test_early_stopping(recorded: Recorded) -> None:
    """A fit that is stopped early has the epochs that it had."""
    assert f"{recorded.epoch(0)} {recorded.epoch(1)}" == recorded.outline("early_stopping")


def test_stopped_in_a_batch(recorded: Recorded) -> None:
    """An epoch that is stopped has the batches that it had, and is over for the next fit."""
    assert f"{recorded.epoch(0, 2)} {recorded.epoch(0)}" == recorded.outline("stopped_in_a_batch")
    assert not named(recorded.cases["stopped_in_a_batch"], "build", "evaluation")


def test_a_subclassed_model(recorded: Recorded) -> None:
    """A model with its own `call` and `train_step` is like any other."""
    (epoch,) = named(recorded.cases["subclassed"], "epoch")

    if recorded.backend == "torch":  # its step calls a part first: a second forward
        assert "Mine" == epoch["attrs"]["model_class"]
        assert "forward:train forward:train" in recorded.outline("subclassed")
    else:
        assert recorded.epoch(0) == recorded.outline("subclassed")


# -- fits that fail --------------------------------------------------------------------------


def test_errors_pass_on(recorded: Recorded) -> None:
    """The program sees its own error."""
    wanted = ("from a callback", "from the data", "from the validation")
    raised = recorded.facts["raised"]

    assert 3 == len(raised)
    assert [] == [text for text, error in zip(wanted, raised, strict=True) if text not in error]


def test_a_callback_that_raises(recorded: Recorded) -> None:
    """The batch and the epoch that an error ends say so."""
    last = recorded.batches(2, first=1).replace("]", "]!", 1)

    expected = f"epoch[0]!({recorded.batches(1)} {last})"
    assert expected == recorded.outline("a_callback_that_raises")


def test_data_that_raises(recorded: Recorded) -> None:
    """So does the batch whose data could not be had."""
    beneath = "" if recorded.backend == "tensorflow" else "(data_load!)"

    count = recorded.until_it_raises
    expected = f"epoch[0]!({recorded.batches(count)} batch[{count}]!{beneath})"
    assert expected == recorded.outline("data_that_raises")


def test_a_validation_that_raises(recorded: Recorded) -> None:
    """So does the evaluation."""
    beneath = "" if recorded.backend == "tensorflow" else "(data_load!)"
    count = recorded.until_it_raises
    evaluation = f"evaluation!({recorded.batches(count, 'eval')} batch[{count}]!{beneath})"

    expected = f"epoch[0]!({recorded.batches(3)} {evaluation})"
    assert expected == recorded.outline("a_validation_that_raises")


# -- callbacks -------------------------------------------------------------------------------


def test_marks_of_callbacks(recorded: Recorded) -> None:
    """What the program's own callbacks mark is on the epoch or batch that they are called for."""
    (epoch,) = named(recorded.cases["marks_of_callbacks"], "epoch")
    of_epoch = {name for name in values(epoch, "point") if name.startswith("at_")}
    of_batches = [
        {name: value for name, value in values(batch, "point").items() if name.startswith("at_")}
        for batch in named(epoch, "batch")
    ]

    assert {"at_epoch_begin", "at_epoch_end"} == of_epoch
    assert [{"at_batch_begin": n, "at_batch_end": n} for n in range(3)] == of_batches


def test_forms_of_callbacks(recorded: Recorded) -> None:
    """A list, a tuple, one callback, a CallbackList, its subclass: each is called, and left so."""
    epochs = " ".join([recorded.epoch(0)] * 5)

    assert [5, 1, 1, 1] == recorded.facts["forms"]
    assert epochs == recorded.outline("forms_of_callbacks")


def test_keras_need_not_wait(recorded: Recorded) -> None:
    """Where Keras tells callbacks in another thread, so that no step waits, it still does."""
    assert (recorded.backend != "tensorflow") == recorded.facts["other_thread"]
    assert recorded.epoch(0) == recorded.outline("a_callback_in_another_thread")


def test_fits_in_a_fit(recorded: Recorded) -> None:
    """A fit inside an epoch is a `fit` there: its epochs are none of the training's."""
    inner = f"fit({recorded.batches(3)} {recorded.batches(3)})"

    expected = recorded.epoch(0, 3, inner, recorded.evaluation(1))
    assert expected == recorded.outline("fits_in_a_fit")


def test_fits_in_threads(recorded: Recorded) -> None:
    """Fits in two threads at once each have their own epochs."""
    threads = [span for span in recorded.run.spans if span.name == "thread"]
    epochs = {
        thread.id: sorted(span.index or 0 for span in recorded.run.spans
                          if span.name == "epoch" and span.parent_id == thread.id)
        for thread in threads
    }  # fmt: skip

    assert 2 == len({thread.thread_id for thread in threads})
    assert [[0, 1]] * 2 == list(epochs.values())


# -- other methods ---------------------------------------------------------------------------


def test_other_methods(recorded: Recorded) -> None:
    """Evaluations and predictions are their own scopes; a batch that is trained alone is one."""
    is_torch = recorded.backend == "torch"
    evaluation = f"evaluation({recorded.batches(3, 'eval')})"
    prediction = f"prediction({recorded.batches(3, 'eval')})"
    # Torch's own flag, which Keras leaves as it is here.
    alone = "(forward:train backward optimizer_step)" if is_torch else ""
    forward = "(forward:eval)" if is_torch else ""

    expected = f"{evaluation} {prediction} batch{alone} evaluation{forward} prediction{forward}"
    assert expected == recorded.outline("other_methods")
    (batch,) = named(recorded.cases["other_methods"], "batch")
    assert recorded.facts["on_batch"] == pytest.approx(values(batch, "point"))
    for evaluation_ in named(recorded.cases["other_methods"], "evaluation"):
        assert set(METRICS) == set(values(evaluation_, "summary"))


def test_checkpoints(recorded: Recorded) -> None:
    """What a callback or the program saves: one span each."""
    case = recorded.cases["saving"]

    assert 1 == len(named(case, "epoch", "batch", "checkpoint"))
    assert 1 == len(named(case, "checkpoint"))


def test_batches_of_several_outputs(recorded: Recorded) -> None:
    """The values of a batch alone are Keras's, each by its name; what is returned is as it was."""
    case, several = recorded.cases["batches_of_several_outputs"], recorded.facts["several"]
    names = {"loss", "a_loss", "b_loss", "a_mae", "b_mae"}
    kinds = {"train_on_batch": ("batch", "point"), "test_on_batch": ("evaluation", "summary")}

    for method, (span, kind) in kinds.items():
        as_dict, as_list = several[method]
        assert names == set(as_dict)
        # As Keras has it: the losses, and then the metrics.
        expected = [as_dict[name] for name in ("loss", "a_loss", "b_loss", "a_mae", "b_mae")]
        assert expected == pytest.approx(as_list)
        marks = [values(one, kind) for one in named(case, span)]
        assert [pytest.approx(as_dict)] * 2 == marks


def test_a_torch_loader(recorded: Recorded) -> None:
    """What a thread of TensorFlow's own loads with torch is part of the fit, and nothing else."""
    session = next(span for span in recorded.run.spans if span.name == "cirron.session")
    beside = [span.name for span in recorded.run.spans if span.parent_id == session.id]
    if recorded.backend == "tensorflow":
        first = recorded.epoch(0, 3, "data_load", recorded.evaluation(3))  # looks at the shapes
        second = recorded.epoch(1, 3, recorded.evaluation(3))
        expected = f"{first} {second} {recorded.epoch(0)}"
        assert expected == recorded.outline("a_torch_loader")
    assert set() == {"data_load", "batch", "step", "evaluation"} & set(beside)


# -- inside scopes of the program's own ------------------------------------------------------


def test_in_epochs_of_mine(recorded: Recorded) -> None:
    """Inside `ci.epochs` there is no other epoch; Keras's values are on that one."""
    expected = f"{recorded.epoch(0)} {recorded.epoch(1)}"

    assert expected == recorded.outline("in_epochs_of_mine")
    for epoch in named(recorded.cases["in_epochs_of_mine"], "epoch"):
        assert set(METRICS) == set(values(epoch, "summary"))


def test_in_batches_of_mine(recorded: Recorded) -> None:
    """Inside `ci.batches` there is no other batch; Keras's values are on that one."""
    beneath = "(forward:train backward optimizer_step)" if recorded.backend == "torch" else ""
    batches = f"batch[0]{beneath} batch[1]{beneath}"

    expected = f"epoch[0]({batches}) epoch[1]({batches})"
    assert expected == recorded.outline("in_epochs_and_batches_of_mine")
    for batch in named(recorded.cases["in_epochs_and_batches_of_mine"], "epoch", "batch"):
        assert set(METRICS) == set(values(batch, "point"))


def test_in_a_step_of_mine(recorded: Recorded) -> None:
    """Inside a scope named `step` there is neither an epoch nor a batch."""
    work = {"torch": TORCH["train"][1:-1], "jax": "data_load"}.get(recorded.backend)

    expected = "step[7]" if work is None else f"step[7]({' '.join([work] * 3)})"
    assert expected == recorded.outline("in_a_step_of_mine")


def test_a_torch_loop(recorded: Recorded) -> None:
    """A torch loop of the program's own knows the steps of a Keras optimizer."""
    step = "(data_load forward:train backward optimizer_step)"
    expected = [f"epoch[{index}](step[0]{step} step[1]{step})" for index in range(2)]

    assert (" ".join(expected) if recorded.backend == "torch" else "") == recorded.outline(
        "a_torch_loop"
    )


def test_a_fit_after_a_torch_loop(recorded: Recorded) -> None:
    """The loop, which has no loader, has ended: the fit's epoch is next to the loop's."""
    work = "(forward:train backward optimizer_step)"
    expected = f"epoch[2](step[0]{work} step[1]{work}) {recorded.epoch(0)}"

    assert (expected if recorded.backend == "torch" else "") == recorded.outline(
        "a_fit_after_a_torch_loop"
    )


# -- snapshots -------------------------------------------------------------------------------


def snapshots_of(recorded: Recorded, epoch: wire.Span) -> list[wire.Snapshot]:
    return [one for one in recorded.run.snapshots if one.span_id == epoch.id]


def epochs_of(recorded: Recorded, case: str) -> list[wire.Span]:
    (scope,) = (span for span in recorded.run.spans if span.name == case)
    found = [span for span in recorded.run.spans if span.parent_id == scope.id]
    return sorted((s for s in found if s.name == "epoch"), key=lambda span: span.start_ns)


def test_snapshots(recorded: Recorded) -> None:
    """At an epoch's end the model's weights are taken, by the names that Keras has for them."""
    for epoch in epochs_of(recorded, "validation"):
        found = snapshots_of(recorded, epoch)
        weights = [one for one in found if not one.tensor_name.endswith(".grad")]

        assert recorded.facts["variables"] == [one.tensor_name for one in weights]
        frozen = [one.tensor_name.rpartition("/")[2] for one in weights if "frozen" in one.attrs]
        assert ["moving_mean", "moving_variance"] == frozen


def test_raw_values(recorded: Recorded) -> None:
    """The values are those of the epoch's end, whatever the next epoch does to them."""
    np = pytest.importorskip("numpy")
    from safetensors.numpy import load_file

    for number, epoch in enumerate(epochs_of(recorded, "validation")):
        expected = dict(np.load(recorded.folder / f"weights-{number}.npz"))
        address = snapshots_of(recorded, epoch)[0].blob_uri
        assert address is not None
        found = load_file(address.removeprefix("file://"))

        assert expected.keys() == found.keys()
        assert [] == [name for name in expected if (expected[name] != found[name]).any()]


@pytest.mark.parametrize("case", ["in_epochs_of_mine", "in_epochs_and_batches_of_mine"])
def test_snapshots_in_epochs_of_mine(recorded: Recorded, case: str) -> None:
    """Inside `ci.epochs` they belong to that epoch, of a fit or of a model that is watched."""
    found = [
        {one.tensor_name.rpartition("/")[2] for one in snapshots_of(recorded, epoch)}
        for epoch in epochs_of(recorded, case)
    ]

    assert 2 == len(found)
    assert all({"kernel", "bias", "moving_mean"} <= names for names in found)


# -- installing ------------------------------------------------------------------------------


def test_nothing_went_wrong(recorded: Recorded) -> None:
    """No mistake was caught, and Keras is among the frameworks that are hooked."""
    assert {} == recorded.facts["health"]["errors"]
    assert "keras" in recorded.facts["health"]["frameworks_installed"]


def test_a_mistake_of_ours(recorded: Recorded) -> None:
    """When our own code fails the fit goes on, and the mistake is counted."""
    assert 2 == recorded.facts["epochs_with_mistakes"]
    assert {"keras hooks: RuntimeError": 6} == recorded.facts["mistakes"]


def test_originals_are_restored(recorded: Recorded) -> None:
    """After a shutdown Keras has its methods back; one of ours that was kept does nothing."""
    assert 2 == recorded.facts["epochs_of_held_fit"]
    assert any(recorded.facts["patched"])
    assert all(recorded.facts["same"])
    assert 3 == recorded.facts["epochs_with_shutdown"]


def test_a_fit_that_another_library_wraps(recorded: Recorded) -> None:
    """Arguments are passed on as the program passes them: by position or by name."""
    assert 2 == recorded.facts["epochs_of_wrapped_fit"]


# -- imports ---------------------------------------------------------------------------------

PROGRAM = """
import json, sys
import numpy as np
{profile}
import keras
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
{shutdown}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def test_no_framework_is_imported(scripts: Scripts) -> None:
    """A program that trains with Keras has the frameworks that it has without a profiler."""
    found = []
    for profile, shutdown in (("", ""), ("import cirron as ci; ci.profile()", "ci.shutdown()")):
        body = PROGRAM.format(profile=profile, shutdown=shutdown)
        ended = scripts.run(body, timeout_s=120, KERAS_BACKEND="jax")
        assert 0 == ended.status, ended.err
        found.append(set(json.loads(ended.out)) & {*hooks.PRECEDENCE, "flax", "pandas"})

    plain, profiled = found
    assert {"jax", "keras"} <= plain
    assert plain == profiled


@pytest.mark.heavy
def test_tf_keras(scripts: Scripts) -> None:
    """`tf.keras` is Keras; whoever asks for TensorFlow by name gets its hooks, and no others."""
    pytest.importorskip("tensorflow")
    ended = scripts.run(
        """
        import cirron as ci
        ci.profile(frameworks=["tensorflow"])
        import numpy as np
        import tensorflow as tf
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        rows = tf.data.Dataset.from_tensor_slices((np.ones((4, 2)), np.ones((4, 1)))).batch(2)
        model.fit(rows, epochs=2, verbose=0)
        print(*ci.health()["frameworks_installed"])
        """,
        timeout_s=120,
        KERAS_BACKEND="tensorflow",
        TF_CPP_MIN_LOG_LEVEL="3",
    )

    assert 0 == ended.status, ended.err
    assert "keras" == ended.out.strip()
    assert [0, 1] == [span.index for span in scripts.spans("epoch")]
    assert [0, 1, 0, 1] == [span.index for span in scripts.spans("batch")]


@pytest.mark.heavy
def test_tensorflow_that_waits_for_its_data(scripts: Scripts) -> None:
    """The steps are compiled, with the fetch inside: the thread that loads tells the time."""
    pytest.importorskip("tensorflow")
    ended = scripts.run(
        """
        import time
        import cirron as ci
        ci.profile()
        import keras
        import numpy as np

        class Slow(keras.utils.PyDataset):
            def __len__(self):
                return 30
            def __getitem__(self, at):
                time.sleep(0.02)
                return np.ones((4, 2)), np.ones((4, 1))

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(Slow(), epochs=2, verbose=0)
        """,
        timeout_s=120,
        KERAS_BACKEND="tensorflow",
        TF_CPP_MIN_LOG_LEVEL="3",
    )

    assert 0 == ended.status, ended.err
    verdict = ci.open(scripts.home).report().verdict
    assert "input-bound" == verdict.kind
    assert "PyDataset(workers=" in verdict.advice
