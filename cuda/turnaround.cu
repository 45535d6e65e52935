// Cross entropy and its gradient in one launch: each logit z [O,I,V] is read once from memory, and its gradient dz
// [O,I,V], which may be z, written once. Losses [M], M = O I. A row lies in the registers of a cluster, CLUSTER blocks
// of THREADS threads, VECTORS of 16 bytes each; they exchange sums through distributed shared memory. Grid: M CLUSTER.
// Also fixed when compiled: ELEMENT (bf16, f16, f32), SCORE (bare, scaled, capped), SMOOTH, UNSCALED_GRAD (the gradient
// is not divided by the denominator), ALIGNED (rows of whole vectors), and BLOCKS, how many share a multiprocessor.
// Before it `label_weights` finds the denominator, in one block; after it `scale_rows` multiplies by the upstream
// gradient, and looks first whether that is one.
// Idea: CUDA C++ programming guide, thread block clusters.
#include "common.cuh"

// A row's largest score m, which others are taken relative to: e^(z - m) is 2^(z log2_scale - scaled), rounded once.
// Beyond 2^31 the residue of that product would overflow; scores so large are equal or 128 apart, and any scale tells
// them from each other.
struct RowMax {
  float log2_scale, scaled;
  INLINE RowMax(float m)
      : log2_scale(fabsf(m) < 2147483648.0f ? LOG2E : 1.0f), scaled(m == -infinity() ? 0.0f : m * log2_scale) {}
  INLINE float exp2_diff(float z) const { return exp2_approx(fmaf(z, log2_scale, -scaled)); }
};

// How a word of 32 bits holds elements: their maxima, their values, and back.
struct bf16 {
  typedef u16 bits;
  static constexpr u32 LOWEST = 0xff80ff80u;
  static INLINE u32 max2(u32 a, u32 b) { u32 r; asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
  static INLINE void unpack(u32 w, float* v) {
    v[0] = __uint_as_float(w << 16), v[1] = __uint_as_float(w & 0xffff0000u);
  }
  static INLINE u32 pack(const float* v) {
    u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v[1]), "f"(v[0])); return r;
  }
};
struct f16 {
  typedef u16 bits;
  static constexpr u32 LOWEST = 0xfc00fc00u;
  static INLINE u32 max2(u32 a, u32 b) { u32 r; asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
  static INLINE void unpack(u32 w, float* v) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v[0]), "=f"(v[1]) : "r"(w));
  }
  static INLINE u32 pack(const float* v) {
    u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v[1]), "f"(v[0])); return r;
  }
};
struct f32 {
  typedef u32 bits;
  static constexpr u32 LOWEST = 0xff800000u;
  static INLINE u32 max2(u32 a, u32 b) { return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b))); }
  static INLINE void unpack(u32 w, float* v) { v[0] = __uint_as_float(w); }
  static INLINE u32 pack(const float* v) { return __float_as_uint(v[0]); }
};

// The score of a logit, and its slope; every score rises with its logit, so maxima may be taken before it.
struct Options { float label_smoothing, logit_scale, softcap, z_loss; };
struct bare {
  static constexpr bool BOUNDED = false;
  static INLINE float score(float logit, Options, float& slope) { return slope = 1.0f, logit; }
};
struct scaled {
  static constexpr bool BOUNDED = false;
  static INLINE float score(float logit, Options o, float& slope) {
    return slope = o.logit_scale, logit * o.logit_scale;
  }
};
struct capped {  // from e^(-2|x|): neither tanh nor its slope loses digits where tanh is near one
  static constexpr bool BOUNDED = true;
  static INLINE float score(float logit, Options o, float& slope) {
    float x = o.logit_scale / o.softcap * logit, x2 = x * x;
    float e = exp2_approx(-2 * LOG2E * fabsf(x)), r = __fdividef(1.0f, 1.0f + e);
    float series = x * (1.0f - x2 * (1.0f / 3 - x2 * (2.0f / 15 - x2 * (17.0f / 315))));
    slope = o.logit_scale * 4.0f * e * r * r;
    return o.softcap * (x2 < 0.01f ? series : copysignf((1.0f - e) * r, x));
  }
};

struct RowStats { float m, s, smooth; };  // maximum, sum of e^(z - m), sum of w (z - z_y)
struct RowCoefs {  // what multiplies p, the one-hot and the class weights in a row's gradient, and lse² in its loss
  float target, smoothing, z, softmax;
  INLINE RowCoefs(float w_y, float w_t, float w_sum, float lse, int V, Options o, float divisor) {
    const float each = w_t / divisor;  // infinite if class weights alone are tiny
    target = (1.0f - o.label_smoothing) * (w_y * w_t / divisor);
    smoothing = o.label_smoothing > 0.0f ? o.label_smoothing / V * each : 0.0f;
    z = o.z_loss > 0.0f ? o.z_loss * each : 0.0f;
    softmax = target + smoothing * w_sum + 2 * z * lse;
  }
};
struct RowGrad {  // what a row's gradient is made of
  RowMax row_max;
  float softmax_coef, smoothing_coef;
  template <class Score, bool Smooth>
  INLINE float gradient(
      float logit, int c, int V, const float* weight, Options o,  // weight [V] or null
      float target_coef = 0.0f) const {
    float slope, d = softmax_coef * row_max.exp2_diff(Score::score(logit, o, slope)) - target_coef;
    if (Smooth) d -= weight ? c >= 0 && c < V ? smoothing_coef * weight[c] : 0.0f : smoothing_coef;
    return d * slope;
  }
};

// Sixteen bytes of a row, the first of which is class c; a row may begin and end within.
template <class E, class Score, bool Smooth, bool Aligned>
struct Vector {
  typedef typename E::bits bits;
  static constexpr int PER = 4 / sizeof(bits), SIZE = 4 * PER;  // elements in a word, in all
  u32 w[4];

  static INLINE bool whole(int c, int V) { return Aligned ? c < V : c >= 0 && c + SIZE <= V; }
  static INLINE bool aligned(const bits* at) { return Aligned || (u64)at % 16 == 0; }
  static INLINE bool within(int c, int V) { return c >= 0 && c < V; }

  INLINE void load(const bits* row, int c, int V) {  // row [V]
    for (int k = 0; k < 4; k++) w[k] = E::LOWEST;
    if (whole(c, V)) {
      uint4 v = *reinterpret_cast<const uint4*>(row + c);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else if (!Aligned && c + SIZE > 0 && c < V) {
#pragma unroll
      for (int j = 0; j < SIZE; j++)
        if (within(c + j, V)) {
          const int half = j % 2 ? 0x5410 : 0x3254;  // which bytes of the word stay
          w[j / PER] = PER == 1 ? row[c + j] : __byte_perm(w[j / PER], row[c + j], half);
        }
    }
  }
  INLINE void store(bits* row, int c, int V) const {  // row [V]
    if (whole(c, V) && aligned(row + c)) __stcs(reinterpret_cast<uint4*>(row + c), make_uint4(w[0], w[1], w[2], w[3]));
    else if (!Aligned)
#pragma unroll
      for (int j = 0; j < SIZE; j++)
        if (within(c + j, V)) row[c + j] = w[j / PER] >> 16 * (j % PER);
  }
  INLINE void add(
      RowStats& stats, const RowMax& row_max, float near, int c, int V,  // scores may share an offset, as `near` has it
      const float* weight, Options o) const {  // weight [V] or null
    constexpr bool ASK = Smooth || Score::BOUNDED;  // else what is no class adds e^-inf
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
      float v[2], slope;
      E::unpack(w[j / PER], v);
      float z = Score::score(v[j % PER], o, slope);
      bool counts = !ASK || within(c + j, V);
      stats.s += counts ? row_max.exp2_diff(z) : 0.0f;
      if (Smooth && counts) stats.smooth += weight ? weight[c + j] * (z - near) : z - near;
    }
  }
  INLINE void scale(float factor) {  // zeros stay zero
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float v[2];
      E::unpack(w[k], v);
      for (int i = 0; i < PER; i++) v[i] = v[i] == 0.0f ? 0.0f : v[i] * factor;
      w[k] = E::pack(v);
    }
  }
  INLINE void forget() {  // what was computed from the words, rather than spill it
    for (int k = 0; k < 4; k++) asm volatile("" : "+r"(w[k]));
  }
  INLINE void differentiate(  // as if without a target
      int c, int V, const RowGrad& r,
      const float* weight, Options o) {  // weight [V] or null
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float v[2];
      E::unpack(w[k], v);
#pragma unroll
      for (int i = 0; i < PER; i++) v[i] = r.gradient<Score, Smooth>(v[i], c + k * PER + i, V, weight, o);
      w[k] = E::pack(v);
    }
  }
};

template <int PARTS>
INLINE RowStats joined(const RowStats* parts) {  // parts [PARTS]; by each warp for itself
  const int lane = threadIdx.x % 32;
  const RowStats part = lane < PARTS ? parts[lane] : RowStats{-infinity(), 0.0f, 0.0f};
  const float m = warp_max(part.m);
  const RowMax all(m), own(part.m);
  const float factor = all.log2_scale == own.log2_scale ? exp2_approx(own.scaled - all.scaled) : 0.0f;
  return {m, warp_sum(part.s > 0.0f || part.s != part.s ? part.s * factor : 0.0f), warp_sum(part.smooth)};
}
// Each block of a cluster writes its sums into the shared memory of all; they have all started (`turnaround` arrived).
template <int PARTS>
INLINE RowStats exchanged(const RowStats& mine, RowStats* parts, int rank) {  // parts [PARTS] of each block
  if constexpr (PARTS == 1) return mine;
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x < PARTS) {
    u32 here = (u32)__cvta_generic_to_shared(parts + rank), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(threadIdx.x));
    asm volatile("st.shared::cluster.f32 [%0], %1; st.shared::cluster.f32 [%0 + 4], %2;"
                 " st.shared::cluster.f32 [%0 + 8], %3;"
                 :: "r"(there), "f"(mine.m), "f"(mine.s), "f"(mine.smooth) : "memory");
  }
  __syncwarp();  // an aligned barrier wants whole warps
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  return joined<PARTS>(parts);
}

// Over the threads of a block, each WARPS · 32, in one order; for its first warp.
template <int WARPS>
INLINE float block_sum(float part, float* warps) {  // shared [WARPS]
  part = warp_sum(part);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < WARPS ? warps[threadIdx.x % 32] : 0.0f);
}

// What the mean divides by, the sum of token_weight weight[target] of what is not ignored; and no row is done.
constexpr int WEIGHING = 1024;  // threads
extern "C" __global__ void __launch_bounds__(WEIGHING) label_weights(
    const i64* target, const float* weight, const float* token_weight,  // [M], [V] or null, [M] or null
    float* denominator, u32* done,  // [1] or null, [1] or null
    int M, int V, int ignore_index) {
  __shared__ float warps[WEIGHING / 32];
  if (done && threadIdx.x == 0) *done = 0;
  if (!denominator) return;
  float total = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x; i < M; i += WEIGHING) {
    const i64 label = target[i];
    float counts = label != ignore_index;
    if (weight) counts *= weight[label < 0 ? 0 : label < V ? label : V - 1];
    if (token_weight) counts *= token_weight[i];
    total += counts;
  }
  total = block_sum<WEIGHING / 32>(total, warps);
  if (threadIdx.x == 0) *denominator = total;
}

#if CLUSTER > 1
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
#else
#define SHAPE __launch_bounds__(THREADS, BLOCKS)
#endif
extern "C" __global__ void SHAPE turnaround(
    const ELEMENT::bits* z, ELEMENT::bits* dz,  // [O,I,V], [O,I,V] that may be z
    const i64* target,  // [M]
    const float* weight, const float* token_weight, const float* all_weights,  // [V], [M], [1], or null
    const float* denominator, float* loss,  // [1] or null, [M]
    float* total, u32* done,  // the losses' sum, and how many rows are done, 0 before; [1] each, or null
    int M, int V, int inner,  // rows, classes, I
    int stride_o, int stride_i, int d_stride_o, int d_stride_i,  // of z and of dz, in elements
    int ignore_index, double label_smoothing, double logit_scale, double softcap, double z_loss) {
  typedef Vector<ELEMENT, SCORE, SMOOTH, ALIGNED> Vec;
  constexpr int WARPS = THREADS / 32;
  __shared__ RowStats warps[WARPS], parts[CLUSTER];
  __shared__ float shares[WARPS];
  __shared__ bool last;
  if (threadIdx.x == 0) last = false;
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  const Options o = {(float)label_smoothing, (float)logit_scale, (float)softcap, (float)z_loss};
  const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, step = THREADS * Vec::SIZE;
  const ELEMENT::bits* row_z = z + (i64)(row / inner) * stride_o + (i64)(row % inner) * stride_i;
  ELEMENT::bits* row_dz = dz + (i64)(row / inner) * d_stride_o + (i64)(row % inner) * d_stride_i;
  // elements between a multiple of 16 bytes and the row
  const int before = ALIGNED ? 0 : (u64)row_z % 16 / sizeof(*row_z);
  const int first = rank * VECTORS * step + threadIdx.x * Vec::SIZE - before;

  const i64 label = target[row];
  const bool ignored = label == ignore_index, valid = !ignored && label >= 0 && label < V;
  const float total_weight = denominator ? *denominator : 1.0f, divisor = total_weight == 0.0f ? 1.0f : total_weight;
  Vec vectors[VECTORS];
#pragma unroll
  for (int k = 0; k < VECTORS; k++) vectors[k].load(row_z, first + k * step, V);
  // the thread that holds the target's logit writes the loss, and that logit's gradient
  const int vector_y = ((int)label + before) / Vec::SIZE;
  const bool has_target = valid && vector_y % THREADS == threadIdx.x && vector_y / (THREADS * VECTORS) == rank;
  float logit_y[2];
  if (has_target) ELEMENT::unpack(row_z[label], logit_y);

  u32 largest = ELEMENT::LOWEST;
#pragma unroll
  for (int k = 0; k < VECTORS; k++)
    for (int j = 0; j < 4; j++) largest = ELEMENT::max2(largest, vectors[k].w[j]);
  float pair[2], slope;
  ELEMENT::unpack(largest, pair);
  RowStats stats = {SCORE::score(warp_max(fmaxf(pair[0], pair[Vec::PER - 1])), o, slope), 0.0f, 0.0f};
  const RowMax own(stats.m);
  float near = 0.0f;  // the target's score
  if (SMOOTH && valid) {
    float pair_y[2];
    ELEMENT::unpack(row_z[label], pair_y);
    near = SCORE::score(pair_y[0], o, slope);
    if (near == -infinity()) near = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < VECTORS; k++) vectors[k].add(stats, own, near, first + k * step, V, weight, o);
  stats.s = warp_sum(stats.s);
  if (SMOOTH) stats.smooth = warp_sum(stats.smooth);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = stats;
  __syncthreads();
  stats = exchanged<CLUSTER>(joined<WARPS>(warps), parts, rank);

  const RowMax row_max(stats.m);
  const float log_s = logf(stats.s), lse = row_max.scaled / row_max.log2_scale + log_s;
  const float w_t = token_weight ? token_weight[row] : 1.0f, w_sum = all_weights ? *all_weights : V;
  const float w_y = weight && valid ? weight[label] : 1.0f;
  const RowCoefs coefs(w_y, w_t, w_sum, lse, V, o, divisor), grad(w_y, w_t, w_sum, lse, V, o, UNSCALED_GRAD ? 1.0f : divisor);
  const RowGrad r = {row_max, grad.softmax / stats.s, grad.smoothing};
#pragma unroll
  for (int k = 0; k < VECTORS; k++) {
    const int c = first + k * step;
    if (c >= V) break;
    vectors[k].forget();
    if (valid) vectors[k].differentiate(c, V, r, weight, o);
    else for (int j = 0; j < 4; j++) vectors[k].w[j] = 0;
    vectors[k].store(row_dz, c, V);
  }
  if (has_target) {
    float d[2] = {r.gradient<SCORE, SMOOTH>(logit_y[0], (int)label, V, weight, o, grad.target), 0.0f};
    row_dz[label] = ELEMENT::pack(d);
    const float score_y = SCORE::score(logit_y[0], o, slope);
    float log_p = fmaf(score_y, row_max.log2_scale, -row_max.scaled) / row_max.log2_scale - log_s;
    if (log_p > 0.0f) log_p = 0.0f;  // a rounding may put it above, by 1e-7
    loss[row] = coefs.z * lse * lse - (coefs.smoothing * w_sum + coefs.target) * log_p - coefs.smoothing * stats.smooth;
  }
  const bool no_target = !valid && rank == 0 && threadIdx.x == 0;
  if (no_target) loss[row] = ignored ? 0.0f : not_a_number();
  if (!total) return;
  if (has_target || no_target) {
    __threadfence();  // its loss is seen before it is counted
    last = atomicAdd(done, 1u) == M - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  float share = 0.0f;
#pragma unroll 16
  for (int i = threadIdx.x; i < M; i += THREADS) share += __ldcg(loss + i);
  share = block_sum<WARPS>(share, shares);
  if (threadIdx.x == 0) *total = share;
}

// out = dz times the factor, over the denominator; nothing is done where that is dz.
constexpr int SCALING = 256;  // threads
extern "C" __global__ void __launch_bounds__(SCALING) scale_rows(
    const ELEMENT::bits* dz, ELEMENT::bits* out,  // [O,I,V], [O,I,V] that may be dz
    const float* factor, const float* denominator,  // [1], [1] or null
    int M, int V, int inner, int stride_o, int stride_i, int o_stride_o, int o_stride_i) {
  typedef Vector<ELEMENT, bare, false, ALIGNED> Vec;
  const float divisor = denominator ? *denominator : 1.0f, by = *factor / (divisor == 0.0f ? 1.0f : divisor);
  if (by == 1.0f && dz == out) return;
  for (int row = blockIdx.x; row < M; row += gridDim.x) {
    const ELEMENT::bits* from = dz + (i64)(row / inner) * stride_o + (i64)(row % inner) * stride_i;
    ELEMENT::bits* to = out + (i64)(row / inner) * o_stride_o + (i64)(row % inner) * o_stride_i;
    const int before = ALIGNED ? 0 : (u64)from % 16 / sizeof(*from);
    for (int c = threadIdx.x * Vec::SIZE - before; c < V; c += SCALING * Vec::SIZE) {
      Vec held;
      held.load(from, c, V);
      held.scale(by);
      held.store(to, c, V);
    }
  }
}
