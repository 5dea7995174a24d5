"""Start-up of processes and devices, interruption, memory and the run lock. Import its modules: some import no JAX."""
