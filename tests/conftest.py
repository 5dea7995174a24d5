"""For every test: eight fake CPU devices, one cache of compiled programs, and no time limit on examples."""

import os
import tempfile

from hypothesis import settings

FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Half the compile time; the program that XLA hands to LLVM, and so every collective, stays the same.
    "--xla_backend_optimization_level": "0",
    # On a loaded machine a fake device can be late for a collective; the default of 40 s then aborts the process.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
}
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *(f"{name}={value}" for name, value in FLAGS.items())]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests, their processes and the runs that they start share compiled programs with each other, not with the user.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="jaxpar-tests-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name

# JAX reads the platform when it is imported.
from jaxpar.runtime.compiled import keep_compiled_programs  # noqa: E402

keep_compiled_programs("auto", run_dir=None, num_processes=1, on_cpu=True)

# A loaded machine is slow, and no property is about time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
