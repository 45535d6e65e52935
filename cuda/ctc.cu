// CTC: loss, and its gradient with respect to z [T,N,C], in three launches; a fourth multiplies the gradient.
//   ctc_scan  CLUSTER blocks a sequence, half of their warps for alpha (the sums over beginnings of paths), half for beta
//             (over their ends). They meet at the middle frame, cross, and on the way through the other's half turn its
//             table into posteriors: T frames of latency for both. Of z it reads the blank and the targets.
//   ctc_grad  one turn over z: softmax less the posteriors of each class; and each frame's log-sum-exp.
//   ctc_loss  the sum of those over time, less log Z.
//   ctc_scale the upstream gradient's factor, where it is not 1.
// A value is m 2^e, a float and an int, one exponent a state: between states there is neither exp nor log, and zero is
// exact. Grids: CLUSTER N blocks of THREADS; T N / (256 / ROWTHREADS) of 256; N of 256.
// Fixed when compiled: ELEMENT (bf16, f16, f32) and, for the scan, PAIRS (of a blank and a label, a lane), AHEAD (frames
// prefetched, and between renormalisations), CLUSTER, THREADS, TABLES (0: for a loss alone), STRIPS (of the states, one after
// another where a block does not hold them all); for the gradient PER (classes a thread), ROWTHREADS (32, 256), NORMALISE
// (z are logits; or else log-probabilities) and SOFTMAX (0: the gradient is less the posteriors alone).
// Idea: connectionist temporal classification, Graves 2006; forward-backward algorithm, Baum 1972.
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
#define FORCED __device__ __forceinline__

struct State { float m; int e; };

#ifdef __CUDACC__  // what only a GPU has; a test on a CPU brings its own
#define UNROLL _Pragma("unroll")
#define SHARED(type, name) __shared__ type name
#if defined(CLUSTER) && CLUSTER > 1
#define SCOPE "cluster"
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
FORCED void sync_sequence() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class V> FORCED V* in_block(V* p, int rank) {  // the same place in another block's shared memory
  u64 r; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"((u64)p), "r"(rank)); return reinterpret_cast<V*>(r);
}
#else
#define SCOPE "cta"
#define SHAPE __launch_bounds__(THREADS, 1)
FORCED void sync_sequence() { __syncthreads(); }
template <class V> FORCED V* in_block(V* p, int) { return p; }
#endif
FORCED void keep_order() { asm volatile("" ::: "memory"); }
FORCED float two_to(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
FORCED float half_to_float(u16 h) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r; }
FORCED u16 float_to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
// A slot of a ring is one word of 64 bits: its value and, in the mantissa's free sign, the lap that wrote it.
FORCED void put(State* p, State s) {
  const u64 v = (u32)__float_as_int(s.m) | (u64)(u32)s.e << 32;
  asm volatile("st.relaxed." SCOPE ".b64 [%0], %1;" :: "l"((u64)p), "l"(v) : "memory");
}
FORCED State get(const State* p) {
  u64 v; asm volatile("ld.relaxed." SCOPE ".b64 %0, [%1];" : "=l"(v) : "l"((u64)p) : "memory");
  return {__int_as_float((int)v), (int)(v >> 32)};
}
FORCED void put(int* p, int v) { asm volatile("st.relaxed." SCOPE ".b32 [%0], %1;" :: "l"((u64)p), "r"(v) : "memory"); }
FORCED int get(const int* p) {
  int v; asm volatile("ld.relaxed." SCOPE ".b32 %0, [%1];" : "=r"(v) : "l"((u64)p) : "memory"); return v;
}
FORCED State load_state(const State* p) {  // a word of 64 bits, though `State` is aligned to 32
  const int2 v = *reinterpret_cast<const int2*>(p); return {__int_as_float(v.x), v.y};
}
FORCED State load_from_afar(const State* p) {  // written by another multiprocessor a moment ago
  const int2 v = __ldcg(reinterpret_cast<const int2*>(p)); return {__int_as_float(v.x), v.y};
}
FORCED void store_state(State* p, State s) { *reinterpret_cast<int2*>(p) = make_int2(__float_as_int(s.m), s.e); }
FORCED u32 warp_total(u32 v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, v);
#else
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
#endif
}
#endif

struct f32 {
  typedef float bits;
  static FORCED float load(float v) { return v; }
  static FORCED float store(float v) { return v; }
};
struct bf16 {
  typedef u16 bits;
  static FORCED float load(u16 v) { return __int_as_float((int)v << 16); }
  static FORCED u16 store(float v) {  // to the nearest, of two the even one
#if __CUDA_ARCH__ >= 800
    u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r;
#else
    const u32 b = (u32)__float_as_int(v);
    return v != v ? (u16)0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
#endif
  }
};
struct f16 {
  typedef u16 bits;
  static FORCED float load(u16 v) { return half_to_float(v); }
  static FORCED u16 store(float v) { return float_to_half(v); }
};
typedef ELEMENT::bits bits;

constexpr float LOG2E = 1.4426950408889634f;
constexpr int BAD_SCORE = 1;  // the exponent of a NaN that came with the scores, not with a target or a length
FORCED float infinity() { return __int_as_float(0x7f800000); }
FORCED float not_a_number() { return __int_as_float(0x7fc00000); }

#ifdef PAIRS
#ifndef STRIPS
#define STRIPS 1
#endif
constexpr int NEVER = -(1 << 29);  // the exponent of zero
constexpr float LOG2E_LOW = 1.925963033500e-08f;  // what LOG2E is short of
constexpr int WARPS = THREADS / 32, RING = 8 * AHEAD;
constexpr int SPLIT = CLUSTER > 1 ? CLUSTER / 2 : 1, EACH = CLUSTER > 1 ? WARPS : WARPS / 2;  // blocks a direction, warps in each
constexpr int PLANE = 32 * PAIRS * EACH * SPLIT * STRIPS, PITCH = TABLES ? 2 * PLANE : 0;  // states of a direction, between rows of a table
static_assert(STRIPS == 1 || CLUSTER == 1, "one block goes from strip to strip");

FORCED float power(int d) { return __int_as_float((max(d, -127) + 127) << 23); }  // 2^d for d < 128; 0 below -126

// e^z as a mantissa in [0.7, 1.42] and an exponent. Two fused steps keep every digit of z. Scores below -limit lose
// their mantissa instead, those above make an infinity that is noticed.
FORCED State emission(float z, float limit) {
  const float magic = 12582912.0f, t = fmaf(fminf(fmaxf(z, -limit), limit), LOG2E, magic), f = t - magic;
  return {two_to(fmaf(z, LOG2E_LOW, fmaf(z, LOG2E, -f))), __float_as_int(t) - 0x4b400000};
}
FORCED State renormalised(State s) {  // bits only; a zero forgets its exponent
  const int b = __float_as_int(s.m), x = (b >> 23) - 127;
  if (x == 128) return {not_a_number(), s.e};
  return s.m == 0.0f ? State{0.0f, NEVER} : State{__int_as_float(b - (x << 23)), s.e + x};
}
FORCED State sum(State a, State b) {
  const int e = max(a.e, b.e);
  return {fmaf(a.m, power(a.e - e), b.m * power(b.e - e)), e};
}
FORCED State sum(State a, State b, State c) {
  const int e = max(max(a.e, b.e), c.e);
  return {fmaf(a.m, power(a.e - e), fmaf(b.m, power(b.e - e), c.m * power(c.e - e))), e};
}
FORCED State times(State a, State b) { return {a.m * b.m, a.e + b.e}; }

struct Problem {  // of one sequence
  const bits* z; int step, blank, frames, length;  // its frame 0, elements between frames
  float limit;
  const i64* y;
  State* table;  // [T+1, 2, PLANE], labels and blanks: row t of alpha, row t+1 of beta; for a loss alone [2, 2, PLANE], their last rows
  float* post;  // [T, 2, PLANE]: posteriors of labels and of blanks
  State* strips;  // [2, STRIPS, steps] a strip's last label at each time, for the strip after it; [2, 2, PLANE] states at the middle
  int steps;  // T + 1
  FORCED State* column(int dir, int strip) const { return strips + (i64)(dir * STRIPS + strip) * steps; }
  FORCED State* held(int dir) const { return strips + (i64)2 * STRIPS * steps + dir * 2 * PLANE; }
};
struct Shared {
  State ring[WARPS][RING], shown[WARPS][AHEAD];  // what the warp before hands on; emissions of the blank
  int taken[WARPS];  // frames that the warp after has taken
};

// A lane's states: pair j is blank j and label j of the target as this direction reads it. Pairs past the target's end
// are computed like any other: nothing flows from them to the rest.
template <int DIR>
struct Lane {
  State label[PAIRS], blank[PAIRS];
  bool skip[PAIRS];  // may come from the label before
  int column[PAIRS];  // of z
  int first, warp, warps, lane;  // first pair; of the warps of this direction
  int count, half;  // frames done, rounded up in each half; frames until they meet
  State inverse;  // 1 / Z, once known
  State *mine, *following, *shown; int *taken_before, *taken_mine;
  const Problem& p;

  FORCED bool begins_strip() const { return STRIPS > 1 && warp > 0 && warp % EACH == 0; }  // what comes before it is in memory
  FORCED bool ends_strip() const { return STRIPS > 1 && warp + 1 < warps && warp % EACH == EACH - 1; }
  FORCED Lane(const Problem& p, Shared& sh, int warp, int warps, int lane, int rank, int half)
      : first((warp * 32 + lane) * PAIRS), warp(warp), warps(warps), lane(lane), count(0), half(half), p(p) {
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
      const int j = first + i;
      const bool real = j < p.length;
      const i64 y = real ? p.y[DIR ? p.length - 1 - j : j] : p.blank;
      column[i] = (int)y;
      skip[i] = real && j > 0 && y != p.y[DIR ? p.length - j : j - 1];
      label[i] = State{0.0f, NEVER};
      blank[i] = j ? State{0.0f, NEVER} : State{1.0f, 0};
    }
    const int base = rank - rank % SPLIT, row = CLUSTER > 1 ? 0 : DIR * EACH;
    const int own = row + warp % EACH, next = min(warp + 1, warps - 1), before = max(min(warp, warps) - 1, 0);
    mine = sh.ring[own], shown = sh.shown[own], taken_mine = &sh.taken[own];
    following = in_block(sh.ring[row + next % EACH], base + next / EACH % SPLIT);
    taken_before = in_block(&sh.taken[row + before % EACH], base + before / EACH % SPLIT);
    for (int i = lane; i < RING; i += 32) mine[i] = {i ? 0.0f : -0.0f, NEVER};  // no lap yet; before frame 0
    if (lane == 0) *taken_mine = 0;
  }
  FORCED int time(int s) const { return DIR ? p.frames - 1 - s : s; }

  struct Stream {  // pointers that move with the frames
    const char *z[PAIRS], *z_blank; const State* other; State* own; float* post;
  };
  template <class V> static FORCED V* moved(const char* p, int pitch, int by) { return (V*)(p + (i64)pitch * by); }  // bytes
  // The other direction's pair of my label j is length-1-j, of my blank j it is length-j.
  FORCED void start(Stream& at, int s) const {
    const int t = time(s), mirror = max(p.length - 1 - first, -1);
    const bits* row = p.z + (i64)p.step * t;
    UNROLL
    for (int k = 0; k < PAIRS; k++) at.z[k] = (const char*)(row + column[k]);
    at.z_blank = (const char*)(row + p.blank);
    at.other = p.table + (i64)t * PITCH + (DIR ? 0 : 2 * PLANE) + mirror;
    at.own = p.table + (i64)t * PITCH + (DIR ? 2 * PLANE : 0) + first;
    at.post = p.post + (i64)t * 2 * PLANE + (DIR ? mirror : first);
  }
  FORCED void fetch(const State* at, State* l, State* b) const {
    UNROLL
    for (int k = 0; k < PAIRS; k++) l[k] = load_state(at - k), b[k] = load_state(at + PLANE + 1 - k);
  }
  FORCED static float posterior(State a, State b) { return a.m * b.m * power(a.e + b.e); }  // one of them is over Z

  bits ahead[PAIRS][AHEAD], blank_ahead;
  State row_l[PAIRS], row_b[PAIRS];  // of the last frame, for a loss alone

  // What the warp before hands on for the next AHEAD frames: waits until it is there, then says that it is taken. The
  // first warp finds what its ring was filled with, zeros.
  FORCED void take(State (&before)[AHEAD], int lap, int slot, int s0, int to) {
    if (begins_strip()) {
      const State* column = p.column(DIR, warp / EACH - 1);
      UNROLL
      for (int i = 0; i < AHEAD; i++) before[i] = s0 + i < to ? load_state(column + s0 + i) : State{0.0f, NEVER};
      return;
    }
    if (warp > 0)
      while ((__float_as_int(get(mine + slot + AHEAD - 1).m) < 0) != lap) ;  // the last to be written
    bool there;
    do {
      there = true;
      UNROLL
      for (int i = 0; i < AHEAD; i++) before[i] = get(mine + slot + i), there = there && (__float_as_int(before[i].m) < 0) == lap;
    } while (!there && warp > 0);
    UNROLL
    for (int i = 0; i < AHEAD; i++) before[i].m = fabsf(before[i].m);
    __syncwarp();
    if (warp > 0 && lane == 31) put(taken_before, count + AHEAD);
  }

  // And hands on its own: the value after frame r lies in slot r + 1, of which only the last can be over the ring's end.
  FORCED void hand_on(const State (&last)[AHEAD], int lap, int slot, int s0, int to) {
    if (lane < 31 || warp + 1 == warps) return;
    if (ends_strip()) {
      State* column = p.column(DIR, warp / EACH) + 1;
      UNROLL
      for (int i = 0; i < AHEAD; i++) if (s0 + i < to) store_state(column + s0 + i, last[i]);
      return;
    }
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      const bool over = i + 1 == AHEAD && slot + AHEAD == RING;
      put(over ? following : following + slot + i + 1, State{__int_as_float(__float_as_int(last[i].m) | (lap ^ (int)over) << 31), last[i].e});
    }
  }

  // AHEAD frames from s0, whose scores are in `ahead`; FULL: two such blocks are left at least. What does not depend on
  // the states is done for all of them first: a warp has a scheduler to itself, and nothing else to wait with.
  template <bool SECOND, bool FULL>
  FORCED void block(int s0, int to, Stream& at, State (&other_l)[AHEAD][PAIRS], State (&other_b)[AHEAD][PAIRS]) {
    constexpr int row = DIR ? -PITCH : PITCH, post_row = DIR ? -2 * PLANE : 2 * PLANE;
    const int step = (DIR ? -1 : 1) * (int)sizeof(bits) * p.step, lap = (count / RING & 1) ^ 1, slot = count % RING;
    const State blanks = emission(ELEMENT::load(blank_ahead), p.limit);
    State before[AHEAD], last[AHEAD], emitted[AHEAD][PAIRS], by_blank[AHEAD];
    __syncwarp();
    if (lane < AHEAD) shown[lane] = blanks;
    __syncwarp();
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      by_blank[i] = shown[i];
      UNROLL
      for (int k = 0; k < PAIRS; k++) emitted[i][k] = emission(ELEMENT::load(ahead[k][i]), p.limit);
    }
    keep_order();  // loads into the registers that are free now; into others they would be waited for here
    UNROLL
    for (int i = 0; i < AHEAD; i++)
      UNROLL
      for (int k = 0; k < PAIRS; k++) if (FULL || s0 + i + AHEAD < to) ahead[k][i] = *moved<const bits>(at.z[k], step, i + AHEAD);
    if (lane < AHEAD && (FULL || s0 + AHEAD + lane < to)) blank_ahead = *moved<const bits>(at.z_blank, step, AHEAD + lane);
    take(before, lap, slot, s0, to);
    if (SECOND && s0 == half && !begins_strip()) before[0] = times(before[0], inverse);  // handed on before the middle
    count += AHEAD;
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      if (FULL || s0 + i < to) {
        State up = {__shfl_up_sync(~0u, label[PAIRS - 1].m, 1), __shfl_up_sync(~0u, label[PAIRS - 1].e, 1)};
        if (lane == 0) up = before[i];
        UNROLL
        for (int k = PAIRS - 1; k >= 0; k--) {
          const State u = k ? label[k - 1] : up;
          const State l0 = sum(label[k], blank[k], State{skip[k] ? u.m : 0.0f, skip[k] ? u.e : NEVER});
          const State b0 = sum(blank[k], u);
          label[k] = times(l0, emitted[i][k]), blank[k] = times(b0, by_blank[i]);
          const State l1 = DIR ? l0 : label[k], b1 = DIR ? b0 : blank[k];  // beta's row is without the frame's own
          if (SECOND) {
            const float g = posterior(l1, other_l[i][k]), h = posterior(b1, other_b[i][k]);
            float* post = at.post + i * post_row;
            const int j = first + k;
            if (!DIR) post[k] = g, post[PLANE + k] = h;
            if (DIR && j < p.length) post[-k] = g;
            if (DIR && j <= p.length) post[PLANE + 1 - k] = h;
          } else if (TABLES) {
            store_state(at.own + i * row + k, l1);
            store_state(at.own + i * row + PLANE + k, b1);
          } else row_l[k] = l1, row_b[k] = b1;
        }
        if (SECOND && (FULL || s0 + i + AHEAD < to)) fetch(at.other + (i + AHEAD) * row, other_l[i], other_b[i]);
      }
      last[i] = label[PAIRS - 1];
    }
    if (warp + 1 < warps && !ends_strip())
      while (get(taken_mine) < count + AHEAD - RING) ;  // room in the ring of the warp after
    hand_on(last, lap, slot, s0, to);
    UNROLL
    for (int k = 0; k < PAIRS; k++) {
      label[k] = renormalised(label[k]), blank[k] = renormalised(blank[k]);
      at.z[k] = moved<const char>(at.z[k], step, AHEAD);
    }
    at.z_blank = moved<const char>(at.z_blank, step, AHEAD);
    at.other += AHEAD * row, at.own += AHEAD * row, at.post += AHEAD * post_row;
  }

  template <bool SECOND>
  FORCED void run(int from, int to) {
    constexpr int row = DIR ? -PITCH : PITCH;
    const int step = (DIR ? -1 : 1) * (int)sizeof(bits) * p.step;
    State other_l[AHEAD][PAIRS], other_b[AHEAD][PAIRS];
    Stream at;
    start(at, from);
    if (ends_strip() && lane == 31) store_state(p.column(DIR, warp / EACH) + from, label[PAIRS - 1]);
    UNROLL
    for (int i = 0; i < AHEAD; i++)
      if (from + i < to) {
        UNROLL
        for (int k = 0; k < PAIRS; k++) ahead[k][i] = *moved<const bits>(at.z[k], step, i);
        if (SECOND) fetch(at.other + i * row, other_l[i], other_b[i]);
      }
    if (lane < AHEAD && from + lane < to) blank_ahead = *moved<const bits>(at.z_blank, step, lane);
    int s0 = from;
    for (; s0 + 2 * AHEAD <= to; s0 += AHEAD) block<SECOND, true>(s0, to, at, other_l, other_b);
    for (; s0 < to; s0 += AHEAD) block<SECOND, false>(s0, to, at, other_l, other_b);
    if (!TABLES) {
      UNROLL
      for (int k = 0; k < PAIRS; k++) store_state(at.own + k, row_l[k]), store_state(at.own + PLANE + k, row_b[k]);
    }
  }

  // Where alpha and beta meet, at frame `at`, both tables have a row. Z is their product, summed by each warp for itself
  // in an order that depends on the target alone.
  FORCED State label_at_meeting(int at, int j) const {
    const State *alpha = p.table + (i64)at * PITCH, *beta = alpha + 2 * PLANE;
    return times(load_from_afar(alpha + j), load_from_afar(beta + p.length - 1 - j));
  }
  FORCED State blank_at_meeting(int at, int j) const {
    const State *alpha = p.table + (i64)at * PITCH + PLANE, *beta = alpha + 2 * PLANE;
    return times(load_from_afar(alpha + j), load_from_afar(beta + p.length - j));
  }
  FORCED State meet(int at) const {
    State all = {0.0f, NEVER};
    for (int j = lane; j <= p.length; j += 32) {
      if (j < p.length) all = sum(all, renormalised(label_at_meeting(at, j)));
      all = renormalised(sum(all, renormalised(blank_at_meeting(at, j))));
    }
    for (int o = 16; o; o >>= 1) all = sum(all, State{__shfl_xor_sync(~0u, all.m, o), __shfl_xor_sync(~0u, all.e, o)});
    return renormalised(all);
  }
  FORCED void posteriors_at_meeting(int at) const {
    float* post = p.post + (i64)at * 2 * PLANE;
    for (int j = first; j < first + PAIRS && j <= p.length; j++) {
      if (j < p.length) post[j] = posterior(label_at_meeting(at, j), inverse);
      post[PLANE + j] = posterior(blank_at_meeting(at, j), inverse);
    }
  }
  FORCED void divide_by(State total) {  // all that follows is linear, and the posteriors need no division of their own
    inverse = {1.0f / total.m, -total.e};
    UNROLL
    for (int k = 0; k < PAIRS; k++) label[k] = times(label[k], inverse), blank[k] = times(blank[k], inverse);
  }
};

// States in memory: [2, pitch], labels and blanks as their direction reads them.
template <int DIR>
FORCED void load_states(Lane<DIR>& s, const State* from, int pitch) {
  UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int j = s.first + i;
    s.label[i] = j < s.p.length ? load_state(from + j) : State{0.0f, NEVER};
    s.blank[i] = j <= s.p.length ? load_state(from + pitch + j) : State{0.0f, NEVER};
  }
  if (s.lane == 0 && s.warp > 0) {  // what the warp before would have handed on; its sign says that it is there
    const State before = load_state(from + s.first - 1);
    s.mine[0] = {__int_as_float(__float_as_int(before.m) | 1 << 31), before.e};
  }
}
template <int DIR>
FORCED void store_states(const Lane<DIR>& s, State* to, int pitch) {
  UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int j = s.first + i;
    if (j < s.p.length) store_state(to + j, s.label[i]);
    if (j <= s.p.length) store_state(to + pitch + j, s.blank[i]);
  }
}

// What the strips of a direction do one after another, each with all that was handed on by the strip before it: `go` gets
// the states of a warp, and whether they are part of the target.
template <int DIR, class Go>
FORCED void by_strips(const Problem& p, Shared& sh, int rank, const State* from, int pitch, Go go) {
  const int lane = threadIdx.x % 32, warps = p.length / (32 * PAIRS) + 1;
  const int first = (CLUSTER > 1 ? rank % SPLIT * EACH : 0) + threadIdx.x / 32 - (CLUSTER > 1 ? 0 : DIR * EACH);
  const int middle = (p.frames + 1) / 2, half = DIR ? p.frames - middle + 1 : middle;
  const int strips = STRIPS == 1 ? 1 : (warps + EACH - 1) / EACH;
  for (int strip = 0; strip < strips; strip++) {
    const int warp = first + strip * EACH;
    const bool works = warp < warps;
    Lane<DIR> states(p, sh, warp, warps, lane, rank, half);
    if (works && from) load_states(states, from, pitch);
    sync_sequence();
    go(states, works, middle);
    __syncwarp();
    sync_sequence();  // none leaves, or goes on, while others write into it
  }
}

template <int DIR>
FORCED State scan(const Problem& p, Shared& sh, int rank) {
  State total = {0.0f, NEVER};
  const auto second = [&](Lane<DIR>& states, bool works, int middle) {
    total = states.meet(middle - 1);
    if (TABLES && works && total.m > 0.0f) {
      states.divide_by(total);
      if (DIR == 0) states.posteriors_at_meeting(middle - 1);
      states.template run<true>(states.half, p.frames);
    }
  };
  by_strips<DIR>(p, sh, rank, nullptr, 0, [&](Lane<DIR>& states, bool works, int middle) {
    if (works) states.template run<false>(0, states.half);
    if (STRIPS > 1) {
      if (works) store_states(states, p.held(DIR), PLANE);
      return;
    }
    __syncwarp();
    sync_sequence();
    second(states, works, middle);
  });
  if constexpr (STRIPS > 1) by_strips<DIR>(p, sh, rank, p.held(DIR), PLANE, second);
  return total;
}

// The pitch of z's frames is below 2^29 elements, its classes are 1 apart. Targets beyond `width` columns are infeasible.
extern "C" __global__ void SHAPE ctc_scan(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [T,N,C], [N,width], [N], [N]
    State* table, float* post, State* log_z,  // [N,T+1,2,PLANE] or [N,2,2,PLANE], PAIRS more before it; [N,T,2,PLANE] or null; [N]
    State* strips,  // [N, 2 STRIPS (T+1) + 4 PLANE], or null for one strip
    int stride_t, int stride_n, int T, int C, int width, int longest, int blank) {
  SHARED(Shared, sh);
  const int n = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const i64 t_n = frames[n], l_n = lengths[n];
  bool good = t_n >= 0 && t_n <= T && l_n >= 0 && l_n <= longest;
  if (good) {
    bool inside = true;
    for (int k = threadIdx.x; k < l_n && k < width; k += THREADS) inside = inside && y[(i64)n * width + k] >= 0 && y[(i64)n * width + k] < C;
    good = __syncthreads_and(inside);
  }
  if (!good || t_n == 0 || l_n > t_n) {
    if (rank == 0 && threadIdx.x == 0) log_z[n] = {!good ? not_a_number() : t_n || l_n ? 0.0f : 1.0f, 0};
    return;
  }
  const Problem p = {z + (i64)n * stride_n, stride_t, blank, (int)t_n, (int)l_n, fminf(2e6f, 1.8e8f / t_n), y + (i64)n * width,
                     table + (i64)n * (TABLES ? T + 1 : 2) * 2 * PLANE, post + (i64)n * T * 2 * PLANE,
                     strips + n * ((i64)2 * STRIPS * (T + 1) + 4 * PLANE), T + 1};
  State total;
  if (CLUSTER > 1 ? rank < SPLIT : threadIdx.x < 32 * EACH) total = scan<0>(p, sh, rank);
  else total = scan<1>(p, sh, rank);
  if (rank == 0 && threadIdx.x == 0) log_z[n] = total.m == total.m ? total : State{not_a_number(), BAD_SCORE};
}
#endif

#ifdef PER
constexpr int SLAB = ROWTHREADS * PER, ROWS = 256 / ROWTHREADS;
constexpr int AT_ONCE = 4;  // states that a thread loads before it adds the first

struct RowMemory {
  u32 held[ROWS][SLAB];  // posteriors of each class
  float parts[8];
  u32 counts[8];
};
// Over a warp, in one order, for all of its lanes.
struct Larger {
  static FORCED float pair(float a, float b) { return fmaxf(a, b); }
  static FORCED float warp(float v) { for (int o = 16; o; o >>= 1) v = pair(v, __shfl_xor_sync(~0u, v, o)); return v; }
};
struct Plus {
  static FORCED float pair(float a, float b) { return a + b; }
  static FORCED float warp(float v) { for (int o = 16; o; o >>= 1) v = pair(v, __shfl_xor_sync(~0u, v, o)); return v; }
};
struct Total {
  static FORCED u32 pair(u32 a, u32 b) { return a + b; }
  static FORCED u32 warp(u32 v) { return warp_total(v); }
};
template <class F, class V>
FORCED V over_row(V v, V* parts) {  // and over the threads of a row
  v = F::warp(v);
  if (ROWTHREADS == 32) return v;
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[0];
  for (int w = 1; w < ROWTHREADS / 32; w++) v = F::pair(v, parts[w]);
  return v;
}
FORCED void sync_row() { if (ROWTHREADS == 32) __syncwarp(); else __syncthreads(); }

// Posteriors are added as integers, units of 2^-30: their sums do not depend on an order.
FORCED u32 fixed(float posterior) { return (u32)__float2int_rn(posterior * 1073741824.0f); }
FORCED float share_of(const i64* lengths, int n, int N, int mean) {  // of a sequence in the loss
  return mean ? 1.0f / ((float)(lengths[n] > 1 ? lengths[n] : 1) * (float)N) : 1.0f;
}
FORCED float probability(float z, float at) { return two_to((z - at) * LOG2E); }

extern "C" __global__ void __launch_bounds__(256) ctc_grad(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [T,N,C], [N,width], [N], [N]
    const float* post, const State* log_z,  // [N,T,2,plane], [N], of the scan
    bits* dz, float2* stats,  // [T,N,C] or null; [T,N] maximum of a frame, and sum relative to it
    int stride_t, int stride_n, int d_stride_t, int d_stride_n, int T, int N, int C, int width, int plane, int blank, int mean) {
  SHARED(RowMemory, memory);
  const int group = threadIdx.x / ROWTHREADS, me = threadIdx.x % ROWTHREADS;
  const u32 row = blockIdx.x * ROWS + group;  // T N < 2^31
  if (row >= (u32)T * N) return;  // a whole warp, or a whole block
  const int t = row / (u32)N, n = row - t * N;
  const State total = log_z[n];
  const bits* from = z + (i64)t * stride_t + (i64)n * stride_n;
  bits* to = dz + (i64)t * d_stride_t + (i64)n * d_stride_n;
  if (t >= frames[n] || !(total.m > 0.0f)) {  // no frame, or no path: no gradient
    const float nothing = total.m != total.m && total.e == BAD_SCORE && t < frames[n] ? total.m : 0.0f;
    if (dz) for (int c = me; c < C; c += ROWTHREADS) to[c] = ELEMENT::store(nothing);
    return;
  }
  bits v[PER];
  UNROLL
  for (int i = 0; i < PER; i++) if (i * ROWTHREADS + me < C) v[i] = from[i * ROWTHREADS + me];
  const int length = (int)lengths[n];
  const float* gamma = post + ((i64)n * T + t) * 2 * plane;
  const i64* labels = y + (i64)n * width;
  u32* held = memory.held[group];
  u32 blanks = 0, others = 0;
  if (dz) {
    for (int c = me; c < SLAB && c < C; c += ROWTHREADS) held[c] = 0;
    sync_row();
    for (int k0 = me; k0 <= length; k0 += AT_ONCE * ROWTHREADS) {
      float of_label[AT_ONCE], of_blank[AT_ONCE];
      i64 label[AT_ONCE];
      UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        const int k = k0 + i * ROWTHREADS;
        of_label[i] = k < length ? gamma[k] : 0.0f, of_blank[i] = k <= length ? gamma[plane + k] : 0.0f;
        label[i] = k < length ? labels[k] : SLAB;
      }
      UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        const u32 g = fixed(of_label[i]);
        blanks += fixed(of_blank[i]), others += g;
        if (label[i] < SLAB) atomicAdd(&held[label[i]], g);
      }
    }
  }
  float at = 0.0f, s = 1.0f;
  if (NORMALISE) {
    float top = -infinity();
    s = 0.0f;
    UNROLL
    for (int i = 0; i < PER; i++) if (i * ROWTHREADS + me < C) top = fmaxf(top, ELEMENT::load(v[i]));
    for (int c = SLAB + me; c < C; c += ROWTHREADS) top = fmaxf(top, ELEMENT::load(from[c]));
    top = over_row<Larger>(top, memory.parts);
    at = top == -infinity() ? 0.0f : top;
    UNROLL
    for (int i = 0; i < PER; i++) if (i * ROWTHREADS + me < C) s += probability(ELEMENT::load(v[i]), at);
    for (int c = SLAB + me; c < C; c += ROWTHREADS) s += probability(ELEMENT::load(from[c]), at);
    s = over_row<Plus>(s, memory.parts);
    if (me == 0) stats[row] = make_float2(at, s);
  }
  if (!dz) return;
  blanks = over_row<Total>(blanks, memory.counts), others = over_row<Total>(others, memory.counts);
  // T roundings have moved the sum of a frame's posteriors from 1, by 1e-6
  const float by = share_of(lengths, n, N, mean), share = by / s, hold = by / (float)(blanks + others);
  for (int c0 = 0; c0 < C; c0 += SLAB) {
    if (c0) {
      for (int c = me; c < SLAB && c0 + c < C; c += ROWTHREADS) held[c] = 0;
      sync_row();
      for (int k = me; k < length; k += ROWTHREADS) {
        const i64 c = labels[k] - c0;
        if (c >= 0 && c < SLAB) atomicAdd(&held[c], fixed(gamma[k]));
      }
    }
    sync_row();
    UNROLL
    for (int i = 0; i < PER; i++) {
      const int j = i * ROWTHREADS + me, c = c0 + j;
      if (c >= C) break;
      const float raw = ELEMENT::load(c0 ? from[c] : v[i]), p = SOFTMAX ? probability(raw, at) * share : 0.0f;
      to[c] = ELEMENT::store(fmaf(-hold, (float)(held[j] + (c == blank ? blanks : 0)), p));
    }
    sync_row();
  }
}

// dz times each sequence's factor, in place or into `out`; nothing is read where there is nothing to do.
extern "C" __global__ void __launch_bounds__(256) ctc_scale(
    const bits* dz, bits* out, const float* factor, const float* share,  // [T,N,C], may be dz, [N], [N] or null
    int factor_stride, int d_stride_t, int d_stride_n, int stride_t, int stride_n, int T, int N, int C) {
  for (u32 row = blockIdx.x * ROWS + threadIdx.x / ROWTHREADS; row < (u32)T * N; row += gridDim.x * ROWS) {
    const int t = row / (u32)N, n = row - t * N;
    const float by = factor[(i64)n * factor_stride] * (share ? share[n] : 1.0f);
    if (by == 1.0f && dz == out) continue;
    const bits* from = dz + (i64)t * d_stride_t + (i64)n * d_stride_n;
    bits* to = out + (i64)t * stride_t + (i64)n * stride_n;
    for (int c = threadIdx.x % ROWTHREADS; c < C; c += ROWTHREADS) {
      const float v = ELEMENT::load(from[c]);
      to[c] = ELEMENT::store(v == 0.0f ? 0.0f : v * by);  // whatever the factor, zeros stay zero
    }
  }
}

struct LossMemory { double parts[256]; };

// The log-sum-exps of a sequence's frames, added in double, less log Z.
extern "C" __global__ void __launch_bounds__(256) ctc_loss(
    const float2* stats, const State* log_z, const i64* frames, const i64* lengths,  // [T,N] or null, [N], [N], [N]
    float* loss, int N, int zero_infinity, int mean) {  // [N]
  SHARED(LossMemory, memory);
  const int n = blockIdx.x;
  const State z = log_z[n];
  double s = 0.0;
  if (stats && z.m > 0.0f)
    for (int t = threadIdx.x; t < frames[n]; t += 256) {
      const float2 v = stats[(i64)t * N + n];
      s += (double)v.x + (double)logf(v.y);
    }
  memory.parts[threadIdx.x] = s;
  __syncthreads();
  for (int o = 128; o; o >>= 1) {
    if (threadIdx.x < o) memory.parts[threadIdx.x] += memory.parts[threadIdx.x + o];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const double log_total = (double)logf(z.m) + 0.6931471805599453 * z.e;
    float l = (float)(memory.parts[0] - log_total);
    if (stats && l < 0.0f) l = 0.0f;  // a rounding may put it below
    if (!(z.m > 0.0f)) l = z.m != z.m ? z.m : zero_infinity ? 0.0f : infinity();
    loss[n] = l * share_of(lengths, n, N, mean);
  }
}
#endif
