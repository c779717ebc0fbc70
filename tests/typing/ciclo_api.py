"""What users of ciclo may write, as a type checker sees it. Checked by mypy, never run."""

from __future__ import annotations

import datetime
from typing import Any, assert_type

import ciclo

# -- time and schedules ------------------------------------------------------------------------

for elapsed, batch in ciclo.elapse(["a", "b"], stop=10):
    assert_type(elapsed, ciclo.Elapsed)
    assert_type(batch, str)
    assert_type(elapsed.steps, int)
    assert_type(elapsed >= ciclo.at(steps=10), bool)
for _, number in ciclo.elapse(range(3), initial=elapsed, batch_size_fn=lambda shapes: shapes[0][0]):
    assert_type(number, int)

every = ciclo.every(1)
assert_type(every, ciclo.Schedule)
assert_type(every(elapsed), bool)
assert_type(every & ciclo.every(time=datetime.timedelta(hours=1)) | ~ciclo.never(), ciclo.Schedule)
assert_type(every & (lambda elapsed: elapsed.steps > 3), ciclo.Schedule)
assert_type(ciclo.after(date=datetime.datetime(2030, 1, 1)).every(samples=3), ciclo.Schedule)
assert_type(ciclo.piecewise({0: ciclo.every(10), ciclo.at(time=60): every}), ciclo.Schedule)
period: ciclo.Period = ciclo.at(tokens=1_000_000)
ciclo.every("1")  # type: ignore[arg-type]
ciclo.at(seconds=3)  # type: ignore[arg-type]

# -- logs --------------------------------------------------------------------------------------

logs = ciclo.logs()
assert_type(logs, ciclo.Logs)
assert_type(logs.add_metric("loss", 0.5).add_losses(loss=0.5), ciclo.Logs)
ciclo.logs({"metrics": {"a": 1}}, losses={"b": 2})
logs.updates = {"metrics": {"a": 1}}
history = ciclo.history()
history.commit(elapsed, logs)
steps, loss = history.collect("steps", "loss")
assert_type(history.names(), list[str])
assert_type(history[0], ciclo.Logs)
assert_type(history[1:], list[ciclo.Logs])

# -- loops -------------------------------------------------------------------------------------


def step(state: int, batch: str) -> tuple[dict[str, dict[str, Any]], int]:
    return {"metrics": {"x": 1}}, state + 1


state, history, elapsed = ciclo.loop(0, "abc", {ciclo.every(1): step}, stop=ciclo.at(3))
assert_type(state, int)
assert_type(history, ciclo.History)
assert_type(elapsed, ciclo.Elapsed)

result = ciclo.loop(0, "abc", [(ciclo.every(1), [step]), (period, ciclo.keras_bar())])
assert_type(result.state, int)
assert_type(result.is_interrupted, bool)
ciclo.loop(0, 5, {})  # type: ignore[arg-type]
ciclo.loop(0, "abc", {**ciclo.keras_bar(total=3), ciclo.every(1): step})

fitted = ciclo.fit(
    0.5, ["a"], ["b"], epochs=3, callbacks=[ciclo.early_stopping("loss", period, min_delta=0.1)]
)
assert_type(fitted.state, float)
trained = ciclo.train_loop("s", [1], {ciclo.on_train_step: step}, stop=3, epoch_duration=2)
assert_type(trained.elapsed, ciclo.Elapsed)
assert_type(ciclo.test_loop(0, [1]).state, int)
assert_type(ciclo.predict_loop(0, [1]).history, ciclo.History)

# -- callbacks ---------------------------------------------------------------------------------


class Printer(ciclo.LoopCallback):
    moments = ("on_epoch_end",)

    def __loop_callback__(self, loop_state: ciclo.LoopState[int]) -> None:
        assert_type(loop_state.state, int)
        assert_type(loop_state.epoch, int | None)


class Notes(ciclo.Logger):
    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        assert_type(scalars, dict[str, float])


class Counter(ciclo.LoopCallbackBase[int]):
    def on_epoch_end(self, state: int) -> None:
        assert_type(state, int)


Notes()(elapsed, logs)
Notes().finish()
stopping = ciclo.early_stopping("loss", looks=3, restore_best_weights=True)
assert_type(stopping(elapsed, state, logs), tuple[bool, Any])
ciclo.train_loop(
    0, [1], callbacks=[Counter(), Notes(), ciclo.noop], epoch_duration=ciclo.at(time=60)
)
assert_type(ciclo.Elapsed.create(steps=3).update(32).steps, int)
assert_type(elapsed > ciclo.Period.create(steps=3), bool)
assert_type(ciclo.after(3) >> every, ciclo.Schedule)
ciclo.inner_loop("test", lambda state: ciclo.loop(state, [1], {ciclo.every(1): step}))
ciclo.loop(0, "a", {**Printer(), ciclo.always(): [ciclo.ema(0.9), ciclo.nan_guard("loss")]})

save = ciclo.checkpoint("runs/a", keep=2, monitor="loss", mode="max", keep_every_n_steps=1000)
assert_type(save.steps, list[int])
assert_type(save.best_step, int | None)
save.restore(0, step="best")
save(elapsed, state)
ciclo.loop(0, "abc", {ciclo.every(1): step, **save}, resume="runs/a")
ciclo.fit(0, ["a"], epochs=1, callbacks=[save], resume=save)
try:
    ciclo.train_loop(0, ["a"], resume="runs/a")
except ciclo.Preempted as preempted:
    assert_type(preempted.signal, int)
    assert_type(preempted.result, ciclo.Result[Any])
except ciclo.CheckpointError:
    pass

# -- states of frameworks ----------------------------------------------------------------------

torch_state = ciclo.create_torch_state(object(), losses=lambda outputs: outputs, strategy="ddp")
assert_type(torch_state.train_step([1])[0], ciclo.Logs)
assert_type(torch_state.ema_params, dict[str, Any])
assert_type(ciclo.fit(torch_state.reset_step(), [1], epochs=1).state.strategy, str)
ciclo.create_torch_state(object(), precision="bfloat16")  # type: ignore[call-arg]
