"""`import tfm_jax` costs next to nothing: what is heavy is imported when it is first used."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = {"tensorflow", "torch", "matplotlib", "tokenizers", "orbax", "grain"}

LOADED = """
import json, sys
import tfm_jax
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

# Both imports in one process: the machine's speed is then the same for the two.
SECONDS = """
import time
import flax.nnx
start = time.perf_counter()
import tfm_jax
print(time.perf_counter() - start)
"""


def run(code):
    """What a fresh interpreter prints, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy():
    loaded = set(run(LOADED))
    assert "tfm_jax" in loaded
    assert not loaded & HEAVY


def test_import_adds_at_most_300_ms_to_flax():
    seconds = []
    while len(seconds) < 3 and min(seconds, default=1.0) > 0.3:  # the least of three: other processes only add time
        seconds.append(run(SECONDS))
    assert min(seconds) <= 0.3, f"import tfm_jax took {seconds} s after flax.nnx"
