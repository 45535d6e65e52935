// CTC over a segment of the frames, so that tables of a segment are enough. The text of ctc.cu stands before this one.
//   ctc_segment  TABLES 0: alpha alone goes through the segment, from the states where it begins to those where it ends.
//                TABLES 1: alpha begins there again, beta where the segment after it left off; they meet in the middle,
//                cross and leave posteriors, and beta's states for the segment before.
// Grid: CLUSTER N blocks of THREADS. Labels are classes of z, 0 is the blank; lengths are in range.

// States at an edge of the segment: [2, pitch], labels and blanks as their direction reads them.
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

struct Edge { const State* from; State* to; int pitch; };  // from: null where the sequence itself begins

template <int DIR>
FORCED void segment(const Problem& p, const Edge& edge, Shared& sh, int rank) {
  const int lane = threadIdx.x % 32, warps = p.length / (32 * PAIRS) + 1;
  const int warp = (CLUSTER > 1 ? rank % SPLIT * EACH : 0) + threadIdx.x / 32 - (CLUSTER > 1 ? 0 : DIR * EACH);
  const int middle = (p.frames + 1) / 2, half = DIR ? p.frames - middle + 1 : middle;
  const bool works = warp < warps;
  Lane<DIR> states(p, sh, warp, warps, lane, rank, half);
  if (works && edge.from) load_states(states, edge.from, edge.pitch);
  sync_sequence();
  if (!TABLES) {
    if (works && DIR == 0) states.template run<false>(0, p.frames);
  } else {
    if (works) states.template run<false>(0, half);
    __syncwarp();
    sync_sequence();
    const State total = states.meet(middle - 1);
    if (works && total.m > 0.0f) {
      states.divide_by(total);
      if (DIR == 0) states.posteriors_at_meeting(middle - 1);
      states.template run<true>(half, p.frames);
    }
  }
  if (works && edge.to) store_states(states, edge.to, edge.pitch);
  __syncwarp();
  sync_sequence();
}

extern "C" __global__ void SHAPE ctc_segment(
    const bits* z, const i64* y, const i64* frames, const i64* lengths,  // [K,N,C], [N,width]; [N] of the whole sequences
    const State* alpha_from, State* alpha_to, State* beta,  // [N,2,pitch] each or null; beta, up to a factor, is read, then written
    State* table, float* post, State* log_z,  // [N,K+1,2,PLANE] or [N,2,2,PLANE], PAIRS more before; [N,K,2,PLANE] or null; [N]
    int stride_t, int stride_n, int begin, int K, int width, int pitch) {
  SHARED(Shared, sh);
  const int n = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int t_n = (int)frames[n], l_n = (int)min(lengths[n], (i64)t_n + 1);
  if (t_n <= begin || l_n > t_n) return;  // over before, or infeasible
  const bool last = t_n - begin <= K;
  const i64 at = (i64)n * 2 * pitch;
  const Problem p = {z + (i64)n * stride_n, stride_t, 0, last ? t_n - begin : K, l_n, fminf(2e6f, 1.8e8f / t_n), y + (i64)n * width,
                     table + (i64)n * (TABLES ? K + 1 : 2) * 2 * PLANE, post + (i64)n * K * 2 * PLANE};
  if (CLUSTER > 1 ? rank < SPLIT : threadIdx.x < 32 * EACH)
    segment<0>(p, Edge{alpha_from ? alpha_from + at : nullptr, alpha_to ? alpha_to + at : nullptr, pitch}, sh, rank);
  else segment<1>(p, Edge{beta && !last ? beta + at : nullptr, beta ? beta + at : nullptr, pitch}, sh, rank);
  if (!TABLES && last && rank == 0 && threadIdx.x == 0) {
    State total = load_from_afar(alpha_to + at + pitch + l_n);
    if (l_n) total = sum(total, load_from_afar(alpha_to + at + l_n - 1));
    total = renormalised(total);
    log_z[n] = total.m == total.m ? total : State{not_a_number(), BAD_SCORE};
  }
}
