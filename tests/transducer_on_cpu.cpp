// The kernel of transducer.cu for a CPU, with its arguments as on a GPU behind (grid, threads, seed).
#include "cuda_on_cpu.h"
#include "transducer.cu"

extern "C" void run_transducer_lattice(int grid, int threads, int seed, const float* blank, const float* label, const i64* starts, const i64* frames,
                                       const i64* labels, float* log_z, float* blank_flow, float* label_flow) {
  launch(grid, threads, 1, [=] { transducer_lattice(blank, label, starts, frames, labels, log_z, blank_flow, label_flow); }, seed);
}
