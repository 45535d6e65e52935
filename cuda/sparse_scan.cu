// Sums over the paths of a sparse graph, one step of time after another. Scores [T,N,C,nz] of the edges; edge j of
// state c comes from state idx[c,j], a negative one is no edge. Grid: N blocks, a block a sequence, which stops at its
// own length; the states are striped over its threads, so any number of threads serves any number of states.
// Forward (BACKWARD 0): alphas [T+1,N,C], the first of which is given, the others written up to the sequence's length.
// Backward (BACKWARD 1): `state` [N,C], the gradient of the last alphas, becomes that of the first; d_scores [T,N,C,nz]
// is written throughout. What leaves state a is edge[start[a]], ..., edge[start[a+1]-1], each a position c nz + j.
// Also fixed when compiled: REAL (float, double) and SEMIRING (Log, Max).
// Idea: forward-backward algorithm, Baum 1972; Viterbi 1967.
#define FORCED __device__ __forceinline__
typedef REAL real;

FORCED real lowest() { return -__int_as_float(0x7f800000); }
FORCED real not_a_number() { return __int_as_float(0x7fc00000); }
FORCED float power(float x) { return expf(x); }
FORCED double power(double x) { return exp(x); }
FORCED float logarithm(float x) { return logf(x); }
FORCED double logarithm(double x) { return log(x); }

// The sum of a state's edges, in two passes: `look` at all, then `add` all. Its derivative is a `share` for each.
struct Log {
  real top = lowest(), total = 0;
  FORCED void look(real x, int) { if (x > top) top = x; }
  FORCED real base() const { return top == lowest() ? 0 : top; }
  FORCED void add(real x) { total += power(x - base()); }
  FORCED real value() const { return base() + logarithm(total); }
  FORCED real share(real x, int) const { return total == 0 ? 0 : power(x - base()) / total; }  // no path, no gradient
};
struct Max {
  real top = lowest();
  int first = -1;  // of the maximal edges; none where no path arrives
  FORCED void look(real x, int j) { if (x > top || (x != x && top == top)) top = x, first = j; }
  FORCED void add(real) {}
  FORCED real value() const { return top; }
  FORCED real share(real, int j) const { return j == first; }
};

// The edges that arrive at one state, with what stands before them.
struct Arriving {
  const real *before, *scores;
  const int* idx;
  int C, nz;
  FORCED real operator()(int j) const {  // a state that does not exist is not read, and makes the sequence NaN
    const int source = idx[j];
    return source >= C ? not_a_number() : source < 0 ? lowest() : before[source] + scores[j];
  }
  FORCED SEMIRING sum() const {
    SEMIRING s;
    for (int j = 0; j < nz; j++) s.look((*this)(j), j);
    for (int j = 0; j < nz; j++) s.add((*this)(j));
    return s;
  }
};

extern "C" __global__ void __launch_bounds__(1024) sparse_scan(
    const real* scores, const int* idx, const long long* lengths,  // [T,N,C,nz], [C,nz], [N] or null: all T
    real* alphas,  // [T+1,N,C]; not const, not restrict: a step reads what other threads wrote in the one before
    const long long* start, const long long* edge, real* state, real* d_scores,  // [C+1], [C nz], [N,C], [T,N,C,nz]
    int T, int C, int nz) {
  const long long n = blockIdx.x, N = gridDim.x, row = (long long)C * nz;
  const long long wanted = lengths ? lengths[n] : T;
  const int length = wanted < 0 ? 0 : wanted > T ? T : (int)wanted;
  const auto arriving = [&](long long t, int c) {
    const long long first = (long long)c * nz;
    return Arriving{alphas + (t * N + n) * C, scores + (t * N + n) * row + first, idx + first, C, nz};
  };
#if BACKWARD
  for (long long t = T - 1; t >= length; t--)
    for (long long e = threadIdx.x; e < row; e += blockDim.x) d_scores[(t * N + n) * row + e] = 0;
  real* mine = state + n * C;  // a state's entry is read and written by one thread only
  for (long long t = length - 1; t >= 0; t--) {
    real* d = d_scores + (t * N + n) * row;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
      const Arriving in = arriving(t, c);
      const SEMIRING s = in.sum();
      for (int j = 0; j < nz; j++) d[(long long)c * nz + j] = mine[c] * s.share(in(j), j);
    }
    __syncthreads();
    for (int a = threadIdx.x; a < C; a += blockDim.x) {
      real total = 0;
      for (long long k = start[a]; k < start[a + 1]; k++) total += d[edge[k]];
      mine[a] = total;
    }
  }
#else
  for (long long t = 0; t < length; t++) {
    for (int c = threadIdx.x; c < C; c += blockDim.x) alphas[((t + 1) * N + n) * C + c] = arriving(t, c).sum().value();
    __syncthreads();
  }
#endif
}
