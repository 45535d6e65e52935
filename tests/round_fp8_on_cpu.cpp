// The kernel of round_fp8.cu for a CPU, with its arguments as on a GPU behind (grid, threads, seed).
#include "cuda_on_cpu.h"
typedef unsigned int u32;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
static u32 e4m3(float v) {  // to the nearest, and of two to the even one; what is beyond the largest becomes that
  const u32 sign = std::signbit(v) ? 128 : 0;
  if (v != v) return sign | 127;
  const float size = std::min(std::fabs(v), 448.0f);
  if (size < 0.015625f) return sign | (u32)std::nearbyint(size * 512);  // the largest of these is the smallest of the others
  int exponent;
  const float digits = std::frexp(size, &exponent);  // 0.5 to 1
  return sign | ((u32)(exponent + 6) * 8 + (u32)std::nearbyint(digits * 16) - 8);
}
static u32 rounded_four(const float* v) { return e4m3(v[0]) | e4m3(v[1]) << 8 | e4m3(v[2]) << 16 | e4m3(v[3]) << 24; }
#include "round_fp8.cu"

extern "C" void run_round_fp8(int grid, int threads, int seed, const u16* a, const float* factors, unsigned char* straight, unsigned char* turned,
                              unsigned char* heavy, int R, int C, int width, int height, int wide, int a_stride, int straight_stride,
                              int turned_stride, int heavy_stride, double most, double unit) {
  launch(grid, threads, 1, [=] {
    round_fp8(a, factors, straight, turned, heavy, R, C, width, height, wide, a_stride, straight_stride, turned_stride, heavy_stride, most, unit);
  }, seed);
}
