// The kernels of ctc.cu for a CPU, each with its arguments as on a GPU behind (grid, threads, seed).
#include "cuda_on_cpu.h"
struct State;
inline State load_state(const State* p);
inline State load_from_afar(const State* p);
inline void store_state(State* p, State s);
inline void put(State* p, State s);
inline State get(const State* p);
inline void keep_order() {}
inline void put(int* p, int v) { *p = v; }
inline unsigned warp_total(unsigned v);
inline int get(const int* p) { yield(); return *(volatile const int*)p; }
#include "ctc.cu"
inline unsigned warp_total(unsigned v) { return warp_sum(v); }
inline State load_state(const State* p) { return *p; }
inline State load_from_afar(const State* p) { return *p; }
inline void store_state(State* p, State s) { *p = s; }
inline void put(State* p, State s) { *p = s; }
inline State get(const State* p) { static int n; if (++n % 7 == 0) yield(); return *p; }

#ifdef PAIRS
extern "C" void run_scan(int grid, int threads, int seed, const bits* z, const i64* y, const i64* frames, const i64* lengths, State* table,
                         float* post, State* log_z, State* strips, int st, int sn, int T, int C, int width, int longest, int blank) {
  launch(grid, threads, CLUSTER, [=] { ctc_scan(z, y, frames, lengths, table, post, log_z, strips, st, sn, T, C, width, longest, blank); }, seed);
}
#else
extern "C" void run_grad(int grid, int threads, int seed, const bits* z, const i64* y, const i64* frames, const i64* lengths, const float* post,
                         const State* log_z, const float* g, bits* dz, float2* stats, int gs, int st, int sn, int dt, int dn, int T, int N, int C, int width, int plane,
                         int blank, int mean) {
  launch(grid, threads, 1, [=] { ctc_grad(z, y, frames, lengths, post, log_z, g, dz, stats, gs, st, sn, dt, dn, T, N, C, width, plane, blank, mean); }, seed);
}
extern "C" void run_loss(int grid, int threads, int seed, const float2* stats, State* log_z, const i64* frames, const i64* lengths,
                         float* loss, float* sum, int N, int zero_infinity, int mean) {
  launch(grid, threads, 1, [=] { ctc_loss(stats, log_z, frames, lengths, loss, sum, N, zero_infinity, mean); }, seed);
}
extern "C" void run_scale(int grid, int threads, int seed, const bits* dz, bits* out, const float* g, const i64* lengths, int g_stride,
                          int dt, int dn, int st, int sn, int T, int N, int C) {
  launch(grid, threads, 1, [=] { ctc_scale(dz, out, g, lengths, g_stride, dt, dn, st, sn, T, N, C); }, seed);
}
#endif
