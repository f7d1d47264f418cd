"""One of two processes that feed the same batches to a mesh over both of them.

    python -m tests.train.fed_process ADDRESS PROCESS

It prints a JSON list of [mesh, kind, step, digests by name, tokens]; a jitted function of the whole arrays makes the
digests.
"""

import itertools
import json
import os
import sys

DEVICES = 2
KINDS = ("pairs packed", "mask buckets", "spans blocks", "classes")
STEPS = (2, 5)
# By rows over all devices; over the processes; and with the same rows in both.
MESHES = {"rows": {"data": 4}, "both": {"data": 2, "model": 2}, "columns": {"model": 4}}


def main(address: str, process: int) -> list:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    assert (len(jax.devices()), len(jax.local_devices())) == (2 * DEVICES, DEVICES)

    from tests.data import tiny
    from tfm_jax.config import Mesh
    from tfm_jax.sharding import make_mesh
    from tfm_jax.train.feed import feed

    @jax.jit
    def digests(batch):
        def digest(x):
            # wraps around modulo 2^32, so the order of the additions does not matter
            places = jax.numpy.arange(1, x.size + 1, dtype="uint32").reshape(x.shape)
            return ((x.astype("uint32") + 1) ** 2 * places).sum(dtype="uint32")

        return jax.tree.map(digest, batch)

    kinds, found = tiny.kinds(), []
    for axes, kind in itertools.product(MESHES, KINDS):
        for step, batch, tokens in feed(kinds[kind], *STEPS, mesh=make_mesh(Mesh(**MESHES[axes]))):
            values = {name: int(value) for name, value in digests(batch).items()}
            found.append([axes, kind, step, values, tokens])
    return found


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
