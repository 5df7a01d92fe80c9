"""Pure parts of benchmarks: the cost model of adding up gradients, and the generated clicks."""
