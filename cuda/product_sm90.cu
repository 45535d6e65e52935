// Scores z = x wᵀ, x [N,H], w [V,H], in tiles that no memory holds. score_statistics: of each row of a tile its maximum
// m and Σ e^(z - m) leave the registers, stats [tiles of V,N]. exponentials: 2^(z log2_scale - offset of the row) do,
// rounded, e [N,V] with rows of `pitch`, and their sum before they are rounded, sums [tiles of V,N]. The target's score
// is neither in a maximum nor in a sum, e is 0 there, and targets_z [N] has it: a confident prediction keeps the digits
// of what the others share. A row whose offset is inf is 0. score_gradients: the same times a coefficient of the row,
// without sums. Sums are fp32. A launch ends at once where `wanted` points to 0.
// Compiled with BIASED, a number of each class is added to its scores, bias [V, and on to whole tiles]. With CAPPED,
// exponentials takes 2^(log2_cap tanh(z log2_scale / log2_cap) - offset); sums are of these, and e is these times
// tanh's slope, 1 - tanh². score_statistics leaves maxima and sums of scores that are not capped.
// Compiled with EIGHT, score_statistics and exponentials take x and w in FP8: H counts pairs of their numbers, which are
// copied as one of 16 bits, and each row's scores are multiplied by a number, units [N].
// For a row's largest scores, score_maxima leaves the maximum of every 64 classes beside the statistics, maxima [narrow
// tiles of V, on to whole tiles, N]: what is found there is computed again, the less the narrower.
// For the entropy of a row, score_moments leaves Σ e^(z - m) (z - m) of each tile beside its statistics, moments
// [tiles of V,N], and entropy_gradients has a coefficient that falls with the exponent t: coef + slope (mean - t /
// log2_scale). A moment's terms have one sign, since m is the tile's maximum, so no digits cancel.
// A block is three warp groups: one thread of the first copies tiles of x and w, 64 features at a time, to a ring of
// STAGES; the other two multiply. They share each tile, of 128 tokens and 256 classes, or IN_TURN take one each, of 128
// tokens and 192 classes: then the statistics of one run beside the products of the other. A block stays and takes tile
// after tile, so that copies run beside statistics. CLUSTER blocks, 1 or 2, have the same classes and other tokens:
// each copies a share of w's tile to all of them. GROUP clusters' tokens are walked together through all classes, so
// that their x and the classes' w stay in L2. Grid: a multiple of CLUSTER. Also fixed when compiled: HALF, fp16 in
// place of bf16; EIGHT, BIASED and CAPPED, 0 or 1. Idea: CUTLASS's persistent, warp-specialised products.
#include "common.cuh"
#include "hopper.cuh"

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define SHARED(type, name)                        \
  extern __shared__ __align__(1024) char memory[]; \
  type& name = *(type*)memory
#define BY_VALUE const __grid_constant__
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
#endif

constexpr int TOKENS = 128, CLASSES = IN_TURN ? 192 : 256, FEATURES = 64;  // of a tile; 64 features are 128 bytes
constexpr Numbers OPERANDS = EIGHT ? E4M3 : HALF ? F16 : BF16;
constexpr int NARROW = 64;  // classes, of a maximum of score_maxima
constexpr int BLOCKS = IN_TURN ? 2 : 1, HELD = CLASSES / 2;  // of 64 tokens a group; scores of a block a thread
constexpr int PART = CLASSES / CLUSTER;  // of w's tile, that a block copies
static_assert(STAGES >= 2, "a stage is given back when the products of the next one were issued");
struct Ring {
  u16 x[STAGES][TOKENS * FEATURES], w[STAGES][CLASSES * FEATURES];
  u64 full[STAGES], empty[STAGES];
};

// Which stage of the ring is next, and the parity of its phase.
struct Place {
  int stage = 0;
  u32 parity = 0;
  INLINE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  INLINE void skip(int stages) {
    stage += stages, parity ^= stage / STAGES & 1, stage %= STAGES;
  }
};

// The tile of a block: its first token and class. Clusters take tiles in turn; in a group, tokens change first.
struct Tile {
  int token, type;
  INLINE Tile(int number, int N, int V, int rank) {
    const int pairs = (N + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER), columns = (V + CLASSES - 1) / CLASSES;
    const int first = number / (GROUP * columns) * GROUP, inside = number - first * columns;
    const int rows = min(GROUP, pairs - first);
    token = ((first + inside % rows) * CLUSTER + rank) * TOKENS, type = inside / rows * CLASSES;
  }
};
INLINE int tiles_of_clusters(int N, int V) {
  return ((N + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER)) * ((V + CLASSES - 1) / CLASSES);
}

// One thread: every tile's features, as stages get empty.
INLINE void copy_tiles(Ring& ring, const TensorMap* x_map, const TensorMap* w_map, int N, int V, int H) {
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  Place p;
  for (int number = blockIdx.x / CLUSTER; number < tiles_of_clusters(N, V); number += gridDim.x / CLUSTER) {
    const Tile tile(number, N, V, rank);
    for (int h = 0; h < H; h += FEATURES, p.next()) {
      u64* const full = &ring.full[p.stage];
      wait_for(&ring.empty[p.stage], p.parity ^ 1);
      arrive_and_expect(full, (TOKENS + CLASSES) * FEATURES * 2);
      copy_box(ring.x[p.stage], x_map, h, tile.token, full);
      u16* const w = ring.w[p.stage] + rank * PART * FEATURES;
      if (CLUSTER == 1) copy_box(w, w_map, h, tile.type, full);
      else copy_box_to(w, w_map, h, tile.type + rank * PART, full, (1 << CLUSTER) - 1);
    }
  }
}

// One warp group: the scores of its tokens. A stage is given back when the products of the next one were issued. Groups
// in turn wait for each other but before the block's first tile and after its last.
INLINE void give_back(Ring& ring, int stage, int thread) {
  if (thread < CLUSTER) arrive_at(&ring.empty[stage], thread);
}
INLINE int block_of(int b, int group) { return IN_TURN ? b : group; }
INLINE void multiply(Ring& ring, Place& p, float (&z)[BLOCKS][HELD], int group, int thread, int H, bool first,
                     bool last) {
  if (IN_TURN && !first) wait_for_turn(group);  // a stage's parity would be that of two phases before, too
  int before = -1;
  for (int h = 0; h < H; h += FEATURES, p.next()) {
    wait_for(&ring.full[p.stage], p.parity);
    begin_products();
    UNROLL
    for (int k = 0; k < FEATURES; k += 16)
      UNROLL
      for (int b = 0; b < BLOCKS; b++)
        product<OPERANDS>(z[b], descriptor_of(ring.x[p.stage] + block_of(b, group) * 64 * FEATURES, 2 * k),
                      descriptor_of(ring.w[p.stage], 2 * k), h + k > 0);
    end_of_group();
    wait_products<1>();
    if (before >= 0) give_back(ring, before, thread);
    before = p.stage;
  }
  if (IN_TURN && !last) give_turn(1 - group);
  wait_products<0>();
  give_back(ring, before, thread);
}

// What a thread holds of 64 tokens: half of HELD scores of each of two rows; four neighbouring threads hold a row.
INLINE int column_of(int i, int thread) { return 8 * (i / 4) + 2 * (thread % 4) + i % 2; }
INLINE int row_of(int thread) { return thread / 32 * 16 + thread % 32 / 4; }  // the other is 8 below
template <class F> INLINE float of_row(float v, F both) {
  v = both(v, __shfl_xor_sync(~0u, v, 1));
  return both(v, __shfl_xor_sync(~0u, v, 2));
}
INLINE float max_of_row(const float (&z)[HELD], int r, int first = 0, int last = HELD) {
  float m = -infinity();
  UNROLL
  for (int i = first; i < last; i++)
    if (i % 4 / 2 == r) m = fmaxf(m, z[i]);
  return of_row(m, [](float a, float b) { return fmaxf(a, b); });
}
INLINE float sum_of_row(const float (&z)[HELD], int r) {
  float s = 0.0f;
  UNROLL
  for (int i = 0; i < HELD; i++)
    if (i % 4 / 2 == r) s += z[i];
  return of_row(s, [](float a, float b) { return a + b; });
}

INLINE float at_least(float z, float least) { return z < least ? least : z; }  // no number stays none
INLINE float above_zeros(float t) { return fmaxf(t, -200.0f); }  // 2^t is 0 below, and 0 · -inf would be no number

// What leaves a tile. The scores of classes that do not count are -inf.
struct Epilogue {
  float* targets_z;
  const i64* targets;
  int N, V;
  const float* bias;  // where BIASED
  const float* units;  // where EIGHT

  INLINE void shift(float (&z)[HELD], Tile tile, int thread) const {
    UNROLL
    for (int i = 0; BIASED && i < HELD; i += 4) {
      const float2 b = *(const float2*)(bias + tile.type + column_of(i, thread));
      z[i] += b.x, z[i + 1] += b.y, z[i + 2] += b.x, z[i + 3] += b.y;
    }
    UNROLL
    for (int i = 0; CAPPED && i < HELD; i++) z[i] = at_least(z[i], -1e38f);  // -inf: a class that does not count
  }
  INLINE void hide(float (&z)[HELD], Tile tile, int thread) const {
    if (tile.type + CLASSES <= V) return;
    UNROLL
    for (int i = 0; i < HELD; i++)
      if (tile.type + column_of(i, thread) >= V) z[i] = -infinity();
  }
  INLINE float unit_of(int token) const { return EIGHT && token < N ? units[token] : 1.0f; }
  INLINE int target_of(int token) const {  // a class, or below 0
    const i64 target = token < N ? targets[token] : -1;
    return target < V ? (int)max(target, -1ll) : -1;
  }
  INLINE void take_target(float (&z)[HELD], Tile tile, int r, int token, int target, int thread) const {
    const int column = target - tile.type;
    if (target < 0 || column < 0 || column >= CLASSES || column / 2 % 4 != thread % 4) return;
    float found = 0.0f;
    UNROLL
    for (int i = 0; i < HELD; i++)
      if (i % 4 / 2 == r && column_of(i, thread) == column) found = z[i], z[i] = -infinity();
    targets_z[token] = found;
  }
  template <class T> INLINE void put(T* to, T found, int part, int token, int thread) const {
    if (thread % 4 == 0 && token < N) to[(i64)part * N + token] = found;
  }
};
enum Beside { NOTHING, MOMENTS, MAXIMA };
template <Beside BESIDE> struct Statistics : Epilogue {
  float2* stats;
  float* beside;  // moments, or maxima

  struct OfRow { int target; float unit; };  // what is loaded before the products, and needed after them
  INLINE OfRow load(int token) const { return {target_of(token), unit_of(token)}; }
  INLINE float put_maxima(const float (&z)[HELD], Tile tile, int r, int token, int thread) const {  // the largest of them
    float m = -infinity();
    UNROLL
    for (int i = 0; i < CLASSES / NARROW; i++) {  // NARROW classes of two rows: NARROW / 2 scores of a thread
      const float of_part = max_of_row(z, r, i * (NARROW / 2), (i + 1) * (NARROW / 2));
      put(beside, of_part, tile.type / NARROW + i, token, thread);
      m = fmaxf(m, of_part);
    }
    return m;
  }
  INLINE void finish(float (&z)[HELD], Tile tile, int r, int token, OfRow, int thread) const {
    const float m = BESIDE == MAXIMA ? put_maxima(z, tile, r, token, thread) : max_of_row(z, r);
    const float shift = zero_if_neg_inf(m) * LOG2E;
    float moment = 0.0f;
    UNROLL
    for (int i = 0; i < HELD; i++)
      if (i % 4 / 2 == r) {
        const float t = fmaf(z[i], LOG2E, -shift);
        z[i] = exp2_approx(t);
        if (BESIDE == MOMENTS) moment = fmaf(z[i], above_zeros(t), moment);
      }
    put(stats, make_float2(m, sum_of_row(z, r)), tile.type / CLASSES, token, thread);
    if (BESIDE != MOMENTS) return;
    put(beside, of_row(moment, [](float a, float b) { return a + b; }) / LOG2E, tile.type / CLASSES, token, thread);
  }
};

// Four threads have two neighbouring classes of each of four groups of eight: afterwards each has one group.
INLINE void swap_words(u32 (&words)[4], int bit, int thread) {
  UNROLL
  for (int i = 0; i < 4; i++) {
    if (i & bit) continue;
    const bool upper = thread & bit;
    const u32 other = __shfl_xor_sync(~0u, upper ? words[i] : words[i ^ bit], bit);
    (upper ? words[i] : words[i ^ bit]) = other;
  }
}
// (tanh x, 1 - tanh² x) from u = 2 x / ln 2; near 0 by its series, which loses no digits.
INLINE float2 tanh_and_slope(float u) {
  const float e = exp2_approx(-fabsf(u)), r = reciprocal_approx(1.0f + e), x = u * (0.5f / LOG2E), x2 = x * x;
  const float series = x * fmaf(x2, fmaf(x2, fmaf(x2, -17 / 315.0f, 2 / 15.0f), -1 / 3.0f), 1.0f);
  return make_float2(x2 < 0.01f ? series : copysignf((1.0f - e) * r, u), 4.0f * e * r * r);
}
enum Kind { SUMMED, WEIGHED, ENTROPIC };
template <Kind KIND> struct Exponentials : Epilogue {
  const float *offsets, *coefs, *slopes, *means;  // one, two, and four of them, by kind
  u16* e;
  float* sums;  // where SUMMED
  i64 pitch;
  float log2_scale;
  float log2_cap;  // where SUMMED and CAPPED

  struct OfRow { int target; float unit, offset, coef, slope; };
  INLINE OfRow load(int token) const {
    const bool there = token < N;
    OfRow row{target_of(token), unit_of(token), there ? offsets[token] : 0.0f, 1.0f, 0.0f};
    if (KIND != SUMMED && there) row.coef = coefs[token];
    if (KIND != ENTROPIC || !there) return row;
    row.coef = fmaf(slopes[token], means[token], row.coef), row.slope = slopes[token] / log2_scale;
    return row;
  }
  INLINE float leaving(float z, OfRow row) const {
    const float t = fmaf(z, log2_scale, -row.offset), exponential = exp2_approx(t);
    if (KIND == SUMMED) return exponential;
    return exponential * (KIND == WEIGHED ? row.coef : fmaf(-row.slope, above_zeros(t), row.coef));
  }
  INLINE float leave_capped(float (&z)[HELD], int r, OfRow row) const {  // their sum, before the slopes
    const float by = 2.0f * LOG2E * (log2_scale / log2_cap);
    float s = 0.0f;
    UNROLL
    for (int i = 0; i < HELD; i++) {
      if (i % 4 / 2 != r) continue;
      const float2 t = tanh_and_slope(z[i] * by);
      const float e = z[i] == -infinity() ? 0.0f : exp2_approx(fmaf(t.x, log2_cap, -row.offset));
      s += e, z[i] = e * t.y;
    }
    return of_row(s, [](float a, float b) { return a + b; });
  }
  INLINE void finish(float (&z)[HELD], Tile tile, int r, int token, OfRow row, int thread) const {
    float s = 0.0f;
    if (CAPPED && KIND == SUMMED) s = leave_capped(z, r, row);
    UNROLL
    for (int i = 0; !(CAPPED && KIND == SUMMED) && i < HELD; i++)
      if (i % 4 / 2 == r) z[i] = leaving(z[i], row);
    if (row.offset == infinity()) {  // a token that does not count, whatever its scores are
      UNROLL
      for (int i = 0; i < HELD; i++)
        if (i % 4 / 2 == r) z[i] = 0.0f;
      s = 0.0f;
    }
    if (KIND == SUMMED) put(sums, CAPPED ? s : sum_of_row(z, r), tile.type / CLASSES, token, thread);
    UNROLL
    for (int g = 0; g < CLASSES / 32; g++) {  // groups of 32 classes: 64 bytes of a row from four threads
      u32 words[4];
      UNROLL
      for (int k = 0; k < 4; k++) {
        const float* const two = &z[16 * g + 4 * k + 2 * r];
        words[k] = rounded_pair<HALF>(two[0], two[1]);
      }
      swap_words(words, 1, thread), swap_words(words, 2, thread);
      store(words, token, tile.type + 32 * g + 8 * (thread % 4));
    }
  }
  INLINE void store(const u32 (&words)[4], int token, int type) const {
    if (token >= N) return;
    u16* const to = e + token * pitch + type;
    if (type + 8 <= V) return store_words(to, words);
    UNROLL
    for (int i = 0; i < 8; i++)
      if (type + i < V) to[i] = words[i / 2] >> i % 2 * 16;
  }
};
template <class Out> INLINE void finish(const Out& out, float (&z)[HELD], Tile tile, int first,
                                        const typename Out::OfRow (&rows)[2], int thread) {
  UNROLL
  for (int i = 0; EIGHT && i < HELD; i++) z[i] *= rows[i % 4 / 2].unit;
  out.shift(z, tile, thread), out.hide(z, tile, thread);
  UNROLL
  for (int r = 0; r < 2; r++) out.take_target(z, tile, r, first + 8 * r, rows[r].target, thread);
  UNROLL
  for (int r = 0; r < 2; r++) out.finish(z, tile, r, first + 8 * r, rows[r], thread);
}
template <class Out> INLINE void multiply_tiles(Ring& ring, const Out& out, int group, int thread, int H) {
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, stages = (H + FEATURES - 1) / FEATURES;
  const int tiles = tiles_of_clusters(out.N, out.V), step = gridDim.x / CLUSTER;
  Place p;
  int turn = 1;
  for (int number = blockIdx.x / CLUSTER; number < tiles; number += step) {
    if (IN_TURN && (turn ^= 1) != group) { p.skip(stages); continue; }
    const Tile tile(number, out.N, out.V, rank);
    const int first = tile.token + row_of(thread);
    typename Out::OfRow rows[BLOCKS][2];
    UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) rows[i / 2][i % 2] = out.load(first + 64 * block_of(i / 2, group) + i % 2 * 8);
    float z[BLOCKS][HELD];
    multiply(ring, p, z, group, thread, H, number < step, number + step >= tiles);
    UNROLL
    for (int b = 0; b < BLOCKS; b++) finish(out, z[b], tile, first + 64 * block_of(b, group), rows[b], thread);
  }
}
template <class Out> INLINE void run(const TensorMap* x_map, const TensorMap* w_map, const Out& out, int H,
                                     const int* wanted) {
  SHARED(Ring, ring);
  if (wanted && !*wanted) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init_barrier(&ring.full[i], 1), init_barrier(&ring.empty[i], 2 / BLOCKS * CLUSTER);
    publish_barriers();
  }
  __syncwarp(), sync_cluster();
  const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0), thread = threadIdx.x % 128;  // one for a warp
  if (group == 0) {
    give_registers<IN_TURN ? 24 : 40>();
    if (thread == 0) copy_tiles(ring, x_map, w_map, out.N, out.V, H);
  } else {
    take_registers<IN_TURN ? 240 : 232>();
    multiply_tiles(ring, out, group - 1, thread, H);
  }
  __syncwarp(), sync_cluster();  // no block leaves while another one's barrier or copy may still reach it
}

extern "C" __global__ void SHAPE score_statistics(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, float2* stats, float* targets_z,
    const int* wanted, const float* bias, const float* units, int N, int V, int H) {
  run(&x_map, &w_map, Statistics<NOTHING>{{targets_z, targets, N, V, bias, units}, stats}, H, wanted);
}
extern "C" __global__ void SHAPE score_moments(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, float2* stats, float* moments,
    float* targets_z, int N, int V, int H) {
  run(&x_map, &w_map, Statistics<MOMENTS>{{targets_z, targets, N, V}, stats, moments}, H, nullptr);
}
extern "C" __global__ void SHAPE score_maxima(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, float2* stats, float* maxima,
    float* targets_z, int N, int V, int H) {
  run(&x_map, &w_map, Statistics<MAXIMA>{{targets_z, targets, N, V}, stats, maxima}, H, nullptr);
}
extern "C" __global__ void SHAPE exponentials(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, const float* offsets, u16* e, float* sums,
    float* targets_z, const int* wanted, const float* bias, const float* units, int N, int V, int H, i64 pitch,
    float log2_scale, float log2_cap) {
  const Epilogue base{targets_z, targets, N, V, bias, units};
  const Exponentials<SUMMED> out{base, offsets, nullptr, nullptr, nullptr, e, sums, pitch, log2_scale, log2_cap};
  run(&x_map, &w_map, out, H, wanted);
}
extern "C" __global__ void SHAPE score_gradients(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, const float* offsets, const float* coefs,
    u16* e, float* targets_z, const float* bias, int N, int V, int H, i64 pitch, float log2_scale) {
  const Epilogue base{targets_z, targets, N, V, bias};
  const Exponentials<WEIGHED> out{base, offsets, coefs, nullptr, nullptr, e, nullptr, pitch, log2_scale};
  run(&x_map, &w_map, out, H, nullptr);
}
extern "C" __global__ void SHAPE entropy_gradients(
    BY_VALUE TensorMap x_map, BY_VALUE TensorMap w_map, const i64* targets, const float* offsets, const float* coefs,
    const float* slopes, const float* means, u16* e, float* targets_z, int N, int V, int H, i64 pitch,
    float log2_scale) {
  const Epilogue base{targets_z, targets, N, V};
  const Exponentials<ENTROPIC> out{base, offsets, coefs, slopes, means, e, nullptr, pitch, log2_scale};
  run(&x_map, &w_map, out, H, nullptr);
}
