"""GPUs: attention and writes by Triton's kernels, over the cells where they lie."""
