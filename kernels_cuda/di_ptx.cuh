// Hopper's instructions for moving bytes and for waiting, each as one function named after the PTX it emits.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace di {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: phase `parity` is over once its arrivals and its announced bytes are all there.

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and, with a cluster barrier after it, to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// No arrival, here or at another barrier, waits for loads that were issued before it. What they read may then be overwritten by
// ordinary stores of this block, which follow them, but not by the copy engine or another block, unless an instruction before
// the arrival needs what was loaded (await_load), or fence_proxy_async(), which waits for loads, stands between.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Whether the phase is over; does not wait.
__device__ __forceinline__ bool mbarrier_over(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done != 0;
}

// The same by address in shared memory, for loops that count barriers by their addresses.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ __forceinline__ void mbarrier_wait_at(uint32_t address, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address), "r"(parity) : "memory");
}

// As mbarrier_wait, and what other blocks of the cluster wrote before they arrived is seen.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// ---- ordering

// Ordinary stores to shared memory before it are seen by wgmma and the copy engine after it (and after a barrier).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15) of `threads` threads of the block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether `value` is true in all of them.
__device__ __forceinline__ bool named_barrier_all(int id, int threads, bool value) {
  uint32_t all;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.red.and.pred q, %2, %3, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(all) : "r"(static_cast<int>(value)), "r"(id), "r"(threads) : "memory");
  return all != 0;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Orders no memory.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// 16 bytes at the address that `address` is in block `rank` of the cluster.
__device__ __forceinline__ float4 load_cluster16(uint32_t address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
  return v;
}

// Stores to the same-named place `to` of block `rank` of the cluster, where it completes on `barrier` as a copy of 16 bytes does.
__device__ __forceinline__ void store_cluster16(void* to, float4 v, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 place, full; mapa.shared::cluster.u32 place, %0, %6; mapa.shared::cluster.u32 full, %5, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%1, %2, %3, %4}, [full]; }" ::"r"(shared_address(to)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Registers of each thread of this warpgroup; the kernel needs __launch_bounds__(threads, 1).
template <int count>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Programmatic launches: this kernel's successor may start, and this kernel's predecessor has ended and its writes are seen.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- a kernel that launch_early started (di_launch.cuh), and the one before it

// Lets the dependent kernel's blocks start once every block of this one has called it or ended.
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernel before has ended and what it wrote is seen; returns at once in a kernel that was started as usual.
__device__ __forceinline__ void wait_for_producer() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A value is computed here, and not where it is used first: before a kernel waits for the one before it. Parameters too are
// fetched from memory when they are used first.
template <typename T>
__device__ __forceinline__ T* settled(T* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}
__device__ __forceinline__ int settled(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- copies from global to shared memory that complete on a barrier

// `bytes`, both addresses: multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// From this block to the same-named place `to` of another block of the cluster, where it completes on `barrier`. Both addresses and
// `bytes`: multiples of 16.
__device__ __forceinline__ void bulk_copy_cluster(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 place, full; mapa.shared::cluster.u32 place, %0, %4; mapa.shared::cluster.u32 full, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [place], [%1], %2, [full]; }" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Arrives at the same-named barrier of block `rank` of the cluster. Orders no memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}

// From shared to global memory; returns once the bytes are there. `bytes`, both addresses: multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

// The same in steps: a store of the thread's next group; the group is complete; all groups have been read; all are there.
__device__ __forceinline__ void bulk_store_begin(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// As bulk_copy, with an L2 policy (evict_first_policy: bytes that nobody reads again).
__device__ __forceinline__ void bulk_copy_hint(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box of a matrix_map, from (row, column) on; the map is a __grid_constant__ parameter.
__device__ __forceinline__ void tensor_copy(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// The same, with an L2 policy.
__device__ __forceinline__ void tensor_copy_hint(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier,
                                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
          shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// One box of a map of three dimensions, from (plane, row, column) on.
__device__ __forceinline__ void tensor_copy3(void* to, const CUtensorMap* map, int column, int row, int plane, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(barrier)) : "memory");
}

// Asks L2 for the box that tensor_copy3 would copy.
__device__ __forceinline__ void prefetch_box3(const CUtensorMap* map, int column, int row, int plane) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(column), "r"(row), "r"(plane) : "memory");
}
// The same, with an L2 policy.
__device__ __forceinline__ void prefetch_box3_hint(const CUtensorMap* map, int column, int row, int plane, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.L2::cache_hint [%0, {%1, %2, %3}], %4;" ::"l"(map), "r"(column), "r"(row),
               "r"(plane), "l"(policy) : "memory");
}

// As tensor_copy3, with an L2 policy.
__device__ __forceinline__ void tensor_copy3_hint(void* to, const CUtensorMap* map, int column, int row, int plane,
                                                  uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], "
      "%6;" ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(plane), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// One box of such a map from shared memory, with an L2 policy; the thread that stored may wait until the bytes were read.
__device__ __forceinline__ void tensor_store3(const CUtensorMap* map, const void* from, int column, int row, int plane, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;" ::"l"(map), "r"(column),
               "r"(row), "r"(plane), "r"(shared_address(from)), "l"(policy) : "memory");
}
__device__ __forceinline__ void tensor_stores_read() {
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// The same, and the bytes are there.
__device__ __forceinline__ void tensor_stores_done() {
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- copies of 16 bytes by ordinary threads

// 16 bytes, or zeros where `inside` is false.
__device__ __forceinline__ void async_copy16(uint32_t to, const void* from, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// Eight bytes of a line that others read too: L2 is asked for all of it.
__device__ __forceinline__ void async_copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// This thread's async copies have landed.
__device__ __forceinline__ void async_copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The barrier gets this thread's arrival once its earlier async copies have landed (its count includes that arrival).
__device__ __forceinline__ void async_copy_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// An 8 x 8 matrix of 16-bit elements, turned: lane l has the elements 2 (l % 4) and + 1 of row l / 4.
__device__ __forceinline__ uint32_t transpose_pairs(uint32_t pair) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Shared memory by address.
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// An instruction that needs what was loaded, for an arrival behind it (mbarrier_arrive). It does nothing: a sleep of no time.
__device__ __forceinline__ void await_load(uint32_t word) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7FC0DEAD; @p nanosleep.u32 0; }" ::"r"(word) : "memory");
}
__device__ __forceinline__ void await_load(float a, float b, float c, float d) {
  await_load(__float_as_uint(a) ^ __float_as_uint(b) ^ __float_as_uint(c) ^ __float_as_uint(d));
}

// Four 8 x 8 matrices of 16-bit elements: lane l names row l % 8 of matrix l / 8, 16 bytes, and gets of each matrix word l % 4 of
// row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ uint32_t load_shared1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared16(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// The reverse: register m of lane l holds columns 2 (l % 4) and + 1 of row l / 4 of matrix m.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// Asks for the line of an address, which must be one that may be read.
__device__ __forceinline__ void prefetch_line(const void* address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }
// The same in L2 alone.
__device__ __forceinline__ void prefetch_line_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

}  // namespace di
