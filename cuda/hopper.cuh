// What compute capability 9.0 has beside threads: barriers that count bytes, copies of tiles by descriptor (TMA),
// products of a warp group (WGMMA). Addresses in shared memory are the block's own, 32 bits. Idea: PTX ISA, 9.7.
enum Numbers { BF16, F16, E4M3 };  // of matrices

#ifdef __CUDACC__
struct alignas(64) TensorMap { char bytes[128]; };  // made by cuTensorMapEncodeTiled

INLINE u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// What barriers guard is written by copies and read by products, so a block's order is enough for them: the order of a
// cluster would cost a fence of all memory at every stage.
// A barrier's phase ends when `arrivals` arrived and as many bytes came as were announced. Parities: 0, 1, 0, ...
INLINE void init_barrier(u64* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address_of(b)), "r"(arrivals));
}
INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void arrive_and_expect(u64* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address_of(b)), "r"(bytes) : "memory");
}
INLINE void arrive_at(u64* b, int rank) {  // the same barrier of another block of the cluster
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}"
               :: "r"(address_of(b)), "r"(rank) : "memory");
}
INLINE void wait_for(u64* b, u32 parity) {  // until the phase of that parity is over
  asm volatile("{.reg .pred over;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
               "@over bra done;\nbra again;\ndone:}"
               :: "r"(address_of(b)), "r"(parity) : "memory");
}
INLINE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

// A box of a matrix, whose inner corner is (column, row), to shared memory; what lies outside the matrix is 0. With
// `blocks`, bits of ranks, to the same place of each of these blocks, whose barriers count the bytes there.
INLINE void copy_box(void* to, const TensorMap* map, int column, int row, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(address_of(to)), "l"(map), "r"(column), "r"(row), "r"(address_of(b)) : "memory");
}
INLINE void copy_box_to(void* to, const TensorMap* map, int column, int row, u64* b, u16 blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(address_of(to)), "l"(map), "r"(column), "r"(row), "r"(address_of(b)), "h"(blocks) : "memory");
}

// Two warp groups that take turns: one waits for its own turn, which the other gives it. `group` is 0 or 1.
INLINE void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" :: "r"(1 + group) : "memory"); }
INLINE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" :: "r"(1 + group) : "memory"); }

template <int REGISTERS> INLINE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_of_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> INLINE void wait_products() {  // until no more than the last so many groups are on their way
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define FIRST_96                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LAST_32                                                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PRODUCT(N, K, TYPE, SIGNS, D, A, B, ADD, ...)                                                   \
  asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n" N "k" K ".f32." TYPE "." TYPE " {" D "}, " A ", " B \
               ", add, " SIGNS ";}\n" : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)add))
#define PRODUCT_192(K, TYPE, SIGNS)                                                                    \
  PRODUCT("192", K, TYPE, SIGNS, FIRST_96, "%96", "%97", "%98", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), \
          SIXTEEN(48), SIXTEEN(64), SIXTEEN(80))
#define PRODUCT_256(K, TYPE, SIGNS)                                                                             \
  PRODUCT("256", K, TYPE, SIGNS, FIRST_96 LAST_32, "%128", "%129", "%130", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), \
          SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112))
// d [64,C] of four warps += a [64,K] b [C,K]ᵀ, by descriptors of both, K numbers of 32 bytes in all; d is a bᵀ where not
// `add`. Of thread t of the group d[i] is in row 16 (t / 32) + t % 32 / 4 + 8 (i % 4 / 2), column 8 (i / 4) +
// 2 (t % 4) + i % 2.
template <Numbers OF> INLINE void product(float (&d)[96], u64 a, u64 b, bool add) {
  if (OF == E4M3) PRODUCT_192("32", "e4m3", "1, 1");
  else if (OF == F16) PRODUCT_192("16", "f16", "1, 1, 0, 0");
  else PRODUCT_192("16", "bf16", "1, 1, 0, 0");
}
template <Numbers OF> INLINE void product(float (&d)[128], u64 a, u64 b, bool add) {
  if (OF == E4M3) PRODUCT_256("32", "e4m3", "1, 1");
  else if (OF == F16) PRODUCT_256("16", "f16", "1, 1, 0, 0");
  else PRODUCT_256("16", "bf16", "1, 1, 0, 0");
}

// Two floats in 32 bits, the first one in the lower half.
template <bool F16> INLINE u32 rounded_pair(float first, float second) {
  u32 r;
  if (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
INLINE void store_words(u16* p, const u32 (&words)[4]) {  // 16 bytes at once
  *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
}
#endif

// A tile in shared memory whose rows have 128 bytes, as copy_box leaves it with a swizzle of 128 bytes: groups of eight
// rows follow each other, and the tile begins at a multiple of 1024. A row's 16 elements from `bytes` on.
INLINE u64 descriptor_of(const void* tile, int bytes) {
  const u64 address = address_of(tile) + bytes;
  return (address & 0x3ffff) >> 4 | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
