// CTC: loss, and its gradient with respect to z [T,N,C], in three launches; a fourth multiplies the gradient.
//   ctc_scan  CLUSTER blocks a sequence, half of their warps for alpha (the sums over beginnings of paths), half for
//             beta (over their ends). They meet at the middle frame, cross, and on the way through the other's half
//             turn its table into posteriors: T frames of latency for both. Of z it reads the blank and the targets.
//   ctc_grad  one turn over z: softmax less the posteriors of each class; and each frame's log-sum-exp.
//   ctc_loss  the sum of those over time, less log Z; and the sum of all sequences' losses.
//   ctc_scale the gradient times the upstream gradient, where that is not 1.
// ctc_grad may also come after ctc_loss, when the upstream gradient is known: then ctc_scale has nothing to do.
// A value is m 2^e, a float and an int, one exponent a state: between states there is neither exp nor log, and zero is
// exact. Grids: CLUSTER N blocks of THREADS; T N / (256 / ROWTHREADS) of 256; N of 256.
// Fixed when compiled: ELEMENT (bf16, f16, f32); for the scan PAIRS (of a blank and a label, a lane), AHEAD (frames
// prefetched, and between renormalisations), CLUSTER, THREADS, TABLES (0: for a loss alone), STRIPS (of the states, one
// after another where a block does not hold them all); for the gradient PER (classes a thread), ROWTHREADS (32, 256),
// NORMALISE (z are logits; or else log-probabilities) and SOFTMAX (0: the gradient is less the posteriors alone).
// Idea: connectionist temporal classification, Graves 2006; forward-backward algorithm, Baum 1972.
#include "common.cuh"

struct State { float m; int e; };

#ifdef __CUDACC__  // what only a GPU has; a test on a CPU brings its own
#define UNROLL _Pragma("unroll")
#define SHARED(type, name) __shared__ type name
#if defined(CLUSTER) && CLUSTER > 1
#define SCOPE "cluster"
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
INLINE void sync_sequence() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class V> INLINE V* in_block(V* p, int rank) {  // the same place in another block's shared memory
  u64 r; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"((u64)p), "r"(rank)); return reinterpret_cast<V*>(r);
}
#else
#define SCOPE "cta"
#define SHAPE __launch_bounds__(THREADS, 1)
INLINE void sync_sequence() { __syncthreads(); }
template <class V> INLINE V* in_block(V* p, int) { return p; }
#endif
INLINE void keep_order() { asm volatile("" ::: "memory"); }
INLINE float half_to_float(u16 h) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h)); return r; }
INLINE u16 float_to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
// A slot of a ring is one word of 64 bits: its value and, in the mantissa's free sign, the lap that wrote it.
INLINE void put(State* p, State s) {
  const u64 v = (u32)__float_as_int(s.m) | (u64)(u32)s.e << 32;
  asm volatile("st.relaxed." SCOPE ".b64 [%0], %1;" :: "l"((u64)p), "l"(v) : "memory");
}
INLINE State get(const State* p) {
  u64 v; asm volatile("ld.relaxed." SCOPE ".b64 %0, [%1];" : "=l"(v) : "l"((u64)p) : "memory");
  return {__int_as_float((int)v), (int)(v >> 32)};
}
INLINE void put(int* p, int v) { asm volatile("st.relaxed." SCOPE ".b32 [%0], %1;" :: "l"((u64)p), "r"(v) : "memory"); }
INLINE int get(const int* p) {
  int v; asm volatile("ld.relaxed." SCOPE ".b32 %0, [%1];" : "=r"(v) : "l"((u64)p) : "memory"); return v;
}
INLINE State load_state(const State* p) {  // a word of 64 bits, though `State` is aligned to 32
  const int2 v = *reinterpret_cast<const int2*>(p); return {__int_as_float(v.x), v.y};
}
INLINE State load_from_afar(const State* p) {  // written by another multiprocessor a moment ago
  const int2 v = __ldcg(reinterpret_cast<const int2*>(p)); return {__int_as_float(v.x), v.y};
}
INLINE void store_state(State* p, State s) { *reinterpret_cast<int2*>(p) = make_int2(__float_as_int(s.m), s.e); }
INLINE u32 warp_total(u32 v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, v);
#else
  return warp_sum(v);
#endif
}
#endif

struct f32 {
  typedef float bits;
  static INLINE float load(float v) { return v; }
  static INLINE float store(float v) { return v; }
};
struct bf16 {
  typedef u16 bits;
  static INLINE float load(u16 v) { return __int_as_float((int)v << 16); }
  static INLINE u16 store(float v) {  // to the nearest, of two the even one
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
  static INLINE float load(u16 v) { return half_to_float(v); }
  static INLINE u16 store(float v) { return float_to_half(v); }
};
typedef ELEMENT::bits bits;

constexpr int BAD_SCORE = 1;  // the exponent of a NaN that came with the scores, not with a target or a length

#ifdef PAIRS
#ifndef STRIPS
#define STRIPS 1
#endif
constexpr int ZERO_EXPONENT = -(1 << 29);
constexpr float LOG2E_LOW = 1.925963033500e-08f;  // what LOG2E is short of
constexpr int WARPS = THREADS / 32, RING = 8 * AHEAD;
constexpr int DIR_BLOCKS = CLUSTER > 1 ? CLUSTER / 2 : 1;  // blocks a direction
constexpr int DIR_WARPS = CLUSTER > 1 ? WARPS : WARPS / 2;  // warps of a direction in each
constexpr int PLANE = 32 * PAIRS * DIR_WARPS * DIR_BLOCKS * STRIPS;  // states of a direction
constexpr int PITCH = TABLES ? 2 * PLANE : 0;  // between rows of a table
static_assert(STRIPS == 1 || CLUSTER == 1, "one block goes from strip to strip");

INLINE float exp2_whole(int d) { return __int_as_float((max(d, -127) + 127) << 23); }  // 2^d for d < 128; 0 below -126

// e^z as a mantissa in [0.7, 1.42] and an exponent. Two fused steps keep every digit of z. Scores below -limit lose
// their mantissa instead, those above make an infinity that is noticed.
INLINE State emission(float z, float limit) {
  const float magic = 12582912.0f, t = fmaf(fminf(fmaxf(z, -limit), limit), LOG2E, magic), f = t - magic;
  return {exp2_approx(fmaf(z, LOG2E_LOW, fmaf(z, LOG2E, -f))), __float_as_int(t) - 0x4b400000};
}
INLINE State renormalised(State s) {  // bits only; a zero forgets its exponent
  const int b = __float_as_int(s.m), x = (b >> 23) - 127;
  if (x == 128) return {not_a_number(), s.e};
  return s.m == 0.0f ? State{0.0f, ZERO_EXPONENT} : State{__int_as_float(b - (x << 23)), s.e + x};
}
INLINE State sum(State a, State b) {
  const int e = max(a.e, b.e);
  return {fmaf(a.m, exp2_whole(a.e - e), b.m * exp2_whole(b.e - e)), e};
}
INLINE State sum(State a, State b, State c) {
  const int e = max(max(a.e, b.e), c.e);
  return {fmaf(a.m, exp2_whole(a.e - e), fmaf(b.m, exp2_whole(b.e - e), c.m * exp2_whole(c.e - e))), e};
}
INLINE State times(State a, State b) { return {a.m * b.m, a.e + b.e}; }

struct Problem {  // of one sequence
  const bits* z;  // [frames, C], its frame 0
  int step, blank, frames, length;  // elements between frames
  float limit;
  const i64* y;  // [length]
  State* table;  // [T+1, 2, PLANE], labels and blanks: row t of alpha, row t+1 of beta; a loss alone has [2, 2, PLANE],
                 // the last row of each
  float* post;  // [T, 2, PLANE]: posteriors of labels and of blanks
  State* strips;  // [2, STRIPS, steps] a strip's last label at each time, for the strip after it; then [2, 2, PLANE]
                  // states at the middle
  int steps;  // T + 1
  INLINE State* last_labels(int dir, int strip) const { return strips + (i64)(dir * STRIPS + strip) * steps; }
  INLINE State* middle_states(int dir) const { return strips + (i64)2 * STRIPS * steps + dir * 2 * PLANE; }
};
struct Shared {
  State ring[WARPS][RING];  // what the warp before hands on
  State blank_emissions[WARPS][AHEAD];
  int frames_taken[WARPS];  // by the warp after
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
  State *ring, *next_ring, *blank_emissions; int *prev_taken, *own_taken;
  const Problem& p;

  // The first warp of a strip finds in memory what comes before it.
  INLINE bool begins_strip() const { return STRIPS > 1 && warp > 0 && warp % DIR_WARPS == 0; }
  INLINE bool ends_strip() const { return STRIPS > 1 && warp + 1 < warps && warp % DIR_WARPS == DIR_WARPS - 1; }
  INLINE Lane(const Problem& p, Shared& sh, int warp, int warps, int lane, int rank, int half)
      : first((warp * 32 + lane) * PAIRS), warp(warp), warps(warps), lane(lane), count(0), half(half), p(p) {
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
      const int j = first + i;
      const bool real = j < p.length;
      const i64 y = real ? p.y[DIR ? p.length - 1 - j : j] : p.blank;
      column[i] = (int)y;
      skip[i] = real && j > 0 && y != p.y[DIR ? p.length - j : j - 1];
      label[i] = State{0.0f, ZERO_EXPONENT};
      blank[i] = j ? State{0.0f, ZERO_EXPONENT} : State{1.0f, 0};
    }
    const int base = rank - rank % DIR_BLOCKS, row = CLUSTER > 1 ? 0 : DIR * DIR_WARPS;
    const int own = row + warp % DIR_WARPS, next = min(warp + 1, warps - 1), before = max(min(warp, warps) - 1, 0);
    ring = sh.ring[own], blank_emissions = sh.blank_emissions[own], own_taken = &sh.frames_taken[own];
    next_ring = in_block(sh.ring[row + next % DIR_WARPS], base + next / DIR_WARPS % DIR_BLOCKS);
    prev_taken = in_block(&sh.frames_taken[row + before % DIR_WARPS], base + before / DIR_WARPS % DIR_BLOCKS);
    for (int i = lane; i < RING; i += 32) ring[i] = {i ? 0.0f : -0.0f, ZERO_EXPONENT};  // no lap yet; before frame 0
    if (lane == 0) *own_taken = 0;
  }
  INLINE int time(int s) const { return DIR ? p.frames - 1 - s : s; }

  struct Stream {  // pointers that move with the frames
    const char *z[PAIRS], *z_blank; const State* other; State* own; float* post;
  };
  template <class V> static INLINE V* at_bytes(const char* p, int pitch, int rows) {  // pitch in bytes
    return (V*)(p + (i64)pitch * rows);
  }
  // The other direction's pair of my label j is length-1-j, of my blank j it is length-j.
  INLINE void start(Stream& at, int s) const {
    const int t = time(s), mirror = max(p.length - 1 - first, -1);
    const bits* row = p.z + (i64)p.step * t;
    UNROLL
    for (int k = 0; k < PAIRS; k++) at.z[k] = (const char*)(row + column[k]);
    at.z_blank = (const char*)(row + p.blank);
    at.other = p.table + (i64)t * PITCH + (DIR ? 0 : 2 * PLANE) + mirror;
    at.own = p.table + (i64)t * PITCH + (DIR ? 2 * PLANE : 0) + first;
    at.post = p.post + (i64)t * 2 * PLANE + (DIR ? mirror : first);
  }
  INLINE void load_other(const State* at, State* l, State* b) const {  // into l [PAIRS], b [PAIRS]
    UNROLL
    for (int k = 0; k < PAIRS; k++) l[k] = load_state(at - k), b[k] = load_state(at + PLANE + 1 - k);
  }
  // Of alpha and beta, one of which is divided by Z.
  INLINE static float posterior(State a, State b) { return a.m * b.m * exp2_whole(a.e + b.e); }

  bits ahead[PAIRS][AHEAD], blank_ahead;
  State last_l[PAIRS], last_b[PAIRS];  // of the last frame, for a loss alone

  // What the warp before hands on for the next AHEAD frames: waits until it is there, then says that it is taken. The
  // first warp finds what its ring was filled with, zeros.
  INLINE void receive(State (&before)[AHEAD], int lap, int slot, int s0, int to) {
    if (begins_strip()) {
      const State* labels = p.last_labels(DIR, warp / DIR_WARPS - 1);
      UNROLL
      for (int i = 0; i < AHEAD; i++)
        before[i] = s0 + i < to ? load_state(labels + s0 + i) : State{0.0f, ZERO_EXPONENT};
      return;
    }
    if (warp > 0)
      while ((__float_as_int(get(ring + slot + AHEAD - 1).m) < 0) != lap) ;  // the last to be written
    bool there;
    do {
      there = true;
      UNROLL
      for (int i = 0; i < AHEAD; i++)
        before[i] = get(ring + slot + i), there = there && (__float_as_int(before[i].m) < 0) == lap;
    } while (!there && warp > 0);
    UNROLL
    for (int i = 0; i < AHEAD; i++) before[i].m = fabsf(before[i].m);
    __syncwarp();
    if (warp > 0 && lane == 31) put(prev_taken, count + AHEAD);
  }

  // And hands on its own: the value after frame r lies in slot r + 1, of which only the last can be over the ring's
  // end.
  INLINE void send(const State (&last)[AHEAD], int lap, int slot, int s0, int to) {
    if (lane < 31 || warp + 1 == warps) return;
    if (ends_strip()) {
      State* labels = p.last_labels(DIR, warp / DIR_WARPS) + 1;
      UNROLL
      for (int i = 0; i < AHEAD; i++) if (s0 + i < to) store_state(labels + s0 + i, last[i]);
      return;
    }
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      const bool over = i + 1 == AHEAD && slot + AHEAD == RING;
      put(over ? next_ring : next_ring + slot + i + 1,
          State{__int_as_float(__float_as_int(last[i].m) | (lap ^ (int)over) << 31), last[i].e});
    }
  }

  // AHEAD frames from s0, whose scores are in `ahead`; FULL: two such blocks are left at least. What does not depend on
  // the states is done for all of them first: a warp has a scheduler to itself, and nothing else to wait with.
  template <bool SECOND, bool FULL>
  INLINE void block(int s0, int to, Stream& at, State (&other_l)[AHEAD][PAIRS], State (&other_b)[AHEAD][PAIRS]) {
    constexpr int row = DIR ? -PITCH : PITCH, post_row = DIR ? -2 * PLANE : 2 * PLANE;
    const int step = (DIR ? -1 : 1) * (int)sizeof(bits) * p.step, lap = (count / RING & 1) ^ 1, slot = count % RING;
    const State blanks = emission(ELEMENT::load(blank_ahead), p.limit);
    State before[AHEAD], last[AHEAD], emitted[AHEAD][PAIRS], by_blank[AHEAD];
    __syncwarp();
    if (lane < AHEAD) blank_emissions[lane] = blanks;
    __syncwarp();
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      by_blank[i] = blank_emissions[i];
      UNROLL
      for (int k = 0; k < PAIRS; k++) emitted[i][k] = emission(ELEMENT::load(ahead[k][i]), p.limit);
    }
    keep_order();  // loads into the registers that are free now; into others they would be waited for here
    UNROLL
    for (int i = 0; i < AHEAD; i++)
      UNROLL
      for (int k = 0; k < PAIRS; k++)
        if (FULL || s0 + i + AHEAD < to) ahead[k][i] = *at_bytes<const bits>(at.z[k], step, i + AHEAD);
    if (lane < AHEAD && (FULL || s0 + AHEAD + lane < to))
      blank_ahead = *at_bytes<const bits>(at.z_blank, step, AHEAD + lane);
    receive(before, lap, slot, s0, to);
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
          const State l0 = sum(label[k], blank[k], State{skip[k] ? u.m : 0.0f, skip[k] ? u.e : ZERO_EXPONENT});
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
          } else last_l[k] = l1, last_b[k] = b1;
        }
        if (SECOND && (FULL || s0 + i + AHEAD < to)) load_other(at.other + (i + AHEAD) * row, other_l[i], other_b[i]);
      }
      last[i] = label[PAIRS - 1];
    }
    if (warp + 1 < warps && !ends_strip())
      while (get(own_taken) < count + AHEAD - RING) ;  // room in the ring of the warp after
    send(last, lap, slot, s0, to);
    UNROLL
    for (int k = 0; k < PAIRS; k++) {
      label[k] = renormalised(label[k]), blank[k] = renormalised(blank[k]);
      at.z[k] = at_bytes<const char>(at.z[k], step, AHEAD);
    }
    at.z_blank = at_bytes<const char>(at.z_blank, step, AHEAD);
    at.other += AHEAD * row, at.own += AHEAD * row, at.post += AHEAD * post_row;
  }

  template <bool SECOND>
  INLINE void run(int from, int to) {
    constexpr int row = DIR ? -PITCH : PITCH;
    const int step = (DIR ? -1 : 1) * (int)sizeof(bits) * p.step;
    State other_l[AHEAD][PAIRS], other_b[AHEAD][PAIRS];
    Stream at;
    start(at, from);
    if (ends_strip() && lane == 31) store_state(p.last_labels(DIR, warp / DIR_WARPS) + from, label[PAIRS - 1]);
    UNROLL
    for (int i = 0; i < AHEAD; i++)
      if (from + i < to) {
        UNROLL
        for (int k = 0; k < PAIRS; k++) ahead[k][i] = *at_bytes<const bits>(at.z[k], step, i);
        if (SECOND) load_other(at.other + i * row, other_l[i], other_b[i]);
      }
    if (lane < AHEAD && from + lane < to) blank_ahead = *at_bytes<const bits>(at.z_blank, step, lane);
    int s0 = from;
    for (; s0 + 2 * AHEAD <= to; s0 += AHEAD) block<SECOND, true>(s0, to, at, other_l, other_b);
    for (; s0 < to; s0 += AHEAD) block<SECOND, false>(s0, to, at, other_l, other_b);
    if (!TABLES) {
      UNROLL
      for (int k = 0; k < PAIRS; k++) store_state(at.own + k, last_l[k]), store_state(at.own + PLANE + k, last_b[k]);
    }
  }

  // Where alpha and beta meet, at frame `at`, both tables have a row. Z is their product, summed by each warp for
  // itself in an order that depends on the target alone.
  INLINE State label_at_meeting(int at, int j) const {
    const State *alpha = p.table + (i64)at * PITCH, *beta = alpha + 2 * PLANE;
    return times(load_from_afar(alpha + j), load_from_afar(beta + p.length - 1 - j));
  }
  INLINE State blank_at_meeting(int at, int j) const {
    const State *alpha = p.table + (i64)at * PITCH + PLANE, *beta = alpha + 2 * PLANE;
    return times(load_from_afar(alpha + j), load_from_afar(beta + p.length - j));
  }
  INLINE State meet(int at) const {
    State all = {0.0f, ZERO_EXPONENT};
    for (int j = lane; j <= p.length; j += 32) {
      if (j < p.length) all = sum(all, renormalised(label_at_meeting(at, j)));
      all = renormalised(sum(all, renormalised(blank_at_meeting(at, j))));
    }
    for (int o = 16; o; o >>= 1) all = sum(all, State{__shfl_xor_sync(~0u, all.m, o), __shfl_xor_sync(~0u, all.e, o)});
    return renormalised(all);
  }
  INLINE void posteriors_at_meeting(int at) const {
    float* post = p.post + (i64)at * 2 * PLANE;
    for (int j = first; j < first + PAIRS && j <= p.length; j++) {
      if (j < p.length) post[j] = posterior(label_at_meeting(at, j), inverse);
      post[PLANE + j] = posterior(blank_at_meeting(at, j), inverse);
    }
  }
  INLINE void divide_by(State total) {  // all that follows is linear, and the posteriors need no division of their own
    inverse = {1.0f / total.m, -total.e};
    UNROLL
    for (int k = 0; k < PAIRS; k++) label[k] = times(label[k], inverse), blank[k] = times(blank[k], inverse);
  }
};

// States in memory: [2, pitch], labels and blanks as their direction reads them.
template <int DIR>
INLINE void load_states(Lane<DIR>& s, const State* from, int pitch) {  // from [2,pitch]
  UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int j = s.first + i;
    s.label[i] = j < s.p.length ? load_state(from + j) : State{0.0f, ZERO_EXPONENT};
    s.blank[i] = j <= s.p.length ? load_state(from + pitch + j) : State{0.0f, ZERO_EXPONENT};
  }
  if (s.lane == 0 && s.warp > 0) {  // what the warp before would have handed on; its sign says that it is there
    const State before = load_state(from + s.first - 1);
    s.ring[0] = {__int_as_float(__float_as_int(before.m) | 1 << 31), before.e};
  }
}
template <int DIR>
INLINE void store_states(const Lane<DIR>& s, State* to, int pitch) {  // to [2,pitch]
  UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int j = s.first + i;
    if (j < s.p.length) store_state(to + j, s.label[i]);
    if (j <= s.p.length) store_state(to + pitch + j, s.blank[i]);
  }
}

// What the strips of a direction do one after another, each with all that was handed on by the strip before it: `go`
// gets the states of a warp, and whether they are part of the target. from [2,pitch], or null at a sequence's ends.
template <int DIR, class Go>
INLINE void by_strips(const Problem& p, Shared& sh, int rank, const State* from, int pitch, Go go) {
  const int lane = threadIdx.x % 32, warps = p.length / (32 * PAIRS) + 1;
  const int before = CLUSTER > 1 ? rank % DIR_BLOCKS * DIR_WARPS : 0;  // warps of this direction in other blocks
  const int first = before + threadIdx.x / 32 - (CLUSTER > 1 ? 0 : DIR * DIR_WARPS);
  const int middle = (p.frames + 1) / 2, half = DIR ? p.frames - middle + 1 : middle;
  const int strips = STRIPS == 1 ? 1 : (warps + DIR_WARPS - 1) / DIR_WARPS;
  for (int strip = 0; strip < strips; strip++) {
    const int warp = first + strip * DIR_WARPS;
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
INLINE State scan(const Problem& p, Shared& sh, int rank) {
  State total = {0.0f, ZERO_EXPONENT};
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
      if (works) store_states(states, p.middle_states(DIR), PLANE);
      return;
    }
    __syncwarp();
    sync_sequence();
    second(states, works, middle);
  });
  if constexpr (STRIPS > 1) by_strips<DIR>(p, sh, rank, p.middle_states(DIR), PLANE, second);
  return total;
}

// The pitch of z's frames is below 2^29 elements, its classes are 1 apart. Targets beyond `width` columns are
// infeasible.
extern "C" __global__ void SHAPE ctc_scan(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [T,N,C], [N,width], [N], [N]
    State* table,  // [N,T+1,2,PLANE] or, for a loss alone, [N,2,2,PLANE]; between 2 PAIRS more
    float* post, State* log_z,  // [N,T,2,PLANE] or null, [N+1]: behind the last a count of losses, 0
    State* strips,  // [N, 2 STRIPS (T+1) + 4 PLANE], or null for one strip
    int stride_t, int stride_n, int T, int C, int width, int longest, int blank) {
  SHARED(Shared, sh);
  const int n = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  if (blockIdx.x == 0 && threadIdx.x == 0) log_z[gridDim.x / CLUSTER] = {0.0f, 0};
  const i64 t_n = frames[n], l_n = lengths[n];
  bool good = t_n >= 0 && t_n <= T && l_n >= 0 && l_n <= longest;
  if (good) {
    bool inside = true;
    for (int k = threadIdx.x; k < l_n && k < width; k += THREADS)
      inside = inside && y[(i64)n * width + k] >= 0 && y[(i64)n * width + k] < C;
    good = __syncthreads_and(inside);
  }
  if (!good || t_n == 0 || l_n > t_n) {
    if (rank == 0 && threadIdx.x == 0) log_z[n] = {!good ? not_a_number() : t_n || l_n ? 0.0f : 1.0f, 0};
    return;
  }
  const Problem p = {z + (i64)n * stride_n, stride_t, blank, (int)t_n, (int)l_n, fminf(2e6f, 1.8e8f / t_n),
                     y + (i64)n * width, table + 2 * PAIRS + (i64)n * (TABLES ? T + 1 : 2) * 2 * PLANE,
                     post + (i64)n * T * 2 * PLANE, strips + n * ((i64)2 * STRIPS * (T + 1) + 4 * PLANE), T + 1};
  State total;
  if (CLUSTER > 1 ? rank < DIR_BLOCKS : threadIdx.x < 32 * DIR_WARPS) total = scan<0>(p, sh, rank);
  else total = scan<1>(p, sh, rank);
  if (rank == 0 && threadIdx.x == 0) log_z[n] = total.m == total.m ? total : State{not_a_number(), BAD_SCORE};
}
#endif

#ifdef PER
constexpr int SLAB = ROWTHREADS * PER, ROWS = 256 / ROWTHREADS;
constexpr int AT_ONCE = 4;  // states that a thread loads before it adds the first

struct RowMemory {
  u32 class_posteriors[ROWS][SLAB];
  float parts[8];
  u32 counts[8];
};
// Over a warp, in one order, for all of its lanes.
struct Larger {
  static INLINE float pair(float a, float b) { return fmaxf(a, b); }
  static INLINE float warp(float v) { return warp_max(v); }
};
struct Plus {
  static INLINE float pair(float a, float b) { return a + b; }
  static INLINE float warp(float v) { return warp_sum(v); }
};
struct Total {
  static INLINE u32 pair(u32 a, u32 b) { return a + b; }
  static INLINE u32 warp(u32 v) { return warp_total(v); }
};
template <class F, class V>
INLINE V reduce_row(V v, V* parts) {  // over the threads of a row; parts [8]
  v = F::warp(v);
  if (ROWTHREADS == 32) return v;
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[0];
  for (int w = 1; w < ROWTHREADS / 32; w++) v = F::pair(v, parts[w]);
  return v;
}
INLINE void sync_row() { if (ROWTHREADS == 32) __syncwarp(); else __syncthreads(); }

// Posteriors are added as integers, units of 2^-30: their sums do not depend on an order.
INLINE u32 to_fixed(float posterior) { return (u32)__float2int_rn(posterior * 1073741824.0f); }
INLINE float inv_denominator_of(const i64* lengths, int n, int N, int mean) {  // lengths [N]; of sequence n
  return mean ? 1.0f / ((float)(lengths[n] > 1 ? lengths[n] : 1) * (float)N) : 1.0f;
}
INLINE float probability(float z, float row_max) { return exp2_approx((z - row_max) * LOG2E); }
INLINE float scaled(float v, float factor) { return v == 0.0f ? 0.0f : v * factor; }  // zeros stay zero

// The labels of a frame and their posteriors, added up by class: one slab of classes after another.
struct Labels {
  const i64* labels; const float* posteriors;  // [length] each
  u32* sums;  // [SLAB] in shared memory; where a block has the row, of the labels' classes and the blank alone
  int length, blank, thread, C;
  static constexpr bool ALL = ROWTHREADS == 32;  // classes are few, and a class is looked up rather than a label
  INLINE int in_slab(i64 c, int c0) const { return c >= c0 && c - c0 < SLAB ? (int)(c - c0) : -1; }
  INLINE void clear(int c0) const {
    if (ALL) for (int c = thread; c < SLAB && c0 + c < C; c += ROWTHREADS) sums[c] = 0;
    else for (int k = thread; k <= length; k += ROWTHREADS) {
      const int c = in_slab(k < length ? labels[k] : blank, c0);
      if (c >= 0) sums[c] = 0;
    }
    sync_row();
  }
  INLINE void add(int c0) const {
    for (int k = thread; k < length; k += ROWTHREADS) {
      const int c = in_slab(labels[k], c0);
      if (c >= 0) atomicAdd(&sums[c], to_fixed(posteriors[k]));
    }
  }
};

extern "C" __global__ void __launch_bounds__(256, 4) ctc_grad(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [T,N,C], [N,width], [N], [N]
    const float* post, const State* log_z,  // [N,T,2,plane], [N], of the scan
    const float* g,  // [N] upstream gradient, or null for 1
    bits* dz, float2* stats,  // [T,N,C] or null; [T,N] maximum of a frame, and sum relative to it, or null
    int g_stride, int stride_t, int stride_n, int d_stride_t, int d_stride_n,
    int T, int N, int C, int width, int plane, int blank, int mean) {
  SHARED(RowMemory, memory);
  const int group = threadIdx.x / ROWTHREADS, thread = threadIdx.x % ROWTHREADS;
  const u32 row = blockIdx.x * ROWS + group;  // T N < 2^31
  if (row >= (u32)T * N) return;  // a whole warp, or a whole block
  const int t = row / (u32)N, n = row - t * N;
  const State total = log_z[n];
  const bits* row_z = z + (i64)t * stride_t + (i64)n * stride_n;
  bits* row_dz = dz + (i64)t * d_stride_t + (i64)n * d_stride_n;
  if (t >= frames[n] || !(total.m > 0.0f)) {  // no frame, or no path: no gradient
    const float no_grad = total.m != total.m && total.e == BAD_SCORE && t < frames[n] ? total.m : 0.0f;
    if (dz) for (int c = thread; c < C; c += ROWTHREADS) row_dz[c] = ELEMENT::store(no_grad);
    return;
  }
  bits z_c[PER];
  UNROLL
  for (int i = 0; i < PER; i++)
    z_c[i] = i * ROWTHREADS + thread < C ? row_z[i * ROWTHREADS + thread] : ELEMENT::store(-infinity());
  const float* posteriors = post + ((i64)n * T + t) * 2 * plane;
  u32* class_posteriors = memory.class_posteriors[group];
  const Labels all = {y + (i64)n * width, posteriors, class_posteriors, (int)lengths[n], blank, thread, C};
  const int length = all.length;
  u32 blank_sum = 0, label_sum = 0;
  if (dz) {
    all.clear(0);
    for (int k0 = thread; k0 <= length; k0 += AT_ONCE * ROWTHREADS) {
      float label_posteriors[AT_ONCE], blank_posteriors[AT_ONCE];
      i64 label[AT_ONCE];
      UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        const int k = k0 + i * ROWTHREADS;
        label_posteriors[i] = k < length ? posteriors[k] : 0.0f;
        blank_posteriors[i] = k <= length ? posteriors[plane + k] : 0.0f;
        label[i] = k < length ? all.labels[k] : SLAB;
      }
      UNROLL
      for (int i = 0; i < AT_ONCE; i++) {
        const u32 g = to_fixed(label_posteriors[i]);
        blank_sum += to_fixed(blank_posteriors[i]), label_sum += g;
        if (label[i] < SLAB) atomicAdd(&class_posteriors[label[i]], g);
      }
    }
  }
  float row_max = 0.0f, row_sum = 1.0f, p_c[PER];  // scores, then probabilities times the row's sum
  UNROLL
  for (int i = 0; i < PER; i++) p_c[i] = ELEMENT::load(z_c[i]);
  if (NORMALISE) {
    float largest = -infinity();
    UNROLL
    for (int i = 0; i < PER; i++) largest = fmaxf(largest, p_c[i]);
    for (int c = SLAB + thread; c < C; c += ROWTHREADS) largest = fmaxf(largest, ELEMENT::load(row_z[c]));
    largest = reduce_row<Larger>(largest, memory.parts);
    row_max = zero_if_neg_inf(largest);
  }
  UNROLL
  for (int i = 0; i < PER; i++) p_c[i] = probability(p_c[i], row_max);
  if (NORMALISE) {
    row_sum = 0.0f;
    UNROLL
    for (int i = 0; i < PER; i++) row_sum += p_c[i];
    for (int c = SLAB + thread; c < C; c += ROWTHREADS) row_sum += probability(ELEMENT::load(row_z[c]), row_max);
    row_sum = reduce_row<Plus>(row_sum, memory.parts);
    if (stats && thread == 0) stats[row] = make_float2(row_max, row_sum);
  }
  if (!dz) return;
  blank_sum = reduce_row<Total>(blank_sum, memory.counts), label_sum = reduce_row<Total>(label_sum, memory.counts);
  // T roundings have moved the sum of a frame's posteriors from 1, by 1e-6
  const float inv_denominator = inv_denominator_of(lengths, n, N, mean), factor = g ? g[(i64)n * g_stride] : 1.0f;
  const float softmax_coef = inv_denominator / row_sum, target_coef = inv_denominator / (float)(blank_sum + label_sum);
  const auto gradient = [&](float p, u32 posterior) {
    return ELEMENT::store(scaled(fmaf(-target_coef, (float)posterior, SOFTMAX ? p * softmax_coef : 0.0f), factor));
  };
  const auto posterior = [&](int j, int c) { return class_posteriors[j] + (c == blank ? blank_sum : 0); };
  const auto put_labels = [&](int c0) {  // the classes of labels and blank of a slab, where all others have none
    if (!Labels::ALL) for (int k = thread; k <= length; k += ROWTHREADS) {
      const int j = all.in_slab(k < length ? all.labels[k] : blank, c0), c = c0 + j;
      if (j >= 0) row_dz[c] = gradient(probability(ELEMENT::load(row_z[c]), row_max), posterior(j, c));
    }
  };
  sync_row();
  UNROLL
  for (int i = 0; i < PER; i++) {
    const int c = i * ROWTHREADS + thread;
    const bits d = gradient(p_c[i], Labels::ALL ? posterior(c, c) : 0);
    if (c < C) row_dz[c] = d;
  }
  sync_row();
  put_labels(0);
  for (int c0 = SLAB; c0 < C; c0 += SLAB) {
    sync_row();
    all.clear(c0), all.add(c0);
    for (int c = c0 + thread; c < C && c < c0 + SLAB; c += ROWTHREADS)
      row_dz[c] = gradient(probability(ELEMENT::load(row_z[c]), row_max), 0);
    sync_row();
    put_labels(c0);
  }
}

// dz times each sequence's upstream gradient, in place or into `out`; nothing is read where there is nothing to do.
extern "C" __global__ void __launch_bounds__(256) ctc_scale(
    const bits* dz, bits* out,  // [T,N,C], [T,N,C] that may be dz
    const float* g, const i64* lengths,  // [N] upstream, [N]: then dz is also divided as a mean is; or null
    int g_stride, int d_stride_t, int d_stride_n, int stride_t, int stride_n, int T, int N, int C) {
  for (u32 row = blockIdx.x * ROWS + threadIdx.x / ROWTHREADS; row < (u32)T * N; row += gridDim.x * ROWS) {
    const int t = row / (u32)N, n = row - t * N;
    const float factor = g[(i64)n * g_stride] * (lengths ? inv_denominator_of(lengths, n, N, 1) : 1.0f);
    if (factor == 1.0f && dz == out) continue;
    const bits* from = dz + (i64)t * d_stride_t + (i64)n * d_stride_n;
    bits* to = out + (i64)t * stride_t + (i64)n * stride_n;
    for (int c0 = threadIdx.x % ROWTHREADS; c0 < C; c0 += SLAB) {
      bits v[PER];  // all are on their way before the first is written
      UNROLL
      for (int i = 0; i < PER; i++) if (c0 + i * ROWTHREADS < C) v[i] = from[c0 + i * ROWTHREADS];
      UNROLL
      for (int i = 0; i < PER; i++)
        if (c0 + i * ROWTHREADS < C) to[c0 + i * ROWTHREADS] = ELEMENT::store(scaled(ELEMENT::load(v[i]), factor));
    }
  }
}

struct LossMemory { double parts[256]; bool last; };
INLINE double sum_of_block(double v, double* parts) {  // for all threads, in one order; parts [256]
  parts[threadIdx.x] = v;
  __syncthreads();
  for (int o = 128; o; o >>= 1) {
    if (threadIdx.x < o) parts[threadIdx.x] += parts[threadIdx.x + o];
    __syncthreads();
  }
  return parts[0];
}

// The log-sum-exps of a sequence's frames, added in double, less log Z. The block that is the last adds all losses.
extern "C" __global__ void __launch_bounds__(256) ctc_loss(
    const float2* stats, State* log_z, const i64* frames, const i64* lengths,  // [T,N] or null, [N+1], [N], [N]
    float* loss, float* sum,  // [N]; [1] or null
    int N, int zero_infinity, int mean) {
  SHARED(LossMemory, memory);
  const int n = blockIdx.x;
  const State z = log_z[n];
  double s = 0.0;
  if (stats && z.m > 0.0f)
    for (int t = threadIdx.x; t < frames[n]; t += 256) {
      const float2 v = stats[(i64)t * N + n];
      s += (double)v.x + (double)logf(v.y);
    }
  s = sum_of_block(s, memory.parts);
  if (threadIdx.x == 0) {
    const double log_total = (double)logf(z.m) + 0.6931471805599453 * z.e;
    float l = (float)(s - log_total);
    if (stats && l < 0.0f) l = 0.0f;  // a rounding may put it below
    if (!(z.m > 0.0f)) l = z.m != z.m ? z.m : zero_infinity ? 0.0f : infinity();
    loss[n] = l * inv_denominator_of(lengths, n, N, mean);
    __threadfence();
    memory.last = sum && atomicAdd((u32*)(log_z + N), 1u) == (u32)N - 1;
  }
  __syncthreads();
  if (!memory.last) return;
  __threadfence();
  s = 0.0;
  for (int i = threadIdx.x; i < N; i += 256) s += ((volatile const float*)loss)[i];
  s = sum_of_block(s, memory.parts);
  if (threadIdx.x == 0) *sum = (float)s;
}
#endif
