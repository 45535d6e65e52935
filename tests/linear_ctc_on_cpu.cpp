// The kernel of linear_ctc.cu for a CPU, beside those of ctc.cu.
#include "ctc_on_cpu.cpp"
#ifdef PAIRS
#include "linear_ctc.cu"

extern "C" void run_segment(int grid, int threads, int seed, const bits* z, const i64* y, const i64* frames, const i64* lengths,
                            const State* alpha_from, State* alpha_to, State* beta, State* table, float* post, State* log_z, int st, int sn,
                            int begin, int K, int width, int pitch) {
  launch(grid, threads, CLUSTER,
         [=] { ctc_segment(z, y, frames, lengths, alpha_from, alpha_to, beta, table, post, log_z, st, sn, begin, K, width, pitch); },
         seed);
}
#endif
