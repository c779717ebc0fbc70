"""A JAX training loop: compiles, device time and snapshots of a state that is a value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cirron as ci

optimizer = optax.adam(1e-2)


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["head"]["kernel"] - y) ** 2)


@jax.jit
def train_step(state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    updates, moments = optimizer.update(grads, state["moments"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "grads": grads, "moments": moments}, loss


def main() -> None:
    ci.profile()
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {"kernel": jax.random.normal(keys[0], (8, 32)) * 0.3, "bias": jnp.zeros(32)},
        "head": {"kernel": jax.random.normal(keys[1], (32, 1)) * 0.3},
    }
    state = {"params": params, "grads": params, "moments": optimizer.init(params)}
    random = np.random.default_rng(0)

    for _ in ci.epochs(range(3)):
        for _ in ci.batches(range(20)):
            x = jax.device_put(random.normal(size=(64, 8)).astype(np.float32))
            state, loss = train_step(state, x, x.sum(axis=1, keepdims=True))
            ci.mark("loss", loss)  # not waited for
        ci.watch(state)  # the state of this epoch

    ci.trace(name="compile")
    ci.shutdown()
    print(f"\nlast loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
