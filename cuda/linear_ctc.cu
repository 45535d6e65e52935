// CTC over a segment of the frames, so that tables of a segment are enough. The text of ctc.cu stands before this one.
//   ctc_segment  TABLES 0: alpha alone goes through the frames, and leaves its states behind every so many of them.
//                TABLES 1: alpha begins at such states again, beta where the segment after it left off; they meet in the
//                middle, cross and leave posteriors, and beta's states for the segment before.
//   ctc_targets  the targets as classes, and in an alphabet of their own: 0 is the blank, k + 1 a label that is first at k.
//   ctc_kept     the rows of segments that are no padding, in their order.
//   ctc_finish   a row of tiles of the softmax, each relative to its own largest score, as the gradient of the loss.
// Grids: CLUSTER N blocks of THREADS; N (C + 255) / 256 of 256; T N / 256 of 256; rows of up to 256.
// Fixed when compiled, for the last three, beside ELEMENT (of the gradient): NEAR (1: shared memory holds all that a row reads, and its
// pitch is in packs).

#ifdef PAIRS
struct Edge {  // from: null where the sequence itself begins; the forward scan leaves states every so many frames, `step` apart
  const State* from; State* to; int pitch, every; i64 step;
};

template <int DIR>
FORCED void segment(const Problem& p, const Edge& edge, Shared& sh, int rank) {
  const auto second = [&](Lane<DIR>& states, bool works, int middle) {
    const State total = states.meet(middle - 1);
    if (works && total.m > 0.0f) {
      states.divide_by(total);
      if (DIR == 0) states.posteriors_at_meeting(middle - 1);
      states.template run<true>(states.half, p.frames);
    }
    if (works && edge.to) store_states(states, edge.to, edge.pitch);
  };
  by_strips<DIR>(p, sh, rank, edge.from, edge.pitch, [&](Lane<DIR>& states, bool works, int middle) {
    if (!TABLES) {
      State* to = edge.to;
      if (works && DIR == 0)
        for (int t = 0; t < p.frames; t += edge.every, to += edge.step) {
          states.template run<false>(t, min(t + edge.every, p.frames));
          store_states(states, to, edge.pitch);
        }
      return;
    }
    if (works) states.template run<false>(0, states.half);
    if (STRIPS > 1) {
      if (works) store_states(states, p.held(DIR), PLANE);
      return;
    }
    __syncwarp();
    sync_sequence();
    second(states, works, middle);
  });
  if constexpr (TABLES && STRIPS > 1) by_strips<DIR>(p, sh, rank, p.held(DIR), PLANE, second);
}

extern "C" __global__ void SHAPE ctc_segment(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [K,N,C], [N,width]; [N] of the whole sequences
    const State* alpha_from, State* alpha_to, State* beta,  // [N,2,pitch], [edges,N,2,pitch], [N,2,pitch], or null; beta, up to a factor, is read, then written
    State* table, float* post, State* log_z,  // PAIRS, then [N,K+1,2,PLANE] or [N,2,2,PLANE]; [N,K,2,PLANE] or null; [N]
    State* strips,  // [N, 2 STRIPS (K+1) + 4 PLANE], or null for one strip
    int stride_t, int stride_n, int begin, int K, int every, int width, int pitch) {
  SHARED(Shared, sh);
  const int n = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int t_n = (int)frames[n], l_n = (int)min(lengths[n], (i64)t_n + 1);
  if (t_n <= begin || l_n > t_n) return;  // over before, or infeasible
  const bool last = t_n - begin <= K;
  const i64 at = (i64)n * 2 * pitch, step = (i64)(gridDim.x / CLUSTER) * 2 * pitch;
  const Problem p = {z + (i64)n * stride_n, stride_t, 0, last ? t_n - begin : K, l_n, fminf(2e6f, 1.8e8f / t_n), y + (i64)n * width,
                     table + PAIRS + (i64)n * (TABLES ? K + 1 : 2) * 2 * PLANE, post + (i64)n * K * 2 * PLANE,
                     strips + n * ((i64)2 * STRIPS * (K + 1) + 4 * PLANE), K + 1};
  if (CLUSTER > 1 ? rank < SPLIT : threadIdx.x < 32 * EACH)
    segment<0>(p, Edge{alpha_from ? alpha_from + at : nullptr, alpha_to ? alpha_to + at : nullptr, pitch, every, step}, sh, rank);
  else segment<1>(p, Edge{beta && !last ? beta + at : nullptr, beta ? beta + at : nullptr, pitch, every, step}, sh, rank);
  if (!TABLES && last && rank == 0 && threadIdx.x == 0) {
    const State* end = alpha_to + at + (p.frames - 1) / every * step;
    State total = load_from_afar(end + pitch + l_n);
    if (l_n) total = sum(total, load_from_afar(end + l_n - 1));
    total = renormalised(total);
    log_z[n] = total.m == total.m ? total : State{not_a_number(), BAD_SCORE};
  }
}
#endif

#ifdef PER
extern "C" __global__ void __launch_bounds__(256) ctc_targets(
    const i64* y, const i64* frames, const i64* lengths,  // [N,columns], [N], [N], as they came
    i64* classes, i64* own, i64* sizes, State* log_z,  // [N,C], [N,C], [2,N] frames and lengths that can be computed with, [N]
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
    classes[(i64)n * C + j] = c, own[(i64)n * C + j] = first | c << 32;  // the class goes along
  }
  if (j == 0) {  // without frames Z is 1 for an empty target, one path without a step; what is bad has no frames
    sizes[n] = good ? t_n : 0, sizes[N + n] = good ? l_n : 1;
    log_z[n] = {!good ? not_a_number() : t_n || l_n ? 0.0f : 1.0f, 0};
  }
}

extern "C" __global__ void __launch_bounds__(256) ctc_kept(
    const i64* frames, i64* kept, int T, int N, int K) {  // [N], [sum of frames] places in [K,N]
  const int place = blockIdx.x * 256 + threadIdx.x, t = place / N, n = place - t * N;
  if (t >= T || t >= frames[n]) return;
  i64 before = 0;
  for (int m = 0; m < N; m++) before += min((i64)(t + (m < n)), frames[m]);
  kept[before] = place % (K * N);
}

#ifdef __CUDACC__
#define ROLLED _Pragma("unroll 1")  // a loop of few turns, whose copies would cost more than they save
#define ROOM(name) extern __shared__ Pack name[]
FORCED void copy_ahead(void* to, const void* from) {  // 16 bytes into shared memory, by no register
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
FORCED void wait_for_copies() {  // of this thread
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif

constexpr int PACK = 16 / sizeof(bits);  // elements of a load
struct alignas(16) Pack { bits v[PACK]; };
struct One { bits v[1]; };
struct RowTotal { float at, sum; u32 held; };  // largest score, sum relative to it, posteriors
constexpr float UNIT = sizeof(bits) == 4 ? 1.0f : LOG2E, TO_POWER = LOG2E / UNIT;  // of scores in `parts`; of 2, from units

template <class V>
FORCED V* take(char*& room, int count) {
  V* const taken = reinterpret_cast<V*>(room);
  room += (count * (int)sizeof(V) + 15) / 16 * 16;
  return taken;
}
template <class V>
FORCED V* ahead(char*& room, V* from, int count) {  // where to find it, once copies are waited for
  if (!NEAR) return from;
  V* const to = take<V>(room, count);
  constexpr int each = 16 / sizeof(V);
  ROLLED
  for (int i = threadIdx.x * each; i < count; i += blockDim.x * each) copy_ahead((void*)(to + i), from + i);
  return to;
}

template <class V>
FORCED void settle(V* some, float factor) {  // elements of one tile
  V v = *some;
  UNROLL
  for (int i = 0; i < (int)(sizeof(v) / sizeof(bits)); i++) v.v[i] = ELEMENT::store(ELEMENT::load(v.v[i]) * factor);
  *some = v;
}

extern "C" __global__ void __launch_bounds__(256) ctc_finish(
    bits* dz, const float* parts,  // [rows,V] e^(z - at), at: the row's largest in a tile; [2,tiles,rows] at in units, sums of the tiles
    const float* e, const i64* own,  // [N,K,C] scores of the target's classes; [N,C] of `ctc_targets`
    const i64* frames, const i64* lengths, const float* post, const State* log_z,  // [N], [N], [N,K,2,plane], [N]
    const float* g, const i64* kept, float2* stats,  // [N] upstream; [rows] of [K,N], or null for all; [T,N] largest score and sum
    int rows, int V, int pitch, int tiles, int shift, int begin, int K, int N, int C, int plane) {  // 2^shift classes a tile
  ROOM(memory);
  char* room = reinterpret_cast<char*>(memory);
  const int me = threadIdx.x, threads = blockDim.x, row = rows - 1 - blockIdx.x;  // what was written last is still near
  bits *const to = dz + (i64)row * pitch, *const p = ahead(room, to, V);
  const u32 place = kept ? (u32)kept[row] : row;
  const int t = place / (u32)N, n = place - t * N;
  const i64 frame = (i64)n * K + t;
  const float *of_label = ahead(room, post + frame * 2 * plane, C), *of_blank = ahead(room, post + (frame * 2 + 1) * plane, C);
  const float* scores = ahead(room, e + frame * C, C);
  const i64* names = ahead(room, own + (i64)n * C, C);
  const State total = load_state(log_z + n);
  const float by = g[n];
  const bool there = begin + t < frames[n];
  const int length = (int)lengths[n];
  u32* held = take<u32>(room, C);  // posteriors of each class of the small alphabet
  float *factors = take<float>(room, tiles), *sums = take<float>(room, tiles);
  RowTotal& all = *take<RowTotal>(room, 1);
  ROLLED
  for (int j = me; j < C; j += threads) held[j] = 0;
  if (me < 32) {  // the first warp joins the tiles
    const float *tile_tops = parts + row, *tile_sums = tile_tops + (i64)tiles * rows;
    float top = -infinity(), s = 0.0f;
    ROLLED
    for (int j = me; j < tiles; j += 32) {
      factors[j] = tile_tops[(i64)j * rows], sums[j] = tile_sums[(i64)j * rows];
      top = fmaxf(top, factors[j]);
    }
    top = Larger::warp(top);
    if (top == -infinity()) top = 0.0f;
    ROLLED
    for (int j = me; j < tiles; j += 32) {
      factors[j] = two_to((factors[j] - top) * TO_POWER);
      s += sums[j] * factors[j];
    }
    s = Plus::warp(s);
    if (me == 0) {
      all = {top / UNIT, s, 0};
      stats[(i64)begin * N + place] = make_float2(all.at, s);
    }
  }
  wait_for_copies();
  __syncthreads();
  const float share = by / all.sum;
  if (!there || !(total.m > 0.0f) || by == 0.0f) {  // no frame, no path, no gradient
    const float nothing = total.m != total.m && total.e == BAD_SCORE && there ? total.m : 0.0f;
    ROLLED
    for (int c = me; c < V; c += threads) to[c] = ELEMENT::store(nothing);
    return;
  }
  u32 blanks = 0, labels = 0;
  ROLLED
  for (int j = me; j <= length; j += threads) {
    blanks += fixed(of_blank[j]);
    if (j == 0) continue;
    const u32 v = fixed(of_label[j - 1]);
    labels += v;
    atomicAdd(&held[(int)names[j]], v);
  }
  __syncwarp();
  blanks = warp_total(blanks), labels = warp_total(labels);
  if (me % 32 == 0) atomicAdd(&held[0], blanks), atomicAdd(&all.held, blanks + labels);
  const auto factor = [&](int c) { return factors[c >> shift] * share; };
  if (NEAR || pitch % PACK == 0) {
    ROLLED
    for (int c = me * PACK; c < V; c += threads * PACK) settle(reinterpret_cast<Pack*>(p + c), factor(c));
  } else
    for (int c = me; c < V; c += threads) settle(reinterpret_cast<One*>(p + c), factor(c));
  __syncthreads();
  // K roundings have moved the sum of a frame's posteriors from 1, by 1e-6
  const float hold = by / (float)all.held;
  ROLLED
  for (int j = me; j < C; j += threads) {  // equal labels write the same
    const i64 name = names[j];
    p[name >> 32] = ELEMENT::store(fmaf(-hold, (float)held[(int)name], probability(scores[j], all.at) * share));
  }
  if (!NEAR) return;
  __syncthreads();
  ROLLED
  for (int c = me * PACK; c < V; c += threads * PACK) *reinterpret_cast<Pack*>(to + c) = *reinterpret_cast<const Pack*>(p + c);
}
#endif
