// Zeros in the rows of x [M,words of 16 bytes] whose label [M] is ignored; no other row is touched. Grid: M.
#include "common.cuh"

extern "C" __global__ void zero_rows(uint4* x, const i64* target, int words, i64 ignore_index) {
  if (target[blockIdx.x] != ignore_index) return;
  for (int i = threadIdx.x; i < words; i += blockDim.x) x[(i64)blockIdx.x * words + i] = make_uint4(0, 0, 0, 0);
}
