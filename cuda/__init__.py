"""CUDA C++ sources, one idea a file, read with `importlib.resources`."""
