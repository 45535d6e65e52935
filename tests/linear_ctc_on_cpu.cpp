// The kernels of linear_ctc.cu for a CPU, beside those of ctc.cu.
#include "ctc_on_cpu.cpp"
#define ROLLED
#define DYNAMIC_SHARED(name) Pack* name = (Pack*)here().shared.data()
inline void copy_ahead(void* to, const void* from) { memcpy(to, from, 16); }
inline void wait_for_copies() {}
#include "linear_ctc.cu"

#ifdef PAIRS
extern "C" void run_segment(int grid, int threads, int seed, const bits* z, const bits* beta_z, const i64* y, const i64* frames, const i64* lengths,
                            State* alpha, State* beta, State* table, float* post, State* log_z, State* strips, int N, int C, int begin, int K,
                            int beta_begin, int beta_K, int every) {
  launch(grid, threads, CLUSTER,
         [=] { ctc_segment(z, beta_z, y, frames, lengths, alpha, beta, table, post, log_z, strips, N, C, begin, K, beta_begin, beta_K, every); }, seed);
}
#else
extern "C" void run_targets(int grid, int threads, int seed, const i64* y, const i64* frames, const i64* lengths, i64* classes, i64* symbols,
                            i64* sizes, State* log_z, int columns, int T, int V, int N, int width, int C, int longest, int blank) {
  launch(grid, threads, 1,
         [=] { ctc_targets(y, frames, lengths, classes, symbols, sizes, log_z, columns, T, V, N, width, C, longest, blank); }, seed);
}
extern "C" void run_kept(int grid, int threads, int seed, const i64* frames, i64* kept_rows, int T, int N, int K) {
  launch(grid, threads, 1, [=] { ctc_kept(frames, kept_rows, T, N, K); }, seed);
}
extern "C" void run_finish(int grid, int threads, int seed, bits* dz, const float* tile_stats, const float* emissions, const i64* symbols, const i64* frames,
                           const i64* lengths, const float* post, const State* log_z, const float* g, const i64* kept_rows, float2* stats,
                           int rows, int V, int pitch, int tiles, int shift, int begin, int K, int N, int C, int plane) {
  launch(grid, threads, 1,
         [=] { ctc_finish(dz, tile_stats, emissions, symbols, frames, lengths, post, log_z, g, kept_rows, stats, rows, V, pitch, tiles, shift, begin, K, N, C,
                          plane); },
         seed);
}
#endif
