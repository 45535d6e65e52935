// A matrix a [R,C] of bf16, each row times a factor, in FP8 (e4m3): as it is, straight [R,width], and transposed, turned
// [C,height]. Either may be null. Beyond a's columns and rows they have zeros. A row whose factor is 0 is not read.
// Where `heavy` is not null, a number above `most` becomes 0, the others are multiplied by `unit`, and heavy [R,tiles]
// counts the former of each 128 columns. Of a row `filled` elements may be read, C at least. `wide`: rows of a, and of
// straight, begin at multiples of 16 bytes, and of 8; rows of turned always at multiples of 4.
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
  unsigned char *straight, *turned, *heavy;
  int R, C, filled, width, height, wide;
  i64 a_stride, straight_stride, turned_stride, heavy_stride;
  float most, unit;

  INLINE void load(float (&v)[COLUMNS], int row, int column) const {  // times the factor
    u32 words[COLUMNS / 2] = {};
    const float factor = row < R ? factors[row] : 0.0f;
    const u16* const from = a + row * a_stride + column;
    if (factor != 0.0f && wide && column + COLUMNS <= filled) {
      const uint4 four = *(const uint4*)from;
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if (factor != 0.0f) {
      UNROLL
      for (int i = 0; i < COLUMNS; i++)
        if (column + i < C) words[i / 2] |= (u32)from[i] << i % 2 * 16;
    }
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
      const float x = __int_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16) * factor;
      v[i] = column + i < C ? x : 0.0f;
    }
  }
  INLINE void part_heavy(float (&v)[COLUMNS], int row, int tile, int thread) const {
    int count = 0;
    UNROLL
    for (int i = 0; i < COLUMNS; i++) {
      const bool above = v[i] > most;
      count += above, v[i] = above ? 0.0f : v[i] * unit;
    }
    UNROLL
    for (int o = ACROSS / 2; o; o >>= 1) count += __shfl_xor_sync(~0u, count, o);
    if (thread % ACROSS == 0 && row < R) heavy[row * heavy_stride + tile] = count;
  }
  INLINE void put_straight(const u32 (&bytes)[2], int row, int column) const {
    if (row >= R) return;
    unsigned char* const to = straight + row * straight_stride + column;
    if (wide && column + COLUMNS <= width) {
      *(uint2*)to = make_uint2(bytes[0], bytes[1]);
      return;
    }
    UNROLL
    for (int i = 0; i < COLUMNS; i++)
      if (column + i < width) to[i] = bytes[i / 4] >> i % 4 * 8;
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
    int C, int filled, int width, int height, int wide, int a_stride, int straight_stride, int turned_stride,
    int heavy_stride, double most, double unit) {
  SHARED(Tile, tile);
  const Rounding of{a, factors, straight, turned, heavy, R, C, filled, width, height, wide,
                    a_stride, straight_stride, turned_stride, heavy_stride, (float)most, (float)unit};
  const int across = (C + SIDE - 1) / SIDE, number = blockIdx.x % across, thread = threadIdx.x;
  const int first_row = blockIdx.x / across * SIDE, first = number * SIDE, mine = thread % ACROSS * COLUMNS;
  UNROLL
  for (int word = thread / ACROSS; word < SIDE / ROWS; word += THREADS / ACROSS) {
    u32 bytes[ROWS][2];
    UNROLL
    for (int i = 0; i < ROWS; i++) {
      const int row = first_row + word * ROWS + i;
      float v[COLUMNS];
      of.load(v, row, first + mine);
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
      *(u32*)(turned + (first + column) * turned_stride + row) = tile.words[column][place_of(thread % 32, column)];
  }
}
