"""The steps, a module each; every one has a function `run` that takes a `benchmarks.gpu.step.Run`."""
