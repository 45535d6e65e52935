// A matrix a [R,C] of bf16, each row times a factor, in FP8 (e4m3): as it is, straight [R,width], and transposed, turned
// [C,height]. Either may be null. Beyond a's columns and rows they have zeros. A row whose factor is 0 becomes 0, whatever it holds.
// Where `heavy` is not null, a number above `most` becomes 0, the others are multiplied by `unit`, and heavy [R,tiles]
// counts the former of each 128 columns; factors are not negative then. `wide`: rows of a begin at multiples of 16 bytes.
// Rows of straight begin at multiples of 8 and have a multiple of 8; rows of turned begin at multiples of 4.
// A block takes 128 rows and 128 columns. A thread has four rows and eight columns at a time: it transposes their bytes
// in registers, and shared memory puts words of four rows in order. Word `tg` of a column stands at tg ^ 2 (column / 8),
// so that neither writes nor reads meet in a bank. Grid: tiles of columns, times tiles of rows. 256 threads.
#include "common.cuh"

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")
#define SHARED(type, name) __shared__ type name
INLINE u32 rounded_four(const float* v) {  // the first in the lowest byte
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
  return low | (u32)high << 16;
}
#endif

constexpr int SIDE = 128, ROWS = 4, COLUMNS = 8, THREADS = 256, ACROSS = SIDE / COLUMNS;  // threads of a row
struct Tile { u32 words[SIDE][SIDE / ROWS]; };

struct Rounding {
  const u16* a;
  const float* factors;
  unsigned char *straight, *heavy;
  int R, C, width, wide;
  i64 a_stride, straight_stride, heavy_stride;
  float most, unit;

  INLINE uint4 load(int row, int column) const {  // 8 columns; 0 beyond the matrix
    const u16* const from = a + row * a_stride + column;
    if (row < R && wide && column + COLUMNS <= C) return *(const uint4*)from;
    u64 low = 0, high = 0;
    const int count = row < R ? min(C - column, COLUMNS) : 0;
#pragma unroll 1
    for (int i = count; i-- > 0;) high = high << 16 | low >> 48, low = low << 16 | from[i];
    return make_uint4(low, low >> 32, high, high >> 32);
  }
  INLINE void scale(float (&v)[COLUMNS], uint4 from, float factor) const {  // what has no factor is 0, also NaN
    const u32 words[COLUMNS / 2] = {from.x, from.y, from.z, from.w};
    UNROLL
    for (int i = 0; i < COLUMNS / 2; i++) {
      const u32 word = factor == 0.0f ? 0 : words[i];
      v[2 * i] = __int_as_float(word << 16) * factor, v[2 * i + 1] = __int_as_float(word & 0xffff0000) * factor;
    }
  }
  INLINE void part_heavy(float (&v)[COLUMNS], int row, int tile, int thread) const {
    float largest = v[0];
    UNROLL
    for (int i = 1; i < COLUMNS; i++) largest = fmaxf(largest, v[i]);
    int count = 0;
    if (__any_sync(~0u, largest > most)) {  // few are: most warps have none
      UNROLL
      for (int i = 0; i < COLUMNS; i++)
        if (v[i] > most) count++, v[i] = 0.0f;
      UNROLL
      for (int o = ACROSS / 2; o; o >>= 1) count += __shfl_xor_sync(~0u, count, o);
    }
    UNROLL
    for (int i = 0; i < COLUMNS; i++) v[i] *= unit;
    if (thread % ACROSS == 0 && row < R) heavy[row * heavy_stride + tile] = count;
  }
  INLINE void put_straight(const u32 (&bytes)[2], int row, int column) const {
    if (row < R && column < width) *(uint2*)(straight + row * straight_stride + column) = make_uint2(bytes[0], bytes[1]);
  }
};

// Bytes of four rows, four columns each, as those of four columns.
INLINE void transpose(u32 (&w)[ROWS]) {
  const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[0], w[1], 0x7362);
  const u32 c = __byte_perm(w[2], w[3], 0x5140), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, c, 0x5410), w[1] = __byte_perm(a, c, 0x7632);
  w[2] = __byte_perm(b, d, 0x5410), w[3] = __byte_perm(b, d, 0x7632);
}
INLINE int place_of(int word, int column) { return word ^ 2 * (column / COLUMNS); }

extern "C" __global__ void __launch_bounds__(256) round_fp8(
    const u16* a, const float* factors, unsigned char* straight, unsigned char* turned, unsigned char* heavy, int R,
    int C, int width, int height, int wide, int a_stride, int straight_stride, int turned_stride, int heavy_stride,
    double most, double unit) {
  SHARED(Tile, tile);
  const Rounding of{a, factors, straight, heavy, R, C, width, wide, a_stride, straight_stride, heavy_stride, (float)most, (float)unit};
  const int across = (C + SIDE - 1) / SIDE, number = blockIdx.x % across, thread = threadIdx.x;
  const int first_row = blockIdx.x / across * SIDE, first = number * SIDE, mine = thread % ACROSS * COLUMNS;
  constexpr int PARTS = SIDE / ROWS / (THREADS / ACROSS);  // of a thread: four rows each
  uint4 loaded[PARTS][ROWS];
  float factor[PARTS][ROWS];
  UNROLL
  for (int p = 0; p < PARTS; p++)
    UNROLL
    for (int i = 0; i < ROWS; i++) {  // all that a thread reads is on its way at once
      const int row = first_row + (thread / ACROSS + p * (THREADS / ACROSS)) * ROWS + i;
      loaded[p][i] = of.load(row, first + mine), factor[p][i] = row < R ? factors[row] : 0.0f;
    }
  UNROLL
  for (int p = 0; p < PARTS; p++) {
    const int word = thread / ACROSS + p * (THREADS / ACROSS);
    u32 bytes[ROWS][2];
    UNROLL
    for (int i = 0; i < ROWS; i++) {
      const int row = first_row + word * ROWS + i;
      float v[COLUMNS];
      of.scale(v, loaded[p][i], factor[p][i]);
      if (heavy) of.part_heavy(v, row, number, thread);
      bytes[i][0] = rounded_four(v), bytes[i][1] = rounded_four(v + 4);
      if (straight) of.put_straight(bytes[i], row, first + mine);
    }
    UNROLL
    for (int j = 0; j < 2; j++) {
      u32 four[ROWS] = {bytes[0][j], bytes[1][j], bytes[2][j], bytes[3][j]};
      transpose(four);
      UNROLL
      for (int k = 0; k < ROWS; k++) {
        const int column = mine + 4 * j + k;
        tile.words[column][place_of(word, column)] = four[k];
      }
    }
  }
  if (!turned) return;
  __syncthreads();
  for (int column = thread / 32; column < SIDE; column += THREADS / 32) {
    const int row = first_row + ROWS * (thread % 32);
    if (first + column < C && row < height)
      *(u32*)(turned + (first + column) * (i64)turned_stride + row) = tile.words[column][place_of(thread % 32, column)];
  }
}
