// CTC over a segment of the frames, so that tables of a segment are enough. The text of ctc.cu stands before this one.
//   ctc_segment  TABLES 0: alpha goes through a run of frames from its first, beta through a run from its last, side by
//                side; each leaves its states behind every so many of them.
//                TABLES 1: parts of a segment, side by side: alpha and beta begin with such states, meet in the middle,
//                cross and leave posteriors.
//   ctc_targets  the targets as classes, and as symbols of a small alphabet of their own: 0 is the blank, k + 1 a label
//                that is first at k.
//   ctc_kept     the rows of segments that are no padding, in their order.
//   ctc_finish   a row of tiles of the softmax, each relative to its own largest score, as the gradient of the loss.
// Grids: CLUSTER N blocks of THREADS a part; N (C + 255) / 256 of 256; T N / 256 of 256; rows of up to 256.
// Fixed when compiled, for the last three, beside ELEMENT (of the gradient): STAGED (1: shared memory holds all that a
// row reads, and its pitch is in packs).

#ifdef PAIRS
struct Edge {  // of a run: where its states come from, and where they are left every so many frames, `step` apart
  const State* from;  // [2,pitch]; null where the sequence itself begins, or ends
  State* to;  // [2,pitch], of the first of these frames; or null
  int pitch, every;
  i64 step;
};

// Alpha leaves its states behind every so many frames, beta before them: at multiples of `every` both.
template <int DIR>
INLINE void sweep(Lane<DIR>& states, const Edge& edge, int frames) {
  const int pieces = (frames + edge.every - 1) / edge.every;
  for (int i = 0; i < pieces; i++) {
    const int piece = DIR ? pieces - 1 - i : i, begin = piece * edge.every, end = min(begin + edge.every, frames);
    states.template run<false>(DIR ? frames - end : begin, DIR ? frames - begin : end);
    store_states(states, edge.to + piece * edge.step, edge.pitch);
  }
}

template <int DIR>
INLINE void segment(const Problem& p, const Edge& edge, Shared& sh, int rank) {
  const auto second = [&](Lane<DIR>& states, bool works, int middle) {
    const State total = states.meet(middle - 1);
    if (works && total.m > 0.0f) {
      states.divide_by(total);
      if (DIR == 0) states.posteriors_at_meeting(middle - 1);
      states.template run<true>(states.half, p.frames);
    }
  };
  by_strips<DIR>(p, sh, rank, edge.from, edge.pitch, [&](Lane<DIR>& states, bool works, int middle) {
    if (!TABLES) {
      if (works && edge.to) sweep(states, edge, p.frames);
      return;
    }
    if (works) states.template run<false>(0, states.half);
    if (STRIPS > 1) {
      if (works) store_states(states, p.middle_states(DIR), PLANE);
      return;
    }
    __syncwarp();
    sync_sequence();
    second(states, works, middle);
  });
  if constexpr (TABLES && STRIPS > 1) by_strips<DIR>(p, sh, rank, p.middle_states(DIR), PLANE, second);
}

extern "C" __global__ void SHAPE ctc_segment(
    const bits* z, const bits* beta_z,  // [N,K,C] of the run of alpha, [N,beta_K,C]; with tables one and the same
    const i64* y,  // [N,C]
    const i64* frames, const i64* lengths,  // [N], [N] of the whole sequences
    State* alpha, State* beta,  // [edges,N,2,C], or null: alpha behind every so many frames, beta before them
    State* table,  // PAIRS, then [parts,N,every+1,2,PLANE] or, without tables, [N,2,2,PLANE]
    float* post, State* log_z,  // [N,K,2,PLANE] or null, [N]
    State* strips,  // [parts, N, 2 STRIPS (frames of a part or run + 1) + 4 PLANE], or null for one strip
    int N, int C, int begin, int K, int beta_begin, int beta_K, int every) {
  SHARED(Shared, sh);
  const int sequence = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, part = sequence / N, n = sequence - part * N;
  const int t_n = (int)frames[n], l_n = (int)min(lengths[n], (i64)t_n + 1), skipped = part * every;
  if (t_n <= (TABLES ? begin + skipped : 0) || l_n > t_n) return;  // over before, or infeasible
  const bool forward = CLUSTER > 1 ? rank < DIR_BLOCKS : threadIdx.x < 32 * DIR_WARPS;
  const int run = TABLES || forward ? K : beta_K, first = (TABLES || forward ? begin : beta_begin) + skipped;
  const int most = TABLES ? min(every, K - skipped) : run, steps = (TABLES ? every : max(K, beta_K)) + 1;
  const bool last = t_n - first <= most;
  const i64 step = (i64)N * 2 * C, edge = first / every * step + (i64)n * 2 * C;
  const Problem p = {(forward ? z : beta_z) + ((i64)n * run + skipped) * C, C, 0,
                     last ? max(t_n - first, 0) : most, l_n, fminf(2e6f, 1.8e8f / t_n), y + (i64)n * C,
                     table + PAIRS + (i64)sequence * (TABLES ? steps : 2) * 2 * PLANE,
                     post + ((i64)n * K + skipped) * 2 * PLANE,
                     strips + sequence * ((i64)2 * STRIPS * steps + 4 * PLANE), steps};
  if (forward) {
    segment<0>(p, {first ? alpha + edge - step : nullptr, alpha + edge, C, every, step}, sh, rank);
  } else {
    const State* from = last || !beta ? nullptr : beta + (first + most) / every * step + (i64)n * 2 * C;
    segment<1>(p, {from, beta ? beta + edge : nullptr, C, every, step}, sh, rank);
  }
  if (!TABLES && forward && last && p.frames && rank == 0 && threadIdx.x == 0) {
    const State* end = alpha + edge + (p.frames - 1) / every * step;
    State total = load_from_afar(end + C + l_n);
    if (l_n) total = sum(total, load_from_afar(end + l_n - 1));
    total = renormalised(total);
    log_z[n] = total.m == total.m ? total : State{not_a_number(), BAD_SCORE};
  }
}
#endif

#ifdef PER
extern "C" __global__ void __launch_bounds__(256) ctc_targets(
    const i64* y, const i64* frames, const i64* lengths,  // [N,columns], [N], [N], as they came
    i64* classes, i64* symbols,  // [N,C], [N,C] with the class in the upper half of a word
    i64* sizes, State* log_z,  // [2,N] frames and lengths that can be computed with, [N]
    int columns, int T, int V, int N, int width, int C, int longest, int blank) {
  const int parts = (C + 255) / 256, n = blockIdx.x / parts, j = blockIdx.x % parts * 256 + threadIdx.x;
  const i64 t_n = frames[n], l_n = lengths[n];
  const i64* labels = y + (i64)n * columns;
  bool good = t_n >= 0 && t_n <= T && l_n >= 0 && l_n <= longest;
  if (good) for (int k = threadIdx.x; k < columns && k < l_n; k += 256) good = good && labels[k] >= 0 && labels[k] < V;
  good = __syncthreads_and(good);
  if (j < C) {
    const bool real = good && j > 0 && j <= width && j <= l_n;
    const i64 c = real ? labels[j - 1] : blank;
    int first = 0;
    if (c != blank) while (labels[first++] != c) ;
    classes[(i64)n * C + j] = c, symbols[(i64)n * C + j] = first | c << 32;  // the class goes along
  }
  if (j == 0) {  // without frames Z is 1 for an empty target, one path without a step; what is bad has no frames
    sizes[n] = good ? t_n : 0, sizes[N + n] = good ? l_n : 1;
    log_z[n] = {!good ? not_a_number() : t_n || l_n ? 0.0f : 1.0f, 0};
  }
}

extern "C" __global__ void __launch_bounds__(256) ctc_kept(
    const i64* frames, i64* kept_rows,  // [N], [sum of frames] rows of segments [K,N]
    int T, int N, int K) {
  const int row = blockIdx.x * 256 + threadIdx.x, t = row / N, n = row - t * N;
  if (t >= T || t >= frames[n]) return;
  i64 before = 0;
  for (int m = 0; m < N; m++) before += min((i64)(t + (m < n)), frames[m]);
  kept_rows[before] = row % (K * N);
}

#ifdef __CUDACC__
#define ROLLED _Pragma("unroll 1")  // a loop of few turns, whose copies would cost more than they save
#define DYNAMIC_SHARED(name) extern __shared__ Pack name[]
INLINE void copy_ahead(void* to, const void* from) {  // 16 bytes into shared memory, by no register
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
INLINE void wait_for_copies() {  // of this thread
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif

constexpr int PACK = 16 / sizeof(bits);  // elements of a load
struct alignas(16) Pack { bits v[PACK]; };
struct One { bits v[1]; };
struct RowTotal { float max, sum; u32 posteriors; };  // largest score, sum relative to it, sum of posteriors
constexpr float LOG2_SCALE = sizeof(bits) == 4 ? 1.0f : LOG2E;  // of the maxima of tiles
constexpr float TO_LOG2 = LOG2E / LOG2_SCALE;  // from these to exponents of 2

template <class V>
INLINE V* allocate(char*& free_memory, int count) {  // [count], of shared memory
  V* const block = reinterpret_cast<V*>(free_memory);
  free_memory += (count * (int)sizeof(V) + 15) / 16 * 16;
  return block;
}
template <class V>
INLINE V* staged(char*& free_memory, V* from, int count) {  // from [count]; where it is once copies are waited for
  if (!STAGED) return from;
  V* const to = allocate<V>(free_memory, count);
  constexpr int per_copy = 16 / sizeof(V);
  ROLLED
  for (int i = threadIdx.x * per_copy; i < count; i += blockDim.x * per_copy) copy_ahead((void*)(to + i), from + i);
  return to;
}

template <class V>
INLINE void scale_pack(V* pack, float factor) {  // elements of one tile
  V v = *pack;
  UNROLL
  for (int i = 0; i < (int)(sizeof(v) / sizeof(bits)); i++) v.v[i] = ELEMENT::store(ELEMENT::load(v.v[i]) * factor);
  *pack = v;
}

extern "C" __global__ void __launch_bounds__(256) ctc_finish(
    bits* dz,  // [rows,V] e^(z - the row's largest in a tile), becomes the gradient
    const float* tile_stats,  // [2,tiles,rows] largest score of a tile times LOG2_SCALE, sum relative to it
    const float* emissions, const i64* symbols,  // [N,K,C] scores of the target's classes; [N,C] of `ctc_targets`
    const i64* frames, const i64* lengths,  // [N], [N]
    const float* post, const State* log_z,  // [N,K,2,plane], [N]
    const float* g, const i64* kept_rows,  // [N] upstream; [rows] of [K,N], or null for all
    float2* stats,  // [T,N] largest score and sum
    int rows, int V, int pitch, int tiles, int shift,  // 2^shift classes a tile
    int begin, int K, int N, int C, int plane) {
  DYNAMIC_SHARED(memory);
  char* free_memory = reinterpret_cast<char*>(memory);
  const int me = threadIdx.x, threads = blockDim.x;
  const int row = rows - 1 - blockIdx.x;  // what was written last is still near
  bits *const row_dz = dz + (i64)row * pitch, *const p = staged(free_memory, row_dz, V);
  const u32 frame_row = kept_rows ? (u32)kept_rows[row] : row;
  const int t = frame_row / (u32)N, n = frame_row - t * N;
  const i64 frame = (i64)n * K + t;
  const float* label_posteriors = staged(free_memory, post + frame * 2 * plane, C);
  const float* blank_posteriors = staged(free_memory, post + (frame * 2 + 1) * plane, C);
  const float* scores = staged(free_memory, emissions + frame * C, C);
  const i64* row_symbols = staged(free_memory, symbols + (i64)n * C, C);
  const State total = load_state(log_z + n);
  const float g_n = g[n];
  const bool in_sequence = begin + t < frames[n];
  const int length = (int)lengths[n];
  u32* symbol_posteriors = allocate<u32>(free_memory, C);
  float *tile_coefs = allocate<float>(free_memory, tiles), *tile_sums = allocate<float>(free_memory, tiles);
  RowTotal& whole = *allocate<RowTotal>(free_memory, 1);
  ROLLED
  for (int j = me; j < C; j += threads) symbol_posteriors[j] = 0;
  if (me < 32) {  // the first warp joins the tiles
    const float *from_maxima = tile_stats + row, *from_sums = from_maxima + (i64)tiles * rows;
    float row_max = -infinity(), row_sum = 0.0f;
    ROLLED
    for (int j = me; j < tiles; j += 32) {
      tile_coefs[j] = from_maxima[(i64)j * rows], tile_sums[j] = from_sums[(i64)j * rows];
      row_max = fmaxf(row_max, tile_coefs[j]);
    }
    row_max = zero_if_neg_inf(Larger::warp(row_max));
    ROLLED
    for (int j = me; j < tiles; j += 32) {
      tile_coefs[j] = exp2_approx((tile_coefs[j] - row_max) * TO_LOG2);
      row_sum += tile_sums[j] * tile_coefs[j];
    }
    row_sum = Plus::warp(row_sum);
    if (me == 0) {
      whole = {row_max / LOG2_SCALE, row_sum, 0};
      stats[(i64)begin * N + frame_row] = make_float2(whole.max, row_sum);
    }
  }
  wait_for_copies();
  __syncthreads();
  const float softmax_coef = g_n / whole.sum;
  if (!in_sequence || !(total.m > 0.0f) || g_n == 0.0f) {  // no frame, no path, no gradient
    const float no_grad = total.m != total.m && total.e == BAD_SCORE && in_sequence ? total.m : 0.0f;
    ROLLED
    for (int c = me; c < V; c += threads) row_dz[c] = ELEMENT::store(no_grad);
    return;
  }
  u32 blank_sum = 0, label_sum = 0;
  ROLLED
  for (int j = me; j <= length; j += threads) {
    blank_sum += to_fixed(blank_posteriors[j]);
    if (j == 0) continue;
    const u32 v = to_fixed(label_posteriors[j - 1]);
    label_sum += v;
    atomicAdd(&symbol_posteriors[(int)row_symbols[j]], v);
  }
  __syncwarp();
  blank_sum = warp_total(blank_sum), label_sum = warp_total(label_sum);
  if (me % 32 == 0) atomicAdd(&symbol_posteriors[0], blank_sum), atomicAdd(&whole.posteriors, blank_sum + label_sum);
  const auto coef = [&](int c) { return tile_coefs[c >> shift] * softmax_coef; };
  if (STAGED || pitch % PACK == 0) {
    ROLLED
    for (int c = me * PACK; c < V; c += threads * PACK) scale_pack(reinterpret_cast<Pack*>(p + c), coef(c));
  } else
    for (int c = me; c < V; c += threads) scale_pack(reinterpret_cast<One*>(p + c), coef(c));
  __syncthreads();
  // K roundings have moved the sum of a frame's posteriors from 1, by 1e-6
  const float target_coef = g_n / (float)whole.posteriors;
  ROLLED
  for (int j = me; j < C; j += threads) {  // equal labels write the same
    const i64 symbol = row_symbols[j];  // and its class
    p[symbol >> 32] = ELEMENT::store(
        fmaf(-target_coef, (float)symbol_posteriors[(int)symbol], probability(scores[j], whole.max) * softmax_coef));
  }
  if (!STAGED) return;
  __syncthreads();
  ROLLED
  for (int c = me * PACK; c < V; c += threads * PACK)
    *reinterpret_cast<Pack*>(row_dz + c) = *reinterpret_cast<const Pack*>(p + c);
}
#endif
