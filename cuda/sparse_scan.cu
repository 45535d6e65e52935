// Sums over the paths of a sparse graph, one step of time after another. Scores [T,N,C,nz] of the edges; edge j of
// state c comes from state idx[c,j], a negative one is no edge. Grid: N blocks, a block a sequence, which stops at its
// own length; the states are striped over its threads, so any number of threads serves any number of states.
// Forward (BACKWARD 0): alphas [T+1,N,C], the first of which is given, the others written up to the sequence's length.
// Backward (BACKWARD 1): `state` [N,C], the gradient of the last alphas, becomes that of the first; d_scores [T,N,C,nz]
// is written throughout. What leaves state a is edge[start[a]], ..., edge[start[a+1]-1], each a position c nz + j.
// Also fixed when compiled: REAL (float, double) and SEMIRING (Log, Max).
// Idea: forward-backward algorithm, Baum 1972; Viterbi 1967.
#include "common.cuh"
typedef REAL real;

INLINE float natural_exp(float x) { return expf(x); }
INLINE double natural_exp(double x) { return exp(x); }
INLINE float natural_log(float x) { return logf(x); }
INLINE double natural_log(double x) { return log(x); }

// The sum of a state's edges, in two passes: the maximum of all, then `add` all. Its derivative by an edge is `dsum`.
struct Log {
  real max = -infinity(), total = 0;
  INLINE void update_max(real x, int) { if (x > max) max = x; }
  INLINE real row_max() const { return max == -infinity() ? 0 : max; }
  INLINE void add(real x) { total += natural_exp(x - row_max()); }
  INLINE real value() const { return row_max() + natural_log(total); }
  INLINE real dsum(real x, int) const {  // no path, no gradient
    return total == 0 ? 0 : natural_exp(x - row_max()) / total;
  }
};
struct Max {
  real max = -infinity();
  int first = -1;  // of the maximal edges; none where no path arrives
  INLINE void update_max(real x, int j) { if (x > max || (x != x && max == max)) max = x, first = j; }
  INLINE void add(real) {}
  INLINE real value() const { return max; }
  INLINE real dsum(real, int j) const { return j == first; }
};

// The edges that arrive at one state, with what stands before them.
struct Arriving {
  const real *before, *scores;  // [C], [nz]
  const int* idx;  // [nz]
  int C, nz;
  INLINE real operator()(int j) const {  // a state that does not exist is not read, and makes the sequence NaN
    const int source = idx[j];
    return source >= C ? not_a_number() : source < 0 ? -infinity() : before[source] + scores[j];
  }
  INLINE SEMIRING sum() const {
    SEMIRING s;
    for (int j = 0; j < nz; j++) s.update_max((*this)(j), j);
    for (int j = 0; j < nz; j++) s.add((*this)(j));
    return s;
  }
};

extern "C" __global__ void __launch_bounds__(1024) sparse_scan(
    const real* scores, const int* idx,  // [T,N,C,nz], [C,nz]
    const i64* lengths,  // [N] or null: all T
    real* alphas,  // [T+1,N,C]; not const, not restrict: a step reads what other threads wrote in the one before
    const i64* start, const i64* edge,  // [C+1], [C nz]
    real* state, real* d_scores,  // [N,C], [T,N,C,nz]
    int T, int C, int nz) {
  const i64 n = blockIdx.x, N = gridDim.x, row = (i64)C * nz;
  const i64 wanted = lengths ? lengths[n] : T;
  const int length = wanted < 0 ? 0 : wanted > T ? T : (int)wanted;
  const auto arriving = [&](i64 t, int c) {
    const i64 first = (i64)c * nz;
    return Arriving{alphas + (t * N + n) * C, scores + (t * N + n) * row + first, idx + first, C, nz};
  };
#if BACKWARD
  for (i64 t = T - 1; t >= length; t--)
    for (i64 e = threadIdx.x; e < row; e += blockDim.x) d_scores[(t * N + n) * row + e] = 0;
  real* d_alpha = state + n * C;  // a state's entry is read and written by one thread only
  for (i64 t = length - 1; t >= 0; t--) {
    real* d = d_scores + (t * N + n) * row;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
      const Arriving in = arriving(t, c);
      const SEMIRING s = in.sum();
      for (int j = 0; j < nz; j++) d[(i64)c * nz + j] = d_alpha[c] * s.dsum(in(j), j);
    }
    __syncthreads();
    for (int a = threadIdx.x; a < C; a += blockDim.x) {
      real total = 0;
      for (i64 k = start[a]; k < start[a + 1]; k++) total += d[edge[k]];
      d_alpha[a] = total;
    }
  }
#else
  for (i64 t = 0; t < length; t++) {
    for (int c = threadIdx.x; c < C; c += blockDim.x) alphas[((t + 1) * N + n) * C + c] = arriving(t, c).sum().value();
    __syncthreads();
  }
#endif
}
