// The kernels of product_sm90.cu for a CPU, behind (grid, threads, seed): copies land whenever they like, products are computed
// as late as their group is waited for, and shared memory has the addresses, swizzles and descriptors of the GPU.
#include "cuda_on_cpu.h"
#include <deque>
#include <map>
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct TensorMap { const u16* base; int columns, rows, box_columns, box_rows; };
struct Barrier { int arrivals = 0, arrived = 0, bytes = 0; u32 phases = 0; };
struct Product { float* d; int held; u64 a, b; bool add; };
static std::map<void*, Barrier> barriers;
static std::deque<std::function<void()>> copies;  // on their way
static std::map<int, std::deque<std::vector<Product>>> groups;  // of each thread; the last one is open

static u32 address_of(const void* p) { return (char*)p - here().shared.data(); }
static char& byte_at(Block& block, u32 address) { return block.shared[address ^ (address >> 7 & 7) << 4]; }
static void changed(Barrier& b) {
  if (b.arrived == b.arrivals && b.bytes == 0) b.arrived = 0, b.phases++, idle = 0;
}
static void init_barrier(u64* b, int arrivals) { barriers[b] = Barrier{arrivals}; }
static void publish_barriers() {}
static void arrive_and_expect(u64* b, int bytes) { barriers[b].bytes += bytes, barriers[b].arrived++, changed(barriers[b]); }
static void arrive_at(u64* b, int rank) { Barrier& there = barriers[in_block(b, rank)]; there.arrived++, changed(there); }
static void land() {
  if (copies.empty() || disorder >> 28 > 8) return;
  const int i = disorder ? (disorder >> 12) % copies.size() : 0;
  const auto copy = copies[i];
  copies.erase(copies.begin() + i), copy(), idle = 0;
}
static void wait_for(u64* b, u32 parity) {
  while ((barriers[b].phases & 1) == parity) land(), yield();
}
static void sync_cluster() { sync_sequence(); }
static int cluster_rank() { return fibers[current].block; }
static void copy_box_to(void* to, const TensorMap* map, int column, int row, u64* b, u16 ranks) {
  for (int rank = 0; ranks >> rank; rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block& block = blocks[rank];
    Barrier& barrier = barriers[in_block(b, rank)];
    const u32 address = address_of(to);
    copies.push_back([=, &block, &barrier] {
      for (int r = 0; r < map->box_rows; r++)
        for (int c = 0; c < map->box_columns; c++) {
          const bool inside = row + r < map->rows && column + c < map->columns;
          const u16 v = inside ? map->base[(i64)(row + r) * map->columns + column + c] : 0;
          const u32 at = address + r * map->box_columns * 2 + c * 2;
          byte_at(block, at) = v & 255, byte_at(block, at + 1) = v >> 8;
        }
      barrier.bytes -= map->box_rows * map->box_columns * 2, changed(barrier);
    });
  }
}
static void copy_box(void* to, const TensorMap* map, int column, int row, u64* b) {
  copy_box_to(to, map, column, row, b, 1 << fibers[current].block);
}
template <int> static void give_registers() {}
template <int> static void take_registers() {}

static std::deque<std::vector<Product>>& own_groups() {
  auto& own = groups[current];
  if (own.empty()) own.emplace_back();
  return own;
}
static void begin_products() {}
static void end_of_group() { own_groups().emplace_back(); }
// Element k of row r of what a descriptor describes: K-major, swizzled by 128 bytes.
static u16 element(u64 descriptor, int r, int k) {
  if (descriptor >> 62 != 1) abort();
  const u32 start = (descriptor & 0x3fff) << 4, groups_apart = (descriptor >> 32 & 0x3fff) << 4;
  const u32 at = start + r / 8 * groups_apart + r % 8 * 128 + 2 * k;
  return (unsigned char)byte_at(here(), at) | (unsigned char)byte_at(here(), at + 1) << 8;
}
static float value_of(u16 v) {
  const u32 bits = (u32)v << 16;
  return HALF ? half_to_float(v) : __int_as_float(bits);
}
static float e4m3_to_float(int bits) {
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  const float size = (bits & 127) == 127 ? NAN : exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
  return bits >> 7 ? -size : size;
}
constexpr int NUMBERS = EIGHT ? 32 : 16;  // of 32 bytes
static float number(u64 descriptor, int r, int k) {
  if (!EIGHT) return value_of(element(descriptor, r, k));
  return e4m3_to_float(element(descriptor, r, k / 2) >> k % 2 * 8 & 255);
}
static void compute(const Product& p) {
  const int t = threadIdx.x % 128;
  for (int r = 0; r < 2; r++) {
    float row[NUMBERS];
    for (int k = 0; k < NUMBERS; k++) row[k] = number(p.a, t / 32 * 16 + t % 32 / 4 + 8 * r, k);
    for (int i = 0; i < p.held; i++) {
      if (i % 4 / 2 != r) continue;
      float sum = p.add ? p.d[i] : 0.0f;
      for (int k = 0; k < NUMBERS; k++) sum += row[k] * number(p.b, 8 * (i / 4) + 2 * (t % 4) + i % 2, k);
      p.d[i] = sum;
    }
  }
}
struct Turn { int arrived = 0, given = 0; };
static std::map<int, Turn> turns;  // of blocks and groups
static int arrive_at_turn(Turn& turn) {
  const int given = turn.given;
  if (++turn.arrived == 256) turn.arrived = 0, turn.given++, idle = 0;
  return given;
}
static void give_turn(int group) { arrive_at_turn(turns[fibers[current].block * 2 + group]); }
static void wait_for_turn(int group) {
  Turn& turn = turns[fibers[current].block * 2 + group];
  for (const int given = arrive_at_turn(turn); turn.given == given;) yield();
}
static std::map<int, Meeting> meetings;  // of warp groups: a product is one of all four warps
static void meet_group() { meet(meetings[fibers[current].block * 8 + threadIdx.x / 128], 128); }
template <int GROUPS> static void wait_products() {
  auto& own = own_groups();
  meet_group();
  for (; (int)own.size() - 1 > GROUPS; own.pop_front())
    for (const Product& p : own.front()) compute(p);
  meet_group();
}
template <int, int E> static void product(float (&d)[E], u64 a, u64 b, bool add) {
  for (int i = 0; !add && i < E; i++) d[i] = NAN;  // until they are waited for
  own_groups().back().push_back({d, E, a, b, add});
}
static u16 rounded(float v, bool half) {
  if (half) return float_to_half(v);
  const u32 bits = __float_as_int(v);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <bool F16> static u32 rounded_pair(float first, float second) { return rounded(first, F16) | (u32)rounded(second, F16) << 16; }
static void store_words(u16* p, const u32 (&words)[4]) {
  if ((size_t)p % 16) abort();  // as a GPU would
  memcpy(p, words, 16);
}
#define BY_VALUE const
#include "product_sm90.cu"

static void run_product(int grid, int threads, int seed, const u16* x, const u16* w, int N, int V, int H,
                        std::function<void(TensorMap, TensorMap)> kernel) {
  const TensorMap x_map{x, H, N, FEATURES, TOKENS}, w_map{w, H, V, FEATURES, PART};
  barriers.clear(), copies.clear(), groups.clear(), meetings.clear(), turns.clear();
  launch(grid, threads, CLUSTER, [&] { kernel(x_map, w_map); }, seed);
}
extern "C" void run_score_statistics(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, float2* stats,
                                     float* targets_z, const int* wanted, const float* bias, const float* units, int N, int V, int H) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) { score_statistics(x_map, w_map, targets, stats, targets_z, wanted, bias, units, N, V, H); });
}
extern "C" void run_score_moments(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, float2* stats, float* moments,
                                  float* targets_z, int N, int V, int H) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) { score_moments(x_map, w_map, targets, stats, moments, targets_z, N, V, H); });
}
extern "C" void run_score_maxima(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, float2* stats, float* maxima,
                                 float* targets_z, int N, int V, int H) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) { score_maxima(x_map, w_map, targets, stats, maxima, targets_z, N, V, H); });
}
extern "C" void run_exponentials(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, const float* offsets, u16* e,
                                 float* sums, float* targets_z, const int* wanted, const float* bias, const float* units, int N, int V, int H, i64 pitch,
                                 float log2_scale, float log2_cap) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) {
    exponentials(x_map, w_map, targets, offsets, e, sums, targets_z, wanted, bias, units, N, V, H, pitch, log2_scale, log2_cap);
  });
}
extern "C" void run_score_gradients(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, const float* offsets,
                                    const float* coefs, u16* e, float* targets_z, const float* bias, int N, int V, int H, i64 pitch, float log2_scale) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) {
    score_gradients(x_map, w_map, targets, offsets, coefs, e, targets_z, bias, N, V, H, pitch, log2_scale);
  });
}
extern "C" void run_entropy_gradients(int grid, int threads, int seed, const u16* x, const u16* w, const i64* targets, const float* offsets,
                                      const float* coefs, const float* slopes, const float* means, u16* e, float* targets_z, int N, int V, int H,
                                      i64 pitch, float log2_scale) {
  run_product(grid, threads, seed, x, w, N, V, H, [=](auto x_map, auto w_map) {
    entropy_gradients(x_map, w_map, targets, offsets, coefs, slopes, means, e, targets_z, N, V, H, pitch, log2_scale);
  });
}
