"""Everything that needs NVIDIA's packages: TensorRT and TensorRT-RTX builds, and the loop that runs on a GPU."""
