// The grid of a transducer: log Z of each sequence, and the flows of its nodes' blanks and labels, in one launch.
// Node (t, u) of a sequence is row start + t (U + 1) + u of all tables. A block has a sequence and a thread PER states u;
// it goes through the diagonals t + u = k, from the last to the first (beta, relative to the largest one of the diagonal
// before, and the share of each arc, which is left where its flow will be), and back (flows: products alone). A thread
// reads what itself has written. Between threads goes one number a diagonal: by a shuffle, between warps by shared memory.
// Scores are read two diagonals ahead. Grid: N blocks of THREADS.
// Fixed when compiled: THREADS, PER, BEST (1: of the best path alone, of equals the one with the blank), FLOWS (0: log Z alone).
#include "common.cuh"

#ifdef __CUDACC__  // what only a GPU has; a test on a CPU brings its own
#define UNROLL _Pragma("unroll")
#define SHARED(type, name) __shared__ type name
#endif
INLINE float log2_approx(float x) {
#ifdef __CUDA_ARCH__
  float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
#else
  return log2f(x);
#endif
}

constexpr int WARPS = THREADS / 32;
constexpr float LN2 = 0.6931471805599453f;

struct Arcs { float blank[PER], label[PER]; };
struct Edges { float value[2][WARPS + 1], top[2][WARPS]; };  // of every second diagonal

// The grid of a block's sequence, and the states of a thread.
struct Grid {
  i64 start; int T, U, u0;
  INLINE bool has(int k, int u) const { return u <= k && k - u < T && u <= U; }
  INLINE i64 row(int k, int u) const { return start + (i64)(k - u) * (U + 1) + u; }
  INLINE Arcs load(const float* blank, const float* label, int k, float none) const {
    Arcs found;
    UNROLL
    for (int i = 0; i < PER; i++) {
      const int u = u0 + i;
      const bool here = k >= 0 && has(k, u);
      found.blank[i] = here ? blank[row(k, u)] : none;
      found.label[i] = here && u < U ? label[row(k, u)] : none;
    }
    return found;
  }
  INLINE void store(float* blank, float* label, int k, const Arcs& a) const {
    UNROLL
    for (int i = 0; i < PER; i++)
      if (has(k, u0 + i)) blank[row(k, u0 + i)] = a.blank[i], label[row(k, u0 + i)] = a.label[i];
  }
};

struct Branch { float log_sum, first, second; };
INLINE Branch branch(float a, float b) {  // log(e^a + e^b), and the share of each
  if (a == -infinity() && b == -infinity()) return {a, 0.0f, 0.0f};
  if (BEST) return {a != a || b != b ? a + b : fmaxf(a, b), a >= b ? 1.0f : 0.0f, a >= b ? 0.0f : 1.0f};
  const float e = exp2_approx(-fabsf(a - b) * LOG2E), larger = reciprocal_approx(1.0f + e), smaller = e * larger;
  return {fmaxf(a, b) + LN2 * log2_approx(1.0f + e), a >= b ? larger : smaller, a >= b ? smaller : larger};
}

extern "C" __global__ void __launch_bounds__(THREADS) transducer_lattice(
    const float* blank, const float* label, const i64* starts, const i64* frames, const i64* labels,  // [M] twice, [N+1], [N], [N]
    float* log_z, float* blank_flow, float* label_flow) {  // [N]; [M] twice, or null
  SHARED(Edges, edges);
  const int n = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Grid g = {starts[n], (int)frames[n], (int)labels[n], (int)threadIdx.x * PER};
  const int last = g.T + g.U - 1;
  float beta[PER], top = 0.0f;
  UNROLL
  for (int i = 0; i < PER; i++) beta[i] = -infinity();
  if (WARPS > 1) {
    if (threadIdx.x <= WARPS) edges.value[0][threadIdx.x] = edges.value[1][threadIdx.x] = -infinity();
    if (threadIdx.x < WARPS) edges.top[0][threadIdx.x] = edges.top[1][threadIdx.x] = -infinity();
    __syncthreads();
  }
  double offset = 0.0;
  Arcs now = g.load(blank, label, last, -infinity()), next = g.load(blank, label, last - 1, -infinity());
  for (int k = last; k >= 0; k--) {
    const Arcs later = g.load(blank, label, k - 2, -infinity());
    const int before = (k + 1) & 1;
    float right = __shfl_down_sync(~0u, beta[0], 1);
    if (lane == 31) right = WARPS > 1 ? edges.value[before][warp + 1] : -infinity();
    float largest = -infinity();
    Arcs shares;
    UNROLL
    for (int i = 0; i < PER; i++) {
      const bool ends = g.u0 + i == g.U && k == last;
      const Branch b = branch(now.blank[i] + (ends ? 0.0f : beta[i]), now.label[i] + (i + 1 < PER ? beta[(i + 1) % PER] : right));
      shares.blank[i] = b.first, shares.label[i] = b.second;
      beta[i] = b.log_sum - top;
      largest = fmaxf(largest, beta[i]);
    }
    offset += (double)top;
    if (FLOWS) g.store(blank_flow, label_flow, k, shares);
    largest = warp_max(largest);
    if (WARPS > 1) {
      if (lane == 0) edges.value[k & 1][warp] = beta[0], edges.top[k & 1][warp] = largest;
      __syncthreads();
      UNROLL
      for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, edges.top[k & 1][w]);
    }
    top = zero_if_neg_inf(largest);
    now = next, next = later;
  }
  const double total = offset + (double)beta[0];  // of thread 0
  if (threadIdx.x == 0) log_z[n] = (float)total;
  if (!FLOWS) return;
  float flow[PER];
  UNROLL
  for (int i = 0; i < PER; i++) flow[i] = 0.0f;
  if (threadIdx.x == 0) flow[0] = beta[0] == -infinity() ? 0.0f : (float)(total - total) + 1.0f;  // 1, or NaN
  now = g.load(blank_flow, label_flow, 0, 0.0f), next = g.load(blank_flow, label_flow, 1, 0.0f);
  for (int k = 0; k <= last; k++) {
    const Arcs later = g.load(blank_flow, label_flow, k + 2, 0.0f);
    UNROLL
    for (int i = 0; i < PER; i++) now.blank[i] *= flow[i], now.label[i] *= flow[i];
    g.store(blank_flow, label_flow, k, now);
    float left = __shfl_up_sync(~0u, now.label[PER - 1], 1);
    if (WARPS > 1) {
      if (lane == 31) edges.value[k & 1][warp + 1] = now.label[PER - 1];
      __syncthreads();
    }
    if (lane == 0) left = WARPS > 1 && warp > 0 ? edges.value[k & 1][warp] : 0.0f;
    UNROLL
    for (int i = 0; i < PER; i++) flow[i] = now.blank[i] + (i ? now.label[(i + PER - 1) % PER] : left);
    now = next, next = later;
  }
}
