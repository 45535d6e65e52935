// What kernels of several files share. The loader puts this text in the place of the line that includes it.
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

[[maybe_unused]] constexpr float LOG2E = 1.4426950408889634f;
INLINE float infinity() { return __int_as_float(0x7f800000); }
INLINE float not_a_number() { return __int_as_float(0x7fc00000); }
INLINE float zero_if_neg_inf(float x) { return x == -infinity() ? 0.0f : x; }
INLINE float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
#else
  return exp2f(x);
#endif
}
INLINE float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
#else
  return 1.0f / x;
#endif
}

// Over the lanes of a warp, in one order, for all of them.
template <class V> INLINE V warp_max(V v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
template <class V> INLINE V warp_sum(V v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
