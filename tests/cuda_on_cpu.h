// Runs a .cu file's kernels on a CPU (x86-64): a fiber for each thread of a cluster, barriers and shuffles as places where
// fibers meet. For what a kernel computes, not for its speed or for the order of its memory accesses.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define UNROLL
#define SHAPE
#define __launch_bounds__(...)
#define SHARED(type, name) type& name = *(type*)here().shared.data()  // one a kernel; full of NaN, and of large integers, before it
using std::max, std::min;
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

extern "C" void switch_fiber(void** from, void* to);
asm(R"(.text
.globl switch_fiber
switch_fiber:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
struct Meeting { int here = 0, times = 0; };
struct Fiber { void* stack_pointer; std::vector<char> stack; bool done; int block, thread; };
struct Warp { Meeting meeting; unsigned bits[32]; };
struct Block { Meeting meeting; int all; std::vector<Warp> warps; std::vector<char> shared; };
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;  // of one cluster
static Meeting cluster_meeting;
static int current, first_block;
static unsigned disorder;  // not 0: fibers take turns at random
static bool hasty;  // the first warp has most of the turns
static void* outside;
static std::function<void()> body;
static struct { int x; } threadIdx, blockIdx, blockDim, gridDim;
static long idle;  // turns since fibers last met

static void enter(int i) { current = i, threadIdx.x = fibers[i].thread, blockIdx.x = first_block + fibers[i].block; }
static void yield() {
  const int n = fibers.size(), me = current;
  if (++idle > 20000000) {  // all wait for what will not come: the kernel hangs, and is left as it is
    switch_fiber(&fibers[me].stack_pointer, outside);
  }
  int i = me;
  if (disorder) disorder = disorder * 1664525u + 1013904223u, i = (i + ((disorder >> 16) % 13 ? (disorder >> 20) % 5 : (disorder >> 8) % n)) % n;
  if (hasty && disorder >> 28 > 3) i = (disorder >> 20) % 32;
  for (int left = n; left--;) {
    i = (i + 1) % n;
    if (!fibers[i].done) break;
  }
  if (i == me && !fibers[me].done) return;
  void* const next = fibers[i].done ? outside : fibers[i].stack_pointer;
  if (!fibers[i].done) enter(i);
  switch_fiber(&fibers[me].stack_pointer, next);
}
static void start() { body(), fibers[current].done = true, yield(), abort(); }
static void meet(Meeting& m, int size) {
  const int times = m.times;
  if (++m.here == size) m.here = 0, m.times++, idle = 0;
  else while (m.times == times) yield();
}
static Block& here() { return blocks[fibers[current].block]; }
static Warp& warp_here() { return here().warps[threadIdx.x / 32]; }
static void __syncwarp() { meet(warp_here().meeting, 32); }
static void __syncthreads() { meet(here().meeting, blockDim.x); }
static bool __syncthreads_and(bool v) {
  Block& b = here();
  __syncthreads(), b.all = 1, __syncthreads();
  if (!v) b.all = 0;
  __syncthreads();
  const bool all = b.all;
  __syncthreads();
  return all;
}
static void sync_sequence() { meet(cluster_meeting, fibers.size()); }
template <class V> V exchange(V v, int from) {
  Warp& w = warp_here();
  memcpy(&w.bits[threadIdx.x % 32], &v, 4), __syncwarp();
  V r = v;
  if (from >= 0 && from < 32) memcpy(&r, &w.bits[from], 4);
  __syncwarp();
  return r;
}
template <class V> V __shfl_up_sync(unsigned, V v, int d) { return exchange(v, threadIdx.x % 32 - d); }
template <class V> V __shfl_down_sync(unsigned, V v, int d) { return exchange(v, threadIdx.x % 32 + d); }
template <class V> V __shfl_sync(unsigned, V v, int i) { return exchange(v, i); }
template <class V> V __shfl_xor_sync(unsigned, V v, int d) { return exchange(v, threadIdx.x % 32 ^ d); }
static bool __any_sync(unsigned, bool v) {
  int any = v;
  for (int o = 16; o; o >>= 1) any |= __shfl_xor_sync(0, any, o);
  return any;
}
template <class V> V atomicAdd(V* p, V v) { const V old = *p; *p += v; return old; }
static void __threadfence() {}
inline float __int_as_float(int v) { float r; memcpy(&r, &v, 4); return r; }
inline int __float_as_int(float v) { int r; memcpy(&r, &v, 4); return r; }
inline int __float2int_rn(float v) { return (int)lrintf(v); }
inline float half_to_float(unsigned short h) { _Float16 v; memcpy(&v, &h, 2); return v; }
inline unsigned short float_to_half(float f) { const _Float16 v = f; unsigned short h; memcpy(&h, &v, 2); return h; }

template <class V> V* in_block(V* p, int rank) { return (V*)(blocks.at(rank).shared.data() + ((char*)p - here().shared.data())); }

static void launch(int grid, int threads, int cluster, std::function<void()> kernel, unsigned seed) {
  blockDim.x = threads, gridDim.x = grid, idle = 0, body = kernel, disorder = seed, hasty = seed == 2;
  for (first_block = 0; first_block < grid; first_block += cluster) {
    blocks.assign(cluster, Block()), cluster_meeting = Meeting(), fibers.assign(cluster * threads, Fiber());
    for (auto& b : blocks) {
      b.warps.resize((threads + 31) / 32), b.shared.resize(1 << 18);
      std::fill_n((unsigned*)b.shared.data(), 1 << 16, 0x7ffdeadbu);
    }
    for (int i = 0; i < (int)fibers.size(); i++) {
      Fiber& f = fibers[i];
      f.block = i / threads, f.thread = i % threads, f.done = false, f.stack.resize(1 << 16);
      void** top = (void**)((size_t)(f.stack.data() + f.stack.size()) & ~(size_t)15);
      *--top = nullptr, *--top = (void*)start;
      for (int k = 0; k < 6; k++) *--top = nullptr;
      f.stack_pointer = top;
    }
    enter(0), switch_fiber(&outside, fibers[0].stack_pointer);
  }
}
