// log Z, the sum over all paths of a sparse graph through time, and its gradient. Scores [T,N,C,NZ]; edge j of state c
// comes from state idx[c,j]. Two scans at once: alpha from the start, beta from the end; they meet in the middle, where
// Z is the sum of alpha beta, and go on through each other's half, where each edge's posterior is alpha times edge
// times beta over Z.
// PHASE 0, 2N blocks: to the middle. PHASE 1, N blocks: they meet. PHASE 2, 2N blocks: on to the ends, with the
// gradient. Nothing is kept but in the place of the gradient: row t of d_scores holds alpha or beta until its edges are
// known.
// Max: alpha alone, N blocks, to the end (PHASE 0), writing down which edge was best; back along them, with the
// gradient (PHASE 2) or the path alone (PHASE 3).
// A value is m 2^e, both floating point, e whole: no exp or log between the states, and -inf is an exact zero.
// THREADS a block, PER states a thread; AHEAD rows of scores are under way in shared memory, AHEAD + 1 a power of two.
// Also fixed when compiled: REAL (float, double), SEMIRING (Log, Max) and NZ >= 2.
// Idea: forward-backward algorithm, Baum 1972; a mantissa and an exponent a state; Hirschberg 1975 for the middle.
#include "common.cuh"
typedef REAL real;
constexpr int SINGLE = sizeof(real) == 4, ROWS = AHEAD + 1;
constexpr real LOWEST = SINGLE ? -3.4e38 : -1.7e308, HUGE_SCORE = SINGLE ? 1e30 : 1e300;
constexpr real LOG2E_HIGH = 1.4426950408889634, LOG2E_LOW = SINGLE ? 1.925963033500e-08 : 2.0355273740931033e-17;

INLINE float larger(float a, float b) { return fmaxf(a, b); }  // of NaN and a number the number
INLINE double larger(double a, double b) { return fmax(a, b); }
INLINE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
INLINE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
INLINE double tiny_as_zero(double a, double b) { return a * b; }
INLINE float tiny_as_zero(float a, float b) {  // the same bits whatever a compiler does with subnormal numbers
#ifdef __CUDA_ARCH__
  float r; asm("mul.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
#else
  return a * b;
#endif
}
INLINE double exp2_approx(double x) { return exp2(x); }
// 2^d for a whole d below 128 (1024), 0 where that is no normal number: d is written into the exponent's bits.
INLINE float exp2_whole(float d) { return __int_as_float(__float_as_int(fmaxf(d, -127.0f) + 8388735.0f) << 23); }
INLINE double exp2_whole(double d) {
  return __longlong_as_double(__double_as_longlong(fmax(d, -1023.0) + 4503599627371519.0) << 52);
}

struct __align__(2 * sizeof(real)) Cell { real m, e; };
INLINE Cell times(Cell a, Cell b) { return {a.m * b.m, a.e + b.e}; }
INLINE real posterior(Cell a, Cell b) { return tiny_as_zero(a.m * b.m, exp2_whole(a.e + b.e)); }
INLINE Cell plus(Cell a, Cell b) {
  const real top = larger(larger(a.e, LOWEST), b.e);
  return {multiply_add(a.m, exp2_whole(a.e - top), b.m * exp2_whole(b.e - top)), top};
}
// e^z: the product with log2 e to all digits of z; scores so large that they have no fraction need none.
INLINE Cell edge_weight(real z) {
  const real magic = SINGLE ? 12582912.0 : 6755399441055744.0;  // adding it rounds to a whole number
  const real f = multiply_add(z, LOG2E_HIGH, magic) - magic;
  const real rest = multiply_add(z, LOG2E_LOW, multiply_add(z, LOG2E_HIGH, -f));
  const real m = exp2_approx(f * f < real(SINGLE ? 1e13 : 1e30) ? rest : real(0));
  return {z < HUGE_SCORE ? m : not_a_number(), f};
}
INLINE Cell renormalised(Cell a) {  // m in [1, 2); zero and NaN forget their exponents
  int x;
  real m;
  if (SINGLE) {
    const int bits = __float_as_int(a.m);
    x = (bits >> 23) - 127, m = __int_as_float(bits - (x << 23));
  } else {
    const i64 bits = __double_as_longlong(a.m);
    x = (int)(bits >> 52) - 1023, m = __longlong_as_double(bits - ((i64)x << 52));
  }
  return a.m > 0 ? Cell{m, a.e + x} : Cell{a.m, -infinity()};
}

// The two semirings: a value, an edge's weight, their product, and the sum over NZ edges.
struct Log {
  typedef Cell Value;
  static constexpr bool MEETS = true;
  static INLINE Value zero() { return {0, -infinity()}; }
  static INLINE Value unknown() { return {not_a_number(), 0}; }
  static INLINE Value edge(real z) { return edge_weight(z); }
  static INLINE Value mul(Value a, Value b) { return times(a, b); }
  static INLINE Value sum(const Value (&x)[NZ], int&) {
    real top = LOWEST, m = 0;
    for (int j = 0; j < NZ; j++) top = larger(top, x[j].e);
    for (int j = 0; j < NZ; j++) m = multiply_add(x[j].m, exp2_whole(x[j].e - top), m);
    return {m, top};
  }
};
struct Max {
  typedef real Value;
  static constexpr bool MEETS = false;  // of equal paths two scans might take halves that do not join
  static INLINE Value zero() { return -infinity(); }
  static INLINE Value unknown() { return not_a_number(); }
  static INLINE Value edge(real z) { return z; }
  static INLINE Value mul(Value a, Value b) { return a + b; }
  static INLINE bool before(real x, real top) { return x > top || (x != x && top == top); }
  static INLINE Value sum(const Value (&x)[NZ], int& first) {
    real top = -infinity();
    first = -1;
    for (int j = 0; j < NZ; j++) if (before(x[j], top)) top = x[j], first = j;
    return top;
  }
};

INLINE void copy_ahead(real* to, const real* from) {  // done when `arrived` says so
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"(sizeof(real)) : "memory");
#else
  *to = *from;
#endif
}
INLINE void commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
INLINE void arrived() {  // all but the last AHEAD - 2 rows
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 2) : "memory");
#endif
}

extern __shared__ __align__(16) unsigned char memory[];

// One sequence; a row is its C NZ edges at one time, from one to the next lie `pitch` (`pitch_d`) numbers.
struct Problem {
  const real* scores;  // [T,C,NZ]
  real* d;  // [T,C,NZ] the gradient, before that the table, or [T,C] best edges; null where there is none
  i64 pitch, pitch_d;
  const int* slots;  // [2,2,NZ,C]: for alpha and for beta, where each edge comes from and its column in the row
  const i64 *start, *edge;  // [C+1], [C NZ]: edges by the state they leave: beta's beyond NZ a state
  int C, width;
};

// `steps` of the scan from row `first`: alpha (DIR 0) up, beta (DIR 1) down. `own`, the thread's states, before and
// after. On the way to the middle (SECOND 0) they are written down, beyond it they meet what the other scan wrote.
template <class S, int DIR, bool SECOND>
INLINE void run(const Problem p, typename S::Value (&own)[PER], int first, int steps, Cell g_over_z) {
  typedef typename S::Value Value;
  constexpr int RARELY = 4;  // steps between renormalisations
  if (steps == 0) return;
  const int C = p.C, width = p.width, me = threadIdx.x, ring_width = width + 1 + (SECOND ? 2 * C : 0);
  Value* cells = reinterpret_cast<Value*>(memory);  // [2, C + 2]: those of the states, zero, and NaN
  // [ROWS, ring_width]: scores, one of no edge, the other's table
  real* score_ring = reinterpret_cast<real*>(cells + 2 * (C + 2));
  real* grad_rows = score_ring + ROWS * ring_width;  // [2, width]: the gradient, in the order of the edges
  int from[PER][NZ], column[PER][NZ];
  i64 more[PER], end[PER];
  for (int i = 0; i < PER; i++) {
    const int c = me + i * THREADS;
    for (int j = 0; j < NZ; j++) {
      from[i][j] = c < C ? p.slots[(DIR * 2 * NZ + j) * C + c] : C;
      column[i][j] = c < C ? p.slots[((DIR * 2 + 1) * NZ + j) * C + c] : width;
    }
    more[i] = DIR && c < C ? p.start[c] + NZ : 0, end[i] = DIR && c < C ? p.start[c + 1] : 0;
    if (c < C) cells[c] = own[i];
  }
  if (me < 2) cells[me * (C + 2) + C] = S::zero(), cells[me * (C + 2) + C + 1] = S::unknown();
  for (int r = me; r < ROWS; r += THREADS) score_ring[r * ring_width + width] = 0;
  if (SECOND)
    for (int i = me; i < 2 * width; i += THREADS) grad_rows[i] = 0;

  const i64 move = DIR ? -p.pitch : p.pitch, move_d = DIR ? -p.pitch_d : p.pitch_d;
  const real *ahead = p.scores + first * p.pitch, *table = p.d + first * p.pitch_d;
  real* row = p.d + first * p.pitch_d;
  const auto fetch = [&](int s) {
    if (s < steps) {
      real* to = score_ring + (s & AHEAD) * ring_width;
      for (int k = 0; k < PER * NZ; k++)
        if (me + k * THREADS < width) copy_ahead(to + me + k * THREADS, ahead + me + k * THREADS);
      if (SECOND)
        for (int i = 0; i < PER; i++) {
          const int c = me + i * THREADS;
          if (c < C) copy_ahead(to + width + 1 + c, table + c), copy_ahead(to + width + 1 + C + c, table + C + c);
        }
    }
    ahead += move, table += move_d;
    commit();
  };
  Value w[PER][NZ], w_next[PER][NZ];
  for (int s = 0; s < AHEAD; s++) fetch(s);
  arrived();
  __syncthreads();
  for (int i = 0; i < PER; i++)
    for (int j = 0; j < NZ; j++) w[i][j] = S::edge(score_ring[column[i][j]]);

  for (int s = 0; s < steps; s++) {
    const Value* now = cells + (s & 1) * (C + 2);
    Value* next = cells + (~s & 1) * (C + 2);
    const real *here = score_ring + (s & AHEAD) * ring_width, *coming = score_ring + (s + 1 & AHEAD) * ring_width;
    real* grad = grad_rows + (s & 1) * width;
    for (int i = 0; i < PER; i++) {
      const int c = me + i * THREADS;
      Value x[NZ];
      for (int j = 0; j < NZ; j++) x[j] = S::mul(w[i][j], now[from[i][j]]);
      for (int j = 0; j < NZ; j++) w_next[i][j] = S::edge(coming[column[i][j]]);
      int best_edge;
      Value total = S::sum(x, best_edge);
      if constexpr (S::MEETS) {
        Cell met;
        if (SECOND) {
          met = c < C ? times(Cell{here[width + 1 + c], here[width + 1 + C + c]}, g_over_z) : Cell{0, 0};
          for (int j = 0; j < NZ; j++)
            if (column[i][j] < width) grad[column[i][j]] = posterior(x[j], met);
        } else if (p.d && c < C) row[c] = own[i].m, row[C + c] = own[i].e;
        if (DIR)
          for (i64 k = more[i]; k < end[i]; k++) {
            const int at = (int)p.edge[k];
            const Cell y = times(edge_weight(here[at]), now[at / NZ]);
            if (SECOND) grad[at] = posterior(y, met);
            total = plus(total, y);
          }
        own[i] = s % RARELY == RARELY - 1 ? renormalised(total) : total;
      } else {
        if (p.d && c < C) row[c] = best_edge;
        own[i] = total;
      }
      if (c < C) next[c] = own[i];
    }
    fetch(s + AHEAD);
    arrived();
    __syncthreads();
    if (SECOND)
      for (int k = 0; k < PER * NZ; k++)
        if (me + k * THREADS < width) row[me + k * THREADS] = grad[me + k * THREADS];
    row += move_d;
    for (int i = 0; i < PER; i++)
      for (int j = 0; j < NZ; j++) w[i][j] = w_next[i][j];
  }
}

// A sum over the block in an order that is always the same; `buffer` [THREADS] in shared memory. All threads get it.
template <class T, class Add> INLINE T reduce_block(T value, Add add) {
  T* buffer = reinterpret_cast<T*>(memory);
  buffer[threadIdx.x] = value;
  __syncthreads();
  for (int n = THREADS; n > 1; n = (n + 1) / 2) {
    if (threadIdx.x < n / 2) buffer[threadIdx.x] = add(buffer[threadIdx.x], buffer[threadIdx.x + (n + 1) / 2]);
    __syncthreads();
  }
  return buffer[0];
}

struct Best { real score; int state; };

// The best path, from its end back to the start: rows of the table by the dozen in shared memory, where one thread
// follows it. The path itself is written where `states` [length+1] and `edges` [length] are wanted, else the gradient
// in the table's place.
INLINE int backtrack(const Problem p, int length, int state, real g, i64* states, i64* edges) {
  const int C = p.C, max_rows = ROWS * (NZ + 2) / 2, me = threadIdx.x;
  int* sources = reinterpret_cast<int*>(memory);  // [NZ, C]
  int* path = sources + p.width;  // [most + 1]: place of the edge taken in each row, and the state before them all
  real* best_edges = reinterpret_cast<real*>(memory + (p.width + max_rows + 2) / 2 * 8);  // [most, C]
  for (int i = me; i < p.width; i += THREADS) sources[i] = p.slots[i];
  for (int after = length; after > 0; after -= max_rows) {
    const int rows = after < max_rows ? after : max_rows, first = after - rows;
    real* d = p.d + first * p.pitch_d;
    for (int r = 0; r < rows; r++)
      for (int c = me; c < C; c += THREADS) best_edges[r * C + c] = d[r * p.pitch_d + c];
    __syncthreads();
    if (me == 0) {
      for (int r = rows - 1; r >= 0; r--) {
        const int j = state < 0 ? -1 : (int)best_edges[r * C + state];
        path[r] = j < 0 ? -1 : state * NZ + j;
        state = j < 0 ? -1 : sources[j * C + state];
        if (state >= C) state = -1;
      }
      path[max_rows] = state;
    }
    __syncthreads();
    state = path[max_rows];
    for (int r = states ? me : rows; r < rows; r += THREADS)
      states[first + r + 1] = path[r] < 0 ? -1 : path[r] / NZ, edges[first + r] = path[r] < 0 ? -1 : path[r] % NZ;
    for (int r = 0; r < rows && !states; r++)
      for (int i = me; i < p.width; i += THREADS) d[r * p.pitch_d + i] = i == path[r] ? g : real(0);
    __syncthreads();
  }
  return state;
}

struct Call {
  Problem p;
  const real *v0, *vT;  // [C], [C] of this sequence, as all below
  real *middle, *total, *z;  // [2,2,N,C] from this sequence on, [2], [1]
  const real* g;  // [1]
  real *d_v0, *d_vT;  // [C], [C]
  i64 part;  // of the middle: N C
  i64 *states, *edges;  // [T+1], [T]
  int T, length, dir, blocks;
  INLINE real& meet(int which, int part_, int c) const { return middle[(which * 2 + part_) * part + c]; }
};

template <class S> INLINE void to_the_middle(const Call a) {
  const int C = a.p.C, me = threadIdx.x, half = S::MEETS ? (a.length + 1) / 2 : a.length;
  typename S::Value own[PER];
  for (int i = 0; i < PER; i++) {
    const int c = me + i * THREADS;
    own[i] = c < C ? S::edge((a.dir ? a.vT : a.v0)[c]) : S::zero();
  }
  if (a.dir == 0) run<S, 0, false>(a.p, own, 0, half, {});
  if constexpr (S::MEETS) {
    if (a.dir) run<S, 1, false>(a.p, own, a.length - 1, a.length - half, {});
    for (int i = 0; i < PER; i++) {
      const int c = me + i * THREADS;
      if (c < C) a.meet(a.dir, 0, c) = own[i].m, a.meet(a.dir, 1, c) = own[i].e;
    }
  } else {
    Best best = {-infinity(), -1};
    for (int i = 0; i < PER; i++) {
      const int c = me + i * THREADS;
      const real score = c < C ? own[i] + a.vT[c] : -infinity();
      if (S::before(score, best.score)) best = {score, c};
    }
    best = reduce_block(best, [](Best x, Best y) {
      return S::before(y.score, x.score) || (y.score == x.score && (unsigned)y.state < (unsigned)x.state) ? y : x;
    });
    if (me == 0) a.z[0] = best.score, a.total[0] = best.state;
  }
}

template <class S> INLINE void they_meet(const Call a) {
  Cell sum = S::zero();
  for (int c = threadIdx.x; c < a.p.C; c += THREADS) {
    const Cell alpha = {a.meet(0, 0, c), a.meet(0, 1, c)}, beta = {a.meet(1, 0, c), a.meet(1, 1, c)};
    sum = renormalised(plus(sum, times(alpha, beta)));
  }
  sum = renormalised(reduce_block(sum, plus));
  if (threadIdx.x == 0) {
    a.total[0] = sum.m, a.total[1] = sum.e;
    a.z[0] = sum.m == 0 ? -infinity() : (real)multiply_add((double)sum.e, 0.6931471805599453, log((double)sum.m));
  }
}

template <class S> INLINE void to_the_ends(const Call a) {
  const int C = a.p.C, me = threadIdx.x, half = (a.length + 1) / 2;
  for (int t = a.length + a.dir; t < a.T; t += a.blocks)
    for (int i = me; i < a.p.width; i += THREADS) a.p.d[t * a.p.pitch_d + i] = 0;
  if constexpr (S::MEETS) {
    // without a path every product is zero; a Z that is no number stays visible
    const real m = a.total[0];
    const Cell g_over_z = m == 0 ? Cell{0, LOWEST} : Cell{a.g[0] / m, -a.total[1]};
    Cell own[PER];
    for (int i = 0; i < PER; i++) {
      const int c = me + i * THREADS;
      own[i] = c < C ? Cell{a.meet(a.dir, 0, c), a.meet(a.dir, 1, c)} : S::zero();
    }
    if (a.dir) run<S, 1, true>(a.p, own, half - 1, half, g_over_z);
    else run<S, 0, true>(a.p, own, half, a.length - half, g_over_z);
    for (int i = 0; i < PER; i++) {
      const int c = me + i * THREADS;
      if (c >= C) continue;
      const Cell last = times(times(own[i], edge_weight((a.dir ? a.v0 : a.vT)[c])), g_over_z);
      (a.dir ? a.d_v0 : a.d_vT)[c] = tiny_as_zero(last.m, exp2_whole(last.e));
    }
  } else {
    const int state = (int)a.total[0];
    for (int c = me; c < C; c += THREADS) a.d_vT[c] = c == state ? a.g[0] : real(0);
    const int begin = backtrack(a.p, a.length, state, a.g[0], nullptr, nullptr);
    for (int c = me; c < C; c += THREADS) a.d_v0[c] = c == begin ? a.g[0] : real(0);
  }
}

template <class S> INLINE void back_to_the_start(const Call a) {
  const int begin = backtrack(a.p, a.length, (int)a.total[0], 0, a.states, a.edges);
  if (threadIdx.x == 0) a.states[0] = begin;
  for (int t = a.length + threadIdx.x; t < a.T; t += THREADS) a.states[t + 1] = a.edges[t] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) sparse_logz(
    const real* scores, const int* slots,  // [T,N,C,NZ], [2,2,NZ,C]
    const i64* start, const i64* edge, const i64* lengths,  // [C+1], [C NZ], [N] or null: all T
    const real* v0, const real* vT,  // [N,C], [N,C]
    real* d_scores,  // [T,N,d_width] with d_width = C NZ, or C in PHASE 3; null: the sum alone is wanted
    real* middle, real* total,  // [2,2,N,C] m and e of alpha and beta, [N,2] m and e of Z; written, then read
    real* z,  // [N]
    const real* g, real* d_v0, real* d_vT,  // PHASE 2: [N], [N,C], [N,C]
    i64* states, i64* edges,  // PHASE 3: [N,T+1], [N,T]
    int T, int N, int C, int d_width) {
  const int width = C * NZ, blocks = gridDim.x / N;
  const i64 n = blockIdx.x / blocks, wanted = lengths ? lengths[n] : T, at = n * C;
  const int length = wanted < 0 ? 0 : wanted > T ? T : (int)wanted;
  const Problem p = {scores + at * NZ, d_scores ? d_scores + n * d_width : d_scores, (i64)N * width, (i64)N * d_width,
                     slots, start, edge, C, width};
  const Call call = {p, v0 + at, vT + at, middle + at, total + 2 * n, z + n, g + n, d_v0 + at, d_vT + at, (i64)N * C,
                     states + n * (T + 1), edges + n * T, T, length, (int)blockIdx.x % blocks, blocks};
  if constexpr (PHASE == 0) to_the_middle<SEMIRING>(call);
  else if constexpr (PHASE == 1) they_meet<Log>(call);
  else if constexpr (PHASE == 2) to_the_ends<SEMIRING>(call);
  else back_to_the_start<Max>(call);
}
