"""Eight fake CPU devices for every test, set before anything imports JAX; and no time limit on examples."""

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
# Runs that tests start share compiled programs with each other, not with those of the user.
CACHE = tempfile.TemporaryDirectory(prefix="jaxpar-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name

# A loaded machine is slow, and no property is about time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
